"""Records: what the store remembers of a checkpoint, and what it tells others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from statecache.errors import PayloadMismatch
from statecache.keys import KEY_BYTES
from statecache.types import BLOCK_TOKENS, BoundaryKind, Layout, Payload, TierName

_ID_BYTES = 4 * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PutResult:
    """checkpoint_id None: not kept, `reason` says why. existed: was there already. written_bytes: charged for what is new.

    tier: where it lies, or will lie once it has been written there; None when not kept. known_tokens: the deepest checkpoint in
    front of it, before this one.
    """

    checkpoint_id: str | None
    written_bytes: int
    existed: bool
    reason: str = ""
    tier: TierName | None = None
    known_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One line of a listing. tier: the fastest that has it; tiers: all, fastest first. age_s: since used.

    nbytes: what a restore reads. exclusive_bytes: what its eviction would free.
    """

    id: str
    position: int
    kind: BoundaryKind
    tier: TierName
    nbytes: int
    exclusive_bytes: int
    hits: int
    age_s: float
    pinned: bool
    tiers: tuple[TierName, ...] = ()


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
    """matches: calls that asked. misses: of these, without any checkpoint. collisions: keys that named two paths (refused).

    waiting: checkpoints to be copied to the second tier. dropped: evicted from the first one before that.
    to_leave: on the device alone, to be copied because they should outlive the process. left_bytes: copied from there.
    left_uncopied: released there without any copy.
    prefetched: checkpoints brought from disk before they were asked for; used, and wasted because they had to go before.
    """

    tiers: dict[TierName, TierStats]
    checkpoints: int
    matches: int
    misses: int
    matched_tokens: int
    asked_tokens: int
    collisions: int
    index_tokens: int
    index_marks: int
    waiting: int = 0
    dropped: int = 0
    to_leave: int = 0
    left_bytes: int = 0
    left_uncopied: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    prefetch_wasted: int = 0


@dataclass(slots=True, eq=False)
class Record:
    """A committed checkpoint. Mutable, owned by StateCache; a record in `in_use` matches or with pins is never evicted.

    fresh: its turn has not ended, so nobody knows yet what it is worth beside the turn's others; evicted last.
    prefetched: brought to memory for a turn that has not come yet. expected_until: until then it is evicted after others.
    proven: logits computed from it were finite; until then it does not outlive the process. spoiled: they were not, and it goes
    when nobody reads it any more.
    """

    id: str
    namespace: bytes
    salt: bytes
    position: int
    kind: BoundaryKind
    item: int
    tail_ids: bytes
    used_at: float
    hits: int = 0
    in_use: int = 0
    fresh: bool = False
    prefetched: bool = False
    expected_until: float = 0.0
    proven: bool = True
    spoiled: bool = False
    pins: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Path:
    """A token prefix by all its names. ids: u32le. keys: joined keys of its full blocks."""

    namespace: bytes
    salt: bytes
    ids: bytes
    keys: bytes

    @property
    def position(self) -> int:
        return len(self.ids) // 4

    @property
    def blocks(self) -> int:
        return self.position // BLOCK_TOKENS

    def key(self, block: int) -> bytes:
        """Key of a block; empty for −1, the start."""
        return self.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES] if block >= 0 else b""

    @property
    def tail_ids(self) -> bytes:
        """Ids behind the last full block."""
        return self.ids[self.blocks * _ID_BYTES :]

    def block_ids(self, first: int, end: int) -> bytes:
        return self.ids[first * _ID_BYTES : end * _ID_BYTES]


class Rows:
    """KV rows of a payload for one range after another, rising: each costs what it takes, not a search, and copies
    nothing."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._at = 0

    def between(self, start: int, end: int) -> Sequence[np.ndarray]:
        """[start, end), each of the runs that hold them as far as it does. Raises PayloadMismatch when some are missing."""
        runs, pieces = self._payload.kv, list[np.ndarray]()
        while self._at + 1 < len(runs) and runs[self._at + 1].start <= start:
            self._at += 1
        at, number = start, self._at
        while at < end:
            run = runs[number] if number < len(runs) else None
            if run is None or not run.start <= at < run.start + len(run.rows):
                raise PayloadMismatch(f"payload at {self._payload.position} lacks KV rows [{at}, {end})")
            stop = min(end, run.start + len(run.rows))
            whole = at == run.start and stop - at == len(run.rows)
            pieces.append(run.rows if whole else run.rows[at - run.start : stop - run.start])
            at, number = stop, number + 1
        return pieces


def rows_between(payload: Payload, start: int, end: int) -> np.ndarray:
    """KV rows [start, end) of a payload, a view where one run holds them all. Raises PayloadMismatch when some are missing."""
    if start == end:
        width = payload.kv[0].rows.shape[1] if payload.kv else 0
        return np.empty((0, width), dtype=np.uint8)
    pieces: list[np.ndarray] = []
    at = start
    first = bisect_right(payload.kv, start, key=lambda run: run.start) - 1
    for run in payload.kv[max(0, first) :]:
        run_end = run.start + len(run.rows)
        if run.start <= at < run_end:
            stop = min(end, run_end)
            pieces.append(run.rows[at - run.start : stop - run.start])
            at = stop
            if at == end:
                return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    raise PayloadMismatch(f"payload at {payload.position} lacks KV rows [{at}, {end})")


def validate(payload: Payload, position: int, layout: Layout) -> None:
    """Raises PayloadMismatch unless every component fits the layout and is at `position`."""
    if payload.position != position:
        raise PayloadMismatch(f"state is at {payload.position}, its checkpoint at {position}")
    at = payload.kv[0].start if payload.kv else position
    for run in payload.kv:
        if run.rows.dtype != np.uint8 or run.rows.ndim != 2 or run.rows.shape[1] != layout.kv_token_bytes:
            raise PayloadMismatch(
                f"KV rows {run.rows.dtype} {run.rows.shape}, layout has {layout.kv_token_bytes} bytes a token"
            )
        if run.start != at:
            raise PayloadMismatch(f"KV run starts at {run.start}, the one before ends at {at}")
        at += len(run.rows)
    if at != position:
        raise PayloadMismatch(f"KV rows end at {at}, the checkpoint is at {position}")
    sizes = {name: array.nbytes for name, array in payload.state.items()}
    if sizes != dict(layout.state):
        raise PayloadMismatch(f"state components {sizes}, layout has {dict(layout.state)}")
    if payload.logits is not None and payload.logits.size != layout.vocab_size:
        raise PayloadMismatch(f"{payload.logits.size} logits, vocabulary has {layout.vocab_size}")
