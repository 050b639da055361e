"""What can go wrong in the state cache, and who recovers.

StateCacheError
├── PayloadMismatch      the caller handed bytes that do not fit the layout or the position: a bug, never stored
└── TierError
    ├── TierFull         no room even after eviction: the checkpoint is not kept, the request goes on
    ├── Collision            a block key names two token paths: the path is not kept
    ├── TierFailed       a write did not happen: what was written of it is taken back, the request goes on
    └── SegmentBad       missing, short, aged or corrupt bytes: quarantined, the next shorter checkpoint is used
"""

from __future__ import annotations


class StateCacheError(Exception):
    """Base of every error raised here."""


class PayloadMismatch(StateCacheError):
    """A payload's component is missing, has another size or another position than its checkpoint."""


class TierError(StateCacheError):
    """A tier could not do what was asked."""


class TierFull(TierError):
    """The tier has no room. The store evicts first; when that is not enough it keeps nothing."""

    def __init__(self, tier: str, needed: int, free: int) -> None:
        super().__init__(f"tier {tier}: need {needed} bytes, {free} free")


class TierFailed(TierError):
    """A write failed in the tier's own medium."""


class SegmentBad(TierError):
    """A segment is not what its record says. `key` names the segment, so that all that depend on it can be dropped."""

    def __init__(self, tier: str, key: bytes, reason: str) -> None:
        super().__init__(f"tier {tier}: segment {key.hex()}: {reason}")
        self.key = key
        self.reason = reason


class ReadStopped(TierError):
    """Somebody else needs the medium more, or nobody needs the bytes any more."""


class Collision(TierError):
    """A block key names another path already. Nothing is stored under it; the new path simply is not kept."""
