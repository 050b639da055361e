"""Tiers for replays: they charge what a full-size model would need and keep only as much as the replay wants to check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from benchmarks.traces.rates import KV_TOKEN_BYTES, LOGITS_BYTES, STATE_BYTES
from statecache.errors import TierError, TierFull
from statecache.store import StateCache
from statecache.tiers.base import SegmentHeader
from statecache.tiers.ram import RamTier
from statecache.types import TierName


class Metered(RamTier):
    """Remembers what was written: bytes and number of segments by what they are (extent, state, logits)."""

    def __init__(self, budget_bytes: int, *, name: TierName = "ram", extent_blocks: int = 1) -> None:
        super().__init__(budget_bytes, name=name)
        self.extent_blocks = extent_blocks
        self.written: Counter[str] = Counter()
        self.segments: Counter[str] = Counter()

    def put(self, key: bytes, header: SegmentHeader, parts: Mapping[str, np.ndarray]) -> int:
        cost = self._store(key, header, parts)
        self.written[header.what] += cost
        self.segments[header.what] += 1
        return cost

    def _store(self, key: bytes, header: SegmentHeader, parts: Mapping[str, np.ndarray]) -> int:
        return super().put(key, header, parts)


class CountingTier(Metered):
    """Charges for full-size bytes and keeps only their number, so that terabytes can be replayed. Reads give zeros."""

    def _store(self, key: bytes, header: SegmentHeader, parts: Mapping[str, np.ndarray]) -> int:
        cost = self.cost(header, {name: array.nbytes for name, array in parts.items()})
        self.delete(key)
        if cost > self.budget_bytes - self.used_bytes:
            raise TierFull(self.name, cost, self.budget_bytes - self.used_bytes)
        zeros = {name: np.broadcast_to(np.zeros(1, np.uint8), (array.nbytes,)) for name, array in parts.items()}
        self._segments[key] = (header, zeros, {}, cost)
        self._used += cost
        return cost


class ScaledTier(Metered):
    """Keeps the small states of a stand-in engine and charges what those of the full-size model would weigh.

    kv_token_bytes: what the stand-in has per token.
    """

    def __init__(self, budget_bytes: int, kv_token_bytes: int, *, name: TierName = "ram", extent_blocks: int = 1) -> None:
        super().__init__(budget_bytes, name=name, extent_blocks=extent_blocks)
        self._kv_token_bytes = kv_token_bytes

    def cost(self, header: SegmentHeader, parts: Mapping[str, int]) -> int:
        total = 0
        for name, nbytes in parts.items():
            if name.startswith("kv"):
                total += nbytes // self._kv_token_bytes * KV_TOKEN_BYTES
            else:
                total += LOGITS_BYTES if name == "logits" else STATE_BYTES
        return total


def copy_wanted(cache: StateCache) -> None:
    """Do what the background writer does, at once: bring everything that was chosen to the second tier."""
    while True:
        try:
            if cache.copy_one() is None:
                return
        except TierError:
            continue
