"""Checkpoints that are too large for the memory tier, on their way past it: their new rows wait there, the disk gets the rest.

A context that memory cannot hold still grows a little at a time, and what was saved of it before lies on the disk, in memory or
here. So only what is new since then is kept, as one segment of the memory tier, until the writer has put it behind the older
part. Nothing of it can be matched before. Bounded: no more than a quarter of the memory tier waits here; what does not fit is
not saved, and the next checkpoint of that context is tried again. Not thread-safe: StateCache calls it under its lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from statecache.checkpoint import Path, Record, rows_between
from statecache.errors import TierError, TierFull
from statecache.policy import better_kind
from statecache.residency import Residency
from statecache.tiers.base import SegmentHeader
from statecache.types import BLOCK_TOKENS, BoundaryKind, KvRun, Layout, Payload

SHARE = 4
"""One part in so many of the memory tier may wait here, and contexts that need more than the others pass it."""


def fitting_ladder(ladder_tokens: int, ram_bytes: int, layout: Layout) -> int:
    """The distance of regular checkpoints, shortened where what is new since the last one would not find room here."""
    if ladder_tokens <= 0:
        return ladder_tokens
    room = ram_bytes // SHARE - sum(size for _, size in layout.state) - 4 * layout.vocab_size
    most = room // _row_bytes(layout) // BLOCK_TOKENS - 1  # rows begin at a full block
    return min(ladder_tokens, most * BLOCK_TOKENS) if most >= 1 else ladder_tokens


@dataclass(eq=False)
class Staged:
    """start: first token whose rows wait under `key`. base: the saved checkpoint in front of it, in use until a draft holds its
    blocks. nbytes: charged."""

    record: Record
    path: Path
    start: int
    key: bytes
    nbytes: int
    base: Record | None
    has_logits: bool
    sessions: set[str] = field(default_factory=set)


class Staging:
    """items: by checkpoint id, oldest first. Their order of writing is Residency.waiting."""

    def __init__(self, kept: Residency) -> None:
        self._kept = kept
        self._upper = kept.shelves[0]
        self.items: dict[str, Staged] = {}
        self._fitting = 0, 0
        """(bytes, tokens) of a context that is not too large: neither is a shorter one."""

    @property
    def used_bytes(self) -> int:
        return sum(item.nbytes for item in self.items.values())

    @property
    def limit_bytes(self) -> int:
        return self._upper.tier.budget_bytes // SHARE

    def passes(self, position: int) -> bool:
        """Whether a context of that many tokens is too large for the memory tier."""
        limit = self._upper.tier.budget_bytes - self.limit_bytes
        if position <= self._fitting[1] and limit >= self._fitting[0]:
            return False
        whole = self._upper.whole_bytes(position)
        if whole <= limit:
            self._fitting = whole, position
        return whole > limit

    def missing_from(self, path: Path) -> int:
        """First token whose rows put() needs. The last full block if it would be refused anyway: why copy much for it?"""
        start = self._behind(self._base(path), path)
        if self._fits(self._size(path.position - start)):
            return start
        return path.blocks * BLOCK_TOKENS

    def put(self, record: Record, path: Path, payload: Payload, session: str) -> int:
        """Keep a copy of what is new and let it be written. Bytes charged. Raises TierError; then nothing of it is left."""
        kept, tier = self._kept, self._upper.tier
        base = self._base(path)
        start = self._behind(base, path)
        starts_at = payload.kv[0].start if payload.kv else record.position
        if starts_at > start:
            raise TierError(f"KV rows begin at {starts_at}, what is saved ends at {start}")
        parts = {"kv": rows_between(payload, start, path.position)}
        parts |= {f"state.{name}": payload.state[name] for name, _ in self._upper.layout.state}
        if payload.logits is not None:
            parts["logits"] = self._upper.logits_part(payload.logits)
        ids = path.ids[4 * start :]
        name, key = path.key(path.blocks - 1), b"q" + bytes.fromhex(record.id)
        header = SegmentHeader(
            "state", path.namespace, path.salt, name, b"", start, path.position, ids, record.kind, record.item
        )
        cost = tier.cost(header, {part: array.nbytes for part, array in parts.items()})
        if not self._fits(cost):
            raise TierFull(tier.name, cost, max(0, self.limit_bytes - self.used_bytes))
        held = base if isinstance(base, Record) else None
        if held is not None:
            held.in_use += 1
        try:
            kept.make_room(self._upper, cost)
            tier.put(key, header, parts)
        except BaseException:
            if held is not None:
                held.in_use -= 1
            raise
        if held is not None and held.id not in kept.shelves[1].holdings:
            kept.waiting.setdefault(held.id)
        item = self.items[record.id] = Staged(record, path, start, key, cost, held, payload.logits is not None)
        kept.waiting[record.id] = None
        self.again(item, record.kind, session)
        return cost

    def again(self, item: Staged, kind: BoundaryKind, session: str) -> None:
        """The same checkpoint was saved once more while it waits."""
        item.record.kind = better_kind(item.record.kind, kind)
        if session:
            item.sessions.add(session)

    def payload(self, item: Staged) -> Payload:
        """Views of what waits, good also after drop()."""
        tier, layout = self._upper.tier, self._upper.layout
        rows = tier.read(item.key, "kv").reshape(-1, layout.kv_token_bytes)
        state = {name: tier.read(item.key, f"state.{name}") for name, _ in layout.state}
        logits = tier.read(item.key, "logits").view("<f4") if item.has_logits else None
        return Payload(item.path.position, (KvRun(item.start, rows),), state, logits)

    def let_go(self, item: Staged) -> None:
        """What it builds on is held otherwise, or is not needed any more."""
        if item.base is not None:
            item.base.in_use -= 1
            item.base = None

    def drop(self, checkpoint_id: str) -> bool:
        """Forget one, written or not. False when it is not here."""
        item = self.items.pop(checkpoint_id, None)
        if item is None:
            return False
        self.let_go(item)
        self._kept.waiting.pop(checkpoint_id, None)
        self._upper.tier.delete(item.key)
        return True

    def drop_behind(self, record: Record) -> None:
        """Forget what builds on a checkpoint."""
        for item in [item for item in self.items.values() if item.base is record]:
            self.drop(item.record.id)

    def forget(self, session: str) -> None:
        for item in self.items.values():
            item.sessions.discard(session)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _base(self, path: Path) -> Record | Staged | None:
        """The deepest checkpoint in front that lies in a tier or waits here."""
        best: Record | Staged | None = None
        depth = 0
        for position, mark in self._kept.index.walk(path.salt, path.ids).marks(path.position):
            record = self._kept.records.get(mark)
            if record is not None and self._kept.shelf_of(record) is not None:
                best, depth = record, position
                break
        for item in self.items.values():
            ids = item.path.ids
            if depth < item.path.position < path.position and item.path.salt == path.salt and path.ids.startswith(ids):
                best, depth = item, item.path.position
        return best

    @staticmethod
    def _behind(base: Record | Staged | None, path: Path) -> int:
        """First token behind the blocks of what is in front."""
        position = 0 if base is None else base.position if isinstance(base, Record) else base.path.position
        return min(position, path.position) // BLOCK_TOKENS * BLOCK_TOKENS

    def _size(self, tokens: int) -> int:
        """Bytes that so many rows with a state will be charged, about."""
        layout = self._upper.layout
        return tokens * _row_bytes(layout) + sum(size for _, size in layout.state)

    def _fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.limit_bytes


def _row_bytes(layout: Layout) -> int:
    """Of one token that waits: its KV and its id."""
    return layout.kv_token_bytes + 4
