"""Brings checkpoints from disk to memory before their turn comes, one at a time; reader.py says when.

An agent that connects, or names the response it goes on from, will soon ask for what was saved of that session. Nothing waits
for it here: reading and splitting happen outside of the cache's lock, and what is put into memory is put there without another
copy. Bounded: what was brought and not used yet takes a quarter of the memory tier at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from statecache.errors import ReadStopped, TierError
from statecache.store import StateCache
from statecache.tiers.base import Take
from statecache.types import BLOCK_TOKENS, Boundary, KvRun, Payload

log = logging.getLogger(__name__)
EXPECTED_S = 120.0
"""How long the state of an expected turn is evicted after all others: nine of ten recorded pauses are shorter."""
MOST_EXPECTED = 1024


@dataclass(eq=False)
class _Wanted:
    tokens: np.ndarray
    salt: bytes
    since: float
    cancelled: bool = False


class Prefetcher:
    """key: whoever expects something, such as a socket; it expects one thing at a time."""

    def __init__(self, cache: StateCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._waiting: OrderedDict[str, _Wanted] = OrderedDict()
        self._running: tuple[str, _Wanted] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.reads: str | None = None
        """Id of the checkpoint that is being read."""
        self.on_wanted: Callable[[], None] = lambda: None

    @property
    def waited_s(self) -> float | None:
        """For how long the next one has waited; None when nothing is wanted."""
        with self._lock:
            first = next(iter(self._waiting.values()), None)
        return None if first is None else self._clock() - first.since

    def expect(self, key: str, tokens: np.ndarray, salt: bytes) -> None:
        """A turn whose context begins like `tokens` will come. Returns at once; what is in memory is only protected."""
        if not self._cache.expect(tokens, salt, EXPECTED_S):
            return
        with self._lock:
            if self._closed:
                return
            self._waiting[key] = _Wanted(tokens, salt, self._clock())
            while len(self._waiting) > MOST_EXPECTED:
                self._waiting.popitem(last=False)
        self.on_wanted()

    def cancel(self, key: str) -> None:
        """It does not expect anything any more. What is being read for it is given up."""
        with self._lock:
            self._waiting.pop(key, None)
            if self._running is not None and self._running[0] == key:
                self._running[1].cancelled = True

    def close(self) -> None:
        """Nothing is wanted any more, and what is being read is given up."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._running is not None:
                self._running[1].cancelled = True

    def work(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Bring one. stop: it has to give way; it is tried again later. False: nothing is wanted."""
        with self._lock:
            if not self._waiting:
                return False
            self._running = self._waiting.popitem(last=False)
            key, wanted = self._running
        again = False
        try:
            self._bring(wanted, stop)
        except ReadStopped:
            again = not wanted.cancelled
        except TierError as error:
            log.info("checkpoint not prefetched reason=%s", error)
        except Exception:
            log.warning("prefetch failed", exc_info=True)
        finally:
            with self._lock:
                self._running = self.reads = None
                if again and key not in self._waiting:
                    self._waiting[key] = wanted
                    self._waiting.move_to_end(key, last=False)
        return True

    def _bring(self, wanted: _Wanted, stop: Callable[[], bool]) -> None:
        with self._cache.peek(wanted.tokens, wanted.salt) as match:
            if match.tier != "disk" or match.kind is None or not self._cache.may_prefetch(match.nbytes):
                return
            self.reads = match.checkpoint_id
            payload = match.read(stop=lambda: wanted.cancelled or stop())
            if match.position != payload.position or payload.position == 0:
                return
            boundary = Boundary(match.position, match.kind)
            split = _split(payload, self._cache.take)
            if not wanted.cancelled:
                self._cache.put_prefetched(wanted.tokens, wanted.salt, boundary, split)


def _split(payload: Payload, take: Take) -> Payload:
    """The same with an array of its own for each block and part, read-only, so that memory keeps them without a copy."""
    runs: list[KvRun] = []
    for run in payload.kv:
        edges = [
            run.start,
            *range(run.start // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS, run.start + len(run.rows), BLOCK_TOKENS),
        ]
        for start, stop in zip(edges, [*edges[1:], run.start + len(run.rows)], strict=True):
            runs.append(KvRun(start, _own(run.rows[start - run.start : stop - run.start], take)))
    logits = None if payload.logits is None else payload.logits.copy()
    return Payload(payload.position, tuple(runs), {name: _own(part, take) for name, part in payload.state.items()}, logits)


def _own(array: np.ndarray, take: Take) -> np.ndarray:
    root = take(array.nbytes)
    copy = root.reshape(array.shape)
    copy[...] = array
    root.flags.writeable = copy.flags.writeable = False
    return copy
