"""Lists, pins and figures of a state cache, in the shapes of the pipe's frames."""

from __future__ import annotations

from agentserve.worker.messages import CheckpointRow, TierRow
from statecache.store import StateCache

LISTED = 1024
"""Checkpoints of a session that a list has: the deepest, which its next turn can go on from."""


def checkpoint_rows(cache: StateCache, session: str) -> tuple[CheckpointRow, ...]:
    return tuple(
        CheckpointRow(
            id=info.id,
            position=info.position,
            kind=info.kind,
            tier=info.tier,
            bytes=info.nbytes,
            hits=info.hits,
            age_s=round(info.age_s, 3),
            tiers=info.tiers,
            pinned=info.pinned,
        )
        for info in cache.checkpoints(session, LISTED)
    )


def pin(cache: StateCache, session: str, checkpoint: str, pinned: bool) -> bool:
    """See StateBridge.pin."""
    ids = [info.id for info in cache.checkpoints(session, 1 if pinned and not checkpoint else None)]
    chosen = [name for name in ids if name == checkpoint] if checkpoint else ids
    for checkpoint_id in chosen:
        change = cache.pin if pinned else cache.unpin
        change(checkpoint_id, session)
    return bool(chosen) or not (checkpoint or pinned)


def tier_rows(cache: StateCache) -> tuple[TierRow, ...]:
    """Fastest first."""
    return tuple(
        TierRow(tier=name, used_bytes=tier.used_bytes, budget_bytes=tier.budget_bytes, checkpoints=tier.checkpoints)
        for name, tier in cache.stats().tiers.items()
    )


def figures(cache: StateCache) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
    """(bytes by tier, checkpoints by tier, counters)"""
    stats = cache.stats()
    counters: dict[str, float] = {
        "cache_matches": stats.matches,
        "cache_misses": stats.misses,
        "write_back_waiting": stats.waiting + stats.to_leave,
        "write_back_dropped": stats.dropped,
        "prefetched": stats.prefetched,
        "prefetch_used": stats.prefetch_used,
        "prefetch_wasted": stats.prefetch_wasted,
        "device_copied_bytes": stats.left_bytes,
        "device_dropped": stats.left_uncopied,
    }
    for name, tier in stats.tiers.items():
        counters |= {
            f"{name}_evictions": tier.evictions,
            f"{name}_hits": tier.hits,
            f"{name}_written_bytes": tier.written_bytes,
            f"{name}_refused": tier.refused,
            f"{name}_quarantined": tier.quarantined,
        }
    sizes = {str(name): tier.used_bytes for name, tier in stats.tiers.items()}
    counts = {str(name): tier.checkpoints for name, tier in stats.tiers.items()}
    return sizes, counts, counters
