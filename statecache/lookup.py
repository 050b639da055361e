"""Answering contexts: the deepest checkpoint that is a prefix, why a context diverges, and reading what was matched.

The owner of every Match. Not a second cache: records are in residency.py, the lock is the store's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from statecache.checkpoint import Path, Record
from statecache.errors import SegmentBad
from statecache.index.base import Index, Walk
from statecache.keys import token_bytes
from statecache.match import Match
from statecache.policy import Policy
from statecache.residency import Residency
from statecache.types import Divergence, KvRun, Payload


class Lookup:
    """Any thread may call it; it takes the store's lock for records and reads bytes without it.

    matches, misses, matched_tokens, asked_tokens: see CacheStats.
    """

    def __init__(
        self,
        namespace: bytes,
        index: Index,
        kept: Residency,
        policy: Policy,
        clock: Callable[[], float],
        lock: threading.RLock,
    ) -> None:
        self._namespace = namespace
        self._index = index
        self._kept = kept
        self._policy = policy
        self._clock = clock
        self._lock = lock
        self.matches = self.misses = self.matched_tokens = self.asked_tokens = 0

    def match(self, tokens: np.ndarray, salt: bytes, limit: int | None, session: str) -> Match:
        """See StateCache.match."""
        ids = token_bytes(tokens)
        count = len(ids) // 4
        with self._lock:
            walk = self._index.walk(salt, ids)
            record, evicted_at = self._deepest(walk, count, count if limit is None else limit)
            match = Match(self, ids, salt, session, self._divergence(walk, ids, salt, record, evicted_at))
            self.matches += 1
            self.asked_tokens += count
            if record is None:
                self.misses += 1
            else:
                self._attach(match, record)
                self.matched_tokens += record.position
            return match

    def peek(self, tokens: np.ndarray, salt: bytes) -> Match:
        """See StateCache.peek."""
        ids = token_bytes(tokens)
        with self._lock:
            walk = self._index.walk(salt, ids)
            # Something will follow, so that no logits are needed.
            record, _ = self._deepest(walk, len(ids) // 4 + 1, len(ids) // 4)
            match = Match(self, ids, salt, "", Divergence(walk.depth, "none"))
            if record is not None:
                self._attach(match, record, counts=False)
            return match

    def depth(self, tokens: np.ndarray, salt: bytes) -> int:
        """See StateCache.depth."""
        ids = token_bytes(tokens)
        with self._lock:
            record, _ = self._deepest(self._index.walk(salt, ids), len(ids) // 4, len(ids) // 4)
            return record.position if record is not None else 0

    # ── what a match calls ───────────────────────────────────────────────────────────────────────────────────────

    def release_match(self, match: Match) -> None:
        """See Match.release."""
        with self._lock:
            record, match.record = match.record, None
            if match.resident is not None:
                match.resident.readers -= 1
                match.resident = None
            elif record is not None:
                record.in_use -= 1
            if record is not None:
                self._kept.go_if_spoiled(record)

    def read_match(self, match: Match, kv_out: np.ndarray | None, stop: Callable[[], bool] | None) -> Payload:
        """See Match.read."""
        while True:
            record = match.record
            if record is None:
                if match.position:
                    raise RuntimeError("read() of a released match")
                return Payload(0, (), {}, None)
            if match.resident is not None and self._kept.device is not None:
                if stop is not None:
                    return Payload(0, (), {}, None)
                return _into(kv_out, self._kept.device.read(match.resident))
            with self._lock:
                shelf = self._kept.shelf_of(record)
                ids = match.ids[: 4 * record.position]
                path = Path(self._namespace, match.salt, ids, b"")
            if shelf is None:  # it was bad in every tier
                with self._lock:
                    self._fall_back(match, record)
                continue
            try:
                return shelf.read(record, path, kv_out, stop=stop)
            except SegmentBad as error:
                with self._lock:
                    self._kept.quarantine(shelf, error, record)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _deepest(self, walk: Walk, count: int, limit: int) -> tuple[Record | None, int]:
        """(record, position of the deepest evicted checkpoint beyond it or 0)."""
        evicted_at = 0
        for position, mark in walk.marks(limit):
            record = self._kept.records.get(mark)
            if record is None or record.spoiled:
                evicted_at = max(evicted_at, position if position < count else 0)
                continue
            if position == count and not self._kept.has_logits(record):
                continue
            return record, evicted_at
        return None, evicted_at

    def _divergence(self, walk: Walk, ids: bytes, salt: bytes, record: Record | None, evicted_at: int) -> Divergence:
        depth = walk.depth
        if record is None and self._policy.tell_other_salts:
            for other in self._index.agrees_elsewhere(salt, ids):
                if other.depth > depth and any(mark in self._kept.records for _, mark in other.marks(other.depth)):
                    return Divergence(depth, "salt")
        if depth == 0:
            return Divergence(0, "cold")
        if evicted_at > (record.position if record else 0):
            return Divergence(depth, "evicted")
        if depth == len(ids) // 4 or walk.tip:
            return Divergence(depth, "none")
        return Divergence(depth, "tokens")

    def _attach(self, match: Match, record: Record, *, counts: bool = True) -> None:
        """counts: somebody asked for it; else it is only looked at, for a context that goes on behind it."""
        if counts:
            record.hits += 1
            record.used_at = self._clock()
            self._kept.join(record, match.session)
            self._kept.prefetch_used += record.prefetched
            record.prefetched = False
        match.record = record
        match.position = record.position
        match.checkpoint_id = record.id
        match.kind = record.kind
        device = self._kept.device
        resident = None if device is None else device.residents.get(record.id)
        goes_on = not counts or 4 * record.position < len(match.ids)
        if device is not None and resident is not None and (resident.logits or goes_on):
            resident.readers += 1
            device.hits += counts
            match.resident, match.tier, match.nbytes = resident, "device", 0
            return
        shelf = self._kept.shelf_of(record)
        assert shelf is not None
        record.in_use += 1
        shelf.hits += counts
        match.tier = shelf.tier.name
        match.nbytes = shelf.context_bytes(record.position)

    def _fall_back(self, match: Match, record: Record) -> None:
        self.release_match(match)
        match.position = match.nbytes = 0
        match.checkpoint_id = match.kind = match.tier = None
        walk = self._index.walk(match.salt, match.ids)
        shorter, _ = self._deepest(walk, len(match.ids) // 4, record.position - 1)
        if shorter is not None:
            self._attach(match, shorter)


def _into(kv_out: np.ndarray | None, payload: Payload) -> Payload:
    if kv_out is None:
        return payload
    kv_out[: payload.position] = payload.kv[0].rows
    return Payload(payload.position, (KvRun(0, kv_out[: payload.position]),), payload.state, payload.logits)
