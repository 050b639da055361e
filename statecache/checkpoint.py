"""Records: what the store remembers of a checkpoint, and what it tells others."""

from __future__ import annotations

from dataclasses import dataclass, field

from statecache.types import BoundaryKind, TierName


@dataclass(frozen=True, slots=True)
class PutResult:
    """checkpoint_id None: not kept, `reason` says why. existed: was there already. written_bytes: charged for what is new."""

    checkpoint_id: str | None
    written_bytes: int
    existed: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One line of a listing. nbytes: what a restore reads. exclusive_bytes: what its eviction would free. age_s: since used."""

    id: str
    position: int
    kind: BoundaryKind
    tier: TierName
    nbytes: int
    exclusive_bytes: int
    hits: int
    age_s: float
    pinned: bool


@dataclass(frozen=True, slots=True)
class TierStats:
    used_bytes: int
    budget_bytes: int
    checkpoints: int
    blocks: int
    evictions: int
    hits: int
    written_bytes: int
    refused: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """matches: calls that asked. misses: of these, without any checkpoint. collisions: keys that named two paths (refused)."""

    tiers: dict[TierName, TierStats]
    checkpoints: int
    matches: int
    misses: int
    matched_tokens: int
    asked_tokens: int
    collisions: int
    index_tokens: int
    index_marks: int


@dataclass(slots=True, eq=False)
class Record:
    """A committed checkpoint. Mutable, owned by StateCache; a record in `in_use` matches or with pins is never evicted."""

    id: str
    salt: bytes
    position: int
    kind: BoundaryKind
    item: int
    tail_key: bytes
    tail_ids: bytes
    used_at: float
    hits: int = 0
    in_use: int = 0
    pins: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)
