"""Copies checkpoints to the durable tier in the background, so that no turn waits for a disk.

What waits is a list of ids whose bytes lie in the memory tier, so the queue needs no memory of its own and its bound is that
tier's budget. A failing disk is told once, tried again now and then, and told once more when it works; so is one that is too
slow for what is saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from statecache.copies import SEALED_TOGETHER
from statecache.errors import TierError, TierFailed
from statecache.store import StateCache

log = logging.getLogger(__name__)
RETRY_S = 10.0
"""Between attempts on a disk that fails or has no room."""
IDLE_S = 60.0
MOST_BATCHES = 2
"""Between two calls of after_copies: what it does costs about as much for many as for one."""
HOUR_S = 3600


class Allowance:
    """Bytes that may be written: `per_hour` at most in any hour after an idle one, refilled evenly; 0 = without limit.

    Integers only. A checkpoint is written whole, so the balance may go below zero once.
    """

    def __init__(self, per_hour: int, now_s: int = 0) -> None:
        self._per_hour = per_hour
        self._left = per_hour * HOUR_S  # in 3,600ths of a byte, so that no fraction is lost
        self._at_s = now_s

    def spend(self, nbytes: int) -> None:
        self._left -= nbytes * HOUR_S

    def wait_s(self, now_s: int) -> int:
        """Seconds until something may be written again; 0 = now."""
        if not self._per_hour:
            return 0
        self._left = min(self._per_hour * HOUR_S, self._left + (now_s - self._at_s) * self._per_hour)
        self._at_s = now_s
        return 0 if self._left > 0 else 1 - self._left // self._per_hour


class Writer:
    """One thread that calls `cache.copy_next()` while something waits. Make one per write-behind cache, close() it at the end.

    bytes_per_hour: see Allowance; flash cells wear out. before_copy: called in the writing thread before each few copies and
    about once a minute; may raise TierFailed. after_copies: when nothing is left to write, and after MOST_BATCHES; returns in
    how many seconds it wants to be called again. on_idle: called there whenever nothing is left to write. Neither may raise.
    """

    def __init__(
        self,
        cache: StateCache,
        *,
        bytes_per_hour: int = 0,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
        before_copy: Callable[[], None] = lambda: None,
        after_copies: Callable[[], float] = lambda: IDLE_S,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._retry_s = retry_s
        self._before_copy = before_copy
        self._after_copies = after_copies
        self._batches = 0
        self.on_idle: Callable[[], None] = lambda: None
        self._allowance = Allowance(bytes_per_hour, int(clock()))
        self._one = threading.Lock()  # flush() copies and settles too, and each trouble is told once
        self._wake = threading.Event()
        self._stop = False
        self._trouble = ""
        self._dropped = cache.dropped
        self._behind = False
        self.writing = False
        """A copy is under way."""
        cache.on_waiting = self._wake.set
        self._thread = threading.Thread(target=self._run, name="write-back", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why nothing can be written now; empty when it can."""
        return self._trouble

    def want(self, checkpoint_ids: Iterable[str]) -> None:
        """Copy these soon, in this order. Returns at once."""
        self._cache.want(checkpoint_ids)
        self._wake.set()

    def flush(self, limit_s: float, *, everything: bool = False) -> bool:
        """Copy what waits now, for about `limit_s` seconds at most. True when nothing is left.

        everything: all that only memory has, not only what was wanted.
        """
        until = self._clock() + limit_s
        if everything:
            self._cache.want_all()
        while self._clock() < until and not self._allowance.wait_s(int(self._clock())):
            if not self._copy():
                self._settle()
                return not self._trouble
        return False

    def close(self, limit_s: float = 0.0, *, everything: bool = False) -> bool:
        """Flush, then end the thread; a copy that is under way is finished."""
        done = self.flush(limit_s, everything=everything)
        self._stop = True
        self._wake.set()
        self._thread.join()
        self._settle()
        return done

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._stop:
            self._wake.clear()
            over_s = self._allowance.wait_s(int(self._clock()))
            if not over_s and self._copy():
                continue
            again_s = self._settle()
            self.on_idle()
            pause_s = self._retry_s if self._trouble else min(IDLE_S, again_s)
            if not self._stop:
                self._wake.wait(min(over_s, pause_s) if over_s else pause_s)

    def _copy(self) -> bool:
        """A few checkpoints. False when nothing waits or nothing can be written now."""
        with self._one:
            return self._copy_some()

    def _copy_some(self) -> bool:
        try:
            self.writing = True
            self._before_copy()
            written = self._cache.copy_next(SEALED_TOGETHER)
        except TierFailed as error:
            self._tell(str(error))
            return False
        except TierError as error:  # no room for this one; a smaller one may fit
            self._tell(str(error))
            return True
        except Exception:
            log.exception("write-back failed")
            return False
        finally:
            self.writing = False
        self._look_behind(idle=written is None)
        if written is None:
            return False
        self._allowance.spend(written)
        if self._trouble:
            log.warning("saved states are written to disk again")
            self._trouble = ""
        self._batches += 1
        if self._batches >= MOST_BATCHES:
            self._batches = 0
            self._after_copies()
        return True

    def _settle(self) -> float:
        with self._one:
            self._batches = 0
            return self._after_copies()

    def _look_behind(self, *, idle: bool) -> None:
        """Whether states left memory before their turn to be written came."""
        dropped, self._dropped = self._cache.dropped - self._dropped, self._cache.dropped
        if dropped and not self._behind:
            log.warning("the disk is too slow for what is saved: some states are gone from memory before they are written")
            self._behind = True
        elif idle and not dropped and self._behind:
            log.warning("the disk keeps up with what is saved again")
            self._behind = False

    def _tell(self, trouble: str) -> None:
        if not self._trouble:
            log.warning("saved states stay in memory only until this is over: %s", trouble)
        self._trouble = trouble
