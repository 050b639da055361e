"""Reads the disk beside the running turns, on one thread: what a turn waits for, and, if the disk has time, what is
expected.

One thread, so that a turn whose checkpoint is just being prefetched finds it in memory instead of reading it a second time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from statecache.errors import ReadStopped
from statecache.match import Match
from statecache.policy import prefetch_pause_us
from statecache.prefetch import Prefetcher
from statecache.types import Payload

log = logging.getLogger(__name__)


class Reading:
    """A matched checkpoint that is read for a turn. done: payload or error is set, and the match is the caller's again."""

    def __init__(self, match: Match, told: Callable[[], None]) -> None:
        self.match = match
        self.payload: Payload | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.done = False
        self.told = told
        self.given_up = False


class Reader:
    """writing(): whether saved states are being written to the same disk. One thread after start(); close() ends it."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        *,
        writing: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prefetcher = prefetcher
        prefetcher.on_wanted = self._wake_up
        self._writing = writing
        self._clock = clock
        self._waiting: deque[Reading] = deque()
        self._running: Reading | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        self._read_us = 0
        self._ended_at = clock()
        self._thread: threading.Thread | None = None

    def read(self, match: Match, told: Callable[[], None]) -> Reading:
        """Read it soon. told(): from the reading thread, when it is done. The match must not be touched until then."""
        reading = Reading(match, told)
        with self._lock:
            self._waiting.append(reading)
        self._wake_up()
        return reading

    def give_up(self, reading: Reading) -> None:
        """Nobody waits for it any more; its match is released, at once or when the segment that is being read is over."""
        with self._lock:
            reading.given_up = True
            if reading is self._running:
                return  # work() releases it
            if not reading.done:
                self._waiting.remove(reading)
        reading.match.release()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="read-back", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What waits is given up, and so is what is being read."""
        self.prefetcher.close()
        with self._lock:
            self._stop = True
            waiting, running = list(self._waiting), self._running
        for reading in [*waiting, *([running] if running is not None else [])]:
            self.give_up(reading)
        self._wake_up()
        if self._thread is not None:
            self._thread.join()

    def work(self) -> int | None:
        """Do one thing if there is time for it. Microseconds until the next may be done; None: nothing is wanted."""
        with self._lock:
            reading = self._running = self._waiting.popleft() if self._waiting else None
        if reading is not None:
            self._bring(reading)
            return 0
        waited_s = self.prefetcher.waited_s
        if waited_s is None:
            return None
        pause_us = prefetch_pause_us(
            restoring=bool(self._waiting),
            writing=self._writing(),
            waited_us=round(waited_s * 1e6),
            read_us=self._read_us,
            since_us=round((self._clock() - self._ended_at) * 1e6),
        )
        if not pause_us:
            began_at = self._clock()
            self.prefetcher.work(self._must_give_way)
            self._ended_at = self._clock()
            self._read_us = round((self._ended_at - began_at) * 1e6)
        return pause_us

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _wake_up(self) -> None:
        self._wake.set()

    def _must_give_way(self) -> bool:
        """A turn waits, and not for what is being prefetched."""
        with self._lock:
            return self._stop or any(r.match.checkpoint_id != self.prefetcher.reads for r in self._waiting)

    def _bring(self, reading: Reading) -> None:
        began_at = self._clock()
        try:
            reading.payload = reading.match.read(stop=lambda: reading.given_up)
        except ReadStopped as error:
            reading.error = error
        except Exception as error:
            log.warning("saved state not read position=%d", reading.match.position, exc_info=True)
            reading.error = error
        reading.seconds = self._clock() - began_at
        with self._lock:
            self._running = None
            reading.done = True
        if reading.given_up:
            reading.match.release()
        else:
            reading.told()

    def _run(self) -> None:
        pause_us: int | None = None
        while not self._stop:
            self._wake.wait(None if pause_us is None else pause_us / 1e6)
            self._wake.clear()
            pause_us = 0
            while pause_us == 0 and not self._stop:
                pause_us = self.work()
