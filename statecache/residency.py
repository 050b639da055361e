"""Which checkpoints exist, on which shelves, for which sessions; making room and letting go.

Holds the records and decides victims through eviction.py. Not thread-safe: StateCache calls it under its lock.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set

from statecache.blocks import Block
from statecache.checkpoint import CheckpointInfo, Path, Record
from statecache.device import Device, Resident
from statecache.errors import SegmentBad, TierError, TierFull
from statecache.eviction import Candidate, eviction_order
from statecache.index.base import Index
from statecache.policy import Policy
from statecache.shelf import Shelf
from statecache.types import BLOCK_TOKENS, Payload, TierName

log = logging.getLogger(__name__)
DEVICE: TierName = "device"


class Residency:
    """Committed records and their places. shelves: fastest first; a victim moves to the next, out of the last it is gone.

    write_behind: victims are not moved, and new checkpoints go to the first shelf or nowhere, because only copies.py
    writes below it. Victims that still wait for that are taken last.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        index: Index,
        policy: Policy,
        clock: Callable[[], float],
        *,
        write_behind: bool = False,
    ) -> None:
        self.shelves = list(shelves)
        self.index = index
        self.policy = policy
        self.clock = clock
        self.records: dict[str, Record] = {}
        self.sessions: dict[str, dict[str, None]] = {}
        self.waiting: OrderedDict[str, None] = OrderedDict()
        """Ids to be copied down, in this order."""
        self.device: Device | None = None
        self.prefetched = self.prefetch_used = self.prefetch_wasted = 0
        self.dropped = 0
        """Victims that were gone before they could be copied."""
        self.on_member: Callable[[str, bytes | None, bool], None] = lambda session, state, pinned: None
        """Told what a session uses of the last shelf, (session, state segment, pinned); None as segment: it is forgotten."""
        self._write_behind = write_behind
        self._evicted: OrderedDict[str, None] = OrderedDict()  # marks left in the index to explain misses, oldest first

    def shelf_of(self, record: Record) -> Shelf | None:
        """The fastest shelf that has it."""
        return next((shelf for shelf in self.shelves if record.id in shelf.holdings), None)

    def resident(self, record: Record) -> Resident | None:
        """Its place in the engine's pools."""
        return None if self.device is None else self.device.residents.get(record.id)

    def is_anywhere(self, record: Record) -> bool:
        return self.shelf_of(record) is not None or self.resident(record) is not None

    def target(self, position: int) -> Shelf:
        """Where a new checkpoint goes: the fastest shelf whose whole budget can hold its prefix and state."""
        for shelf in self.shelves[:1] if self._write_behind else self.shelves:
            if shelf.context_bytes(position) <= shelf.tier.budget_bytes:
                return shelf
        return self.shelves[0 if self._write_behind else -1]

    def is_as_fast(self, shelf: Shelf, other: Shelf) -> bool:
        return self.shelves.index(shelf) <= self.shelves.index(other)

    def has_logits(self, record: Record) -> bool:
        shelf, resident = self.shelf_of(record), self.resident(record)
        if resident is not None and resident.logits:
            return True
        return shelf is not None and shelf.holdings[record.id].logits_key is not None

    def known_block(self, shelf: Shelf, path: Path) -> Block | None:
        """The last full block of the deepest checkpoint of this path on a shelf; its ids were compared by the index."""
        for _, mark in self.index.walk(path.salt, path.ids).marks(path.position):
            holding = shelf.holdings.get(mark)
            if holding is not None:
                return holding.tail
        return None

    def commit(self, record: Record, path: Path) -> None:
        """Make a record visible; its bytes must lie on a shelf or in the engine's pools by now."""
        assert self.is_anywhere(record)
        if not self.index.knows(record.id):
            self.index.add(path.salt, path.ids, path.keys, record.id)
        self.records[record.id] = record
        self._evicted.pop(record.id, None)

    def describe(self, record: Record) -> CheckpointInfo:
        places = [shelf for shelf in self.shelves if record.id in shelf.holdings]
        tiers: list[TierName] = [shelf.tier.name for shelf in places]
        resident, own_bytes = self.resident(record), 0
        if resident is not None and self.device is not None:
            tiers.insert(0, DEVICE)
            own_bytes = self.device.pools.own_bytes(resident.hold)
        return CheckpointInfo(
            id=record.id,
            position=record.position,
            kind=record.kind,
            tier=tiers[0],
            nbytes=self.shelves[0].context_bytes(record.position),
            exclusive_bytes=places[0].exclusive_bytes(record) if places else own_bytes,
            hits=record.hits,
            age_s=max(0.0, self.clock() - record.used_at),
            pinned=bool(record.pins),
            tiers=tuple(tiers),
        )

    def uses(self, since: float) -> list[tuple[bytes, int, float]]:
        """(state segment on the second shelf, hits, seconds since used) of what was used since then."""
        now, held = self.clock(), self.shelves[1].holdings if len(self.shelves) > 1 else {}
        used = [(holding.state_key, self.records[checkpoint_id]) for checkpoint_id, holding in held.items()]
        return [(key, record.hits, now - record.used_at) for key, record in used if record.used_at >= since]

    def join(self, record: Record, session: str) -> None:
        """List a record under a session; "" is no session."""
        if session and session not in record.sessions:
            record.sessions.add(session)
            self.sessions.setdefault(session, {})[record.id] = None
            self.tell(record, session)

    def tell(self, record: Record, session: str) -> None:
        """Say how a session uses a record, if that outlives the process."""
        holding = self.shelves[-1].holdings.get(record.id) if len(self.shelves) > 1 else None
        if session and holding is not None and holding.state_key not in self.shelves[-1].tier.unsealed:
            self.on_member(session, holding.state_key, session in record.pins)

    def forget(self, session: str) -> None:
        self.on_member(session, None, False)
        for checkpoint_id in self.sessions.pop(session, ()):
            record = self.records[checkpoint_id]
            record.sessions.discard(session)
            record.pins.discard(session)

    def write(self, shelf: Shelf, record: Record, path: Path, payload: Payload) -> int:
        """Make room and write. Raises TierError; then nothing of it is left."""
        tail, stored = shelf.stored_blocks(path, self.known_block(shelf, path))
        starts_at = payload.kv[0].start if payload.kv else record.position
        if starts_at > stored * BLOCK_TOKENS:
            raise TierError(f"KV rows begin at {starts_at}, stored are {stored * BLOCK_TOKENS} tokens")
        return self.write_after(shelf, record, path, payload, tail)

    def write_after(self, shelf: Shelf, record: Record, path: Path, payload: Payload, tail: Block | None) -> int:
        """The same where the last of its blocks that are there is known."""
        stored = 0 if tail is None else tail.index + 1
        shelf.hold(tail)  # making room must not take the blocks that this checkpoint builds on
        try:
            self.make_room(shelf, shelf.cost(record, path, stored, payload))
            return shelf.write(record, path, payload, tail)
        finally:
            shelf.drop(tail)

    def make_room(self, shelf: Shelf, needed: int) -> None:
        """Evict until `needed` bytes fit. Raises TierFull when what is left is held, or the budget is smaller than `needed`."""
        tier = shelf.tier
        if tier.used_bytes + needed <= tier.budget_bytes:
            return
        if needed > tier.budget_bytes or shelf.shrinking:
            raise TierFull(tier.name, needed, tier.budget_bytes)
        target = max(0, tier.budget_bytes - needed - tier.budget_bytes * self.policy.slack_permille // 1000)
        for checkpoint_id in self.victims(shelf):
            if tier.used_bytes <= target:
                break
            self.evict_from(shelf, self.records[checkpoint_id])
        if tier.used_bytes + needed > tier.budget_bytes:
            raise TierFull(tier.name, needed, max(0, tier.budget_bytes - tier.used_bytes))

    def victims(self, shelf: Shelf) -> list[str]:
        """What may leave a shelf now, first to go first."""
        order = eviction_order(self._candidates(shelf), self.policy)
        now, records = self.clock(), self.records
        order.sort(key=lambda checkpoint_id: (records[checkpoint_id].fresh, records[checkpoint_id].expected_until > now))
        if self._write_behind and shelf is self.shelves[0]:
            order.sort(key=lambda checkpoint_id: checkpoint_id in self.waiting)
        return order

    # ── letting go ──────────────────────────────────────────────────────────────────────────────────────────────

    def evict(self, record: Record) -> None:
        """Take a record off every shelf and out of the engine's pools."""
        for shelf in self.shelves:
            if record.id in shelf.holdings:
                shelf.remove(record)
                shelf.evictions += 1
        if self.device is not None and self.resident(record) is not None:
            self.device.release(record)
        self._gone(record, remember=True)

    def leave_device(self, record: Record) -> None:
        """Release its hold; what no other tier has is gone."""
        assert self.device is not None
        self.device.release(record)
        if not self.is_anywhere(record):
            # What still waits to be written is in the staging, and keeps its turn.
            self._gone(record, remember=True, waits=record.id in self.waiting)

    def go_if_spoiled(self, record: Record) -> None:
        """One that was spoiled while it was used leaves when nobody uses it any more."""
        resident = self.resident(record)
        used = record.in_use or (resident is not None and resident.readers)
        if record.spoiled and not used and self.records.get(record.id) is record:
            self.evict(record)

    def quarantine(self, shelf: Shelf, error: SegmentBad, reading: Record) -> None:
        """Take every checkpoint that needs a bad segment off its shelf, and in any case the one that was being read.

        Whoever reads goes on with what is left, so each call must leave less, whatever key the error names.
        """
        broken = [r for r in self.records.values() if shelf.depends_on(r, {error.key})]
        if reading.id in shelf.holdings and reading not in broken:
            broken.append(reading)
        log.warning("segment quarantined tier=%s reason=%s checkpoints=%d", shelf.tier.name, error.reason, len(broken))
        shelf.quarantined += 1
        shelf.tier.set_aside(error.key, error.reason)
        self._take_off(shelf, broken)

    def lose(self, shelf: Shelf, segments: Set[bytes]) -> list[Record]:
        """Take every checkpoint that needs one of these off a shelf whose tier does not have them any more."""
        broken = [r for r in self.records.values() if shelf.depends_on(r, segments)]
        self._take_off(shelf, broken)
        for key in segments:
            shelf.tier.delete(key)
        return broken

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_off(self, shelf: Shelf, records: Iterable[Record]) -> None:
        for record in records:
            shelf.remove(record)
            if not self.is_anywhere(record):
                self._gone(record, remember=False)

    def _candidates(self, shelf: Shelf) -> list[Candidate]:
        now = self.clock()
        found: list[Candidate] = []
        for checkpoint_id in shelf.holdings:
            record = self.records.get(checkpoint_id)
            if record is None or record.in_use or record.pins:
                continue
            fallback = next((p for p, mark in self.index.above(checkpoint_id) if mark in self.records), 0)
            found.append(
                Candidate(
                    checkpoint_id,
                    record.kind,
                    max(0, int(now - record.used_at)),
                    record.hits,
                    record.position - fallback,
                    shelf.exclusive_bytes(record),
                )
            )
        return found

    def evict_from(self, shelf: Shelf, record: Record) -> None:
        """Take a record off a shelf; it moves to the next tier when there is one with room."""
        lower = self.shelves[self.shelves.index(shelf) + 1 :]
        if lower and record.id not in lower[0].holdings:
            if not self._write_behind:
                self._demote(record, shelf, lower[0])
            elif self.waiting.pop(record.id, self) is None:
                self.dropped += 1
        shelf.remove(record)
        shelf.evictions += 1
        if shelf is self.shelves[0]:
            self.prefetch_wasted += record.prefetched
            record.prefetched = False
        if not self.is_anywhere(record):
            self._gone(record, remember=True)

    def _demote(self, record: Record, source: Shelf, target: Shelf) -> int:
        """Copy a record to a lower shelf; bytes charged, 0 when it was refused."""
        path = source.path(record)
        try:
            _, stored = target.stored_blocks(path, self.known_block(target, path))
            return self.write(target, record, path, source.read(record, path, first_block=stored))
        except TierError as error:
            target.refused += 1
            log.info("checkpoint not moved position=%d tier=%s reason=%s", record.position, target.tier.name, error)
            return 0

    def _gone(self, record: Record, *, remember: bool, waits: bool = False) -> None:
        """A record has left its last shelf. Its tokens stay in the index for a while if `remember`."""
        del self.records[record.id]
        self.prefetch_wasted += record.prefetched
        record.prefetched = False
        if not waits:
            self.waiting.pop(record.id, None)
        for session in record.sessions:
            ids = self.sessions[session]
            del ids[record.id]
            if not ids:
                del self.sessions[session]
        record.sessions.clear()
        record.pins.clear()
        if not remember:
            self.index.remove(record.id)
            return
        self._evicted[record.id] = None
        policy = self.policy
        while self._evicted and (
            len(self._evicted) > policy.remembered_checkpoints or self.index.tokens > policy.remembered_tokens
        ):
            self.index.remove(self._evicted.popitem(last=False)[0])
