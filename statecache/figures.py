"""What a state cache says of itself in numbers."""

from __future__ import annotations

from statecache.checkpoint import CacheStats, TierStats
from statecache.index.base import Index
from statecache.lookup import Lookup
from statecache.placing import Placing
from statecache.residency import DEVICE, Residency
from statecache.types import TierName


def figures(index: Index, kept: Residency, lookup: Lookup, placing: Placing) -> CacheStats:
    """Called under the store's lock."""
    tiers: dict[TierName, TierStats] = {shelf.tier.name: shelf.stats() for shelf in kept.shelves}
    device, moves = kept.device, placing.moves
    if device is not None:
        tiers = {DEVICE: device.stats(), **tiers}
    return CacheStats(
        tiers,
        len(kept.records),
        lookup.matches,
        lookup.misses,
        lookup.matched_tokens,
        lookup.asked_tokens,
        placing.collisions,
        index.tokens,
        len(index),
        len(kept.waiting),
        kept.dropped,
        0 if moves is None else moves.waiting,
        0 if device is None else device.copied_bytes,
        0 if device is None else device.dropped,
        kept.prefetched,
        kept.prefetch_used,
        kept.prefetch_wasted,
    )
