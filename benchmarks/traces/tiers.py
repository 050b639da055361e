"""Tiers for replays: they charge what a full-size model would need and keep only as much as the replay wants to check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.traces.rates import KV_TOKEN_BYTES, LOGITS_BYTES, STATE_BYTES
from statecache.errors import TierError
from statecache.store import StateCache
from statecache.tiers.base import Part, SegmentHeader
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import TierName

KV_BYTES = 8
"""What a stand-in state has per token."""
SCALE = KV_TOKEN_BYTES // KV_BYTES
"""Budgets and costs are divided by this, so that the store's own sums over its layout come out right."""


class ScaledTier(RamTier):
    """Keeps the small states of a stand-in and charges, to scale, what those of the full-size model would weigh.

    budget_bytes: full size. written, segments: full-size bytes and number of what was stored, by what it is (extent, state,
    logits).
    """

    def __init__(self, budget_bytes: int, *, name: TierName = "ram", extent_blocks: int = 1) -> None:
        super().__init__(budget_bytes // SCALE, name=name)
        self.stays = False
        self.extent_blocks = extent_blocks
        self.written: Counter[str] = Counter()
        self.segments: Counter[str] = Counter()

    def cost(self, header: SegmentHeader, parts: Mapping[str, int]) -> int:
        total = 0
        for name, nbytes in parts.items():
            if name.startswith("kv"):
                total += nbytes
            else:
                total += (LOGITS_BYTES if name == "logits" else STATE_BYTES) // SCALE
        return total

    def put(self, key: bytes, header: SegmentHeader, parts: Mapping[str, Part], *, sealed: bool = True) -> int:
        cost = super().put(key, header, parts, sealed=sealed)
        self.written[header.what] += cost * SCALE
        self.segments[header.what] += 1
        return cost


def tiers_of(ram_bytes: int, disk_bytes: int) -> list[ScaledTier]:
    """Memory, and a disk unless its budget is 0."""
    tiers = [ScaledTier(ram_bytes)]
    if disk_bytes:
        tiers.append(ScaledTier(disk_bytes, name="disk", extent_blocks=DiskTier.extent_blocks))
    return tiers


def copy_wanted(cache: StateCache) -> None:
    """Do what the background writer does, at once: bring everything that was chosen to the second tier."""
    while True:
        try:
            if cache.copy_next() is None:
                return
        except TierError:
            continue
