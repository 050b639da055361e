"""StateCache: match, read, put, evict. The one place that others call; answers are in lookup.py, new checkpoints in placing.py,
bytes in shelf.py and tiers/, records in residency.py, worth in eviction.py.

Threads: every method may be called from any thread; one lock guards the records. `Match.read` copies outside of it, safe
because a matched record is in use and segments never change. put() holds the lock while it copies, so a match waits for at
most one checkpoint's copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np

from statecache.checkpoint import CacheStats, CheckpointInfo, PutResult, Record
from statecache.copies import Copies
from statecache.device import Device, Pools
from statecache.figures import figures
from statecache.index.base import Index
from statecache.keys import Hash128, xxh3_128
from statecache.lookup import Lookup
from statecache.match import Match
from statecache.moves import Moves
from statecache.placing import Placing
from statecache.policy import Policy
from statecache.recover import Known, Progress, Users, recover
from statecache.residency import Residency
from statecache.shelf import Shelf
from statecache.staging import Staging
from statecache.stretches import Join, separate
from statecache.tiers.base import Take, Tier, ordinary
from statecache.trim import Trim
from statecache.types import Boundary, Layout, Payload, TierName

PREFETCH_SHARE = 4
"""One part in so many of the memory tier may hold what was prefetched and not used yet."""


class StateCache:
    """Checkpoints of one namespace over an ordered list of tiers, fastest first.

    New checkpoints go to the first tier that can hold their whole prefix; what is evicted from a tier moves to the next one,
    out of the last one it is gone.

    write_behind: nobody waits for a lower tier. Saves end in the first one; copy_next(), called by a background thread, brings
    what want() names to the next; a victim of the first tier that nobody copied in time is gone. What is too large for that one
    waits there in part (staging.py) and can be matched when copy_next() has brought it down.
    take: memory for what is brought to the first tier. join: see stretches.py.
    index: must be empty. clock: seconds, only differences matter. hash128: for tests of collisions.
    """

    def __init__(
        self,
        namespace: bytes,
        layout: Layout,
        *,
        tiers: Sequence[Tier],
        index: Index,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        hash128: Hash128 = xxh3_128,
        write_behind: bool = False,
        take: Take = ordinary,
        join: Join = separate,
    ) -> None:
        if not tiers:
            raise ValueError("a state cache needs at least one tier")
        self.namespace = namespace
        self.layout = layout
        self.take = take
        self.policy = policy or Policy()
        self._index = index
        self._clock = clock
        self._hash128 = hash128
        self._lock = threading.RLock()
        self._uses_told = clock()
        shelves = [Shelf(tier, layout, join) for tier in tiers]
        self._kept = Residency(shelves, index, self.policy, clock, write_behind=write_behind)
        self._staging = Staging(self._kept)
        self._trim = Trim(self._kept)
        self._copies = Copies(self._kept, self._staging, self._lock, write_behind=write_behind)
        self._lookup = Lookup(namespace, index, self._kept, self.policy, clock, self._lock)
        self._placing = Placing(
            namespace,
            index,
            self._kept,
            self._staging,
            self._copies,
            self._lookup,
            clock,
            hash128,
            self._lock,
            write_behind=write_behind,
            waiting=lambda: self.on_waiting(),
        )
        self.on_waiting: Callable[[], None] = lambda: None
        """Told, under the lock, when something waits for copy_next(), or should be noted soon, that nobody else knows of."""

    # ── match ────────────────────────────────────────────────────────────────────────────────────────────────────

    def match(self, tokens: np.ndarray, salt: bytes, *, limit: int | None = None, session: str = "") -> Match:
        """The longest committed checkpoint that is a prefix of `tokens`, pinned in the same step.

        limit: deepest position allowed. The whole context counts only when its logits were saved, else at most n − 1.
        session: is listed as a user of the checkpoint; never part of the match.
        """
        return self._lookup.match(tokens, salt, limit, session)

    def depth(self, tokens: np.ndarray, salt: bytes) -> int:
        """The position that match() would find now; counts nothing and pins nothing."""
        return self._lookup.depth(tokens, salt)

    def kv_missing_from(self, tokens: np.ndarray, salt: bytes, position: int) -> int:
        """First token, block aligned and ≤ position, whose KV rows a put() at `position` must bring along."""
        return self._placing.kv_missing_from(tokens, salt, position)

    # ── put ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        tokens: np.ndarray,
        salt: bytes,
        boundary: Boundary,
        payload: Payload,
        *,
        session: str = "",
        proven: bool = True,
    ) -> PutResult:
        """Keep the state after tokens[: boundary.position]. The caller may reuse its buffers after return.

        payload.kv: contiguous runs ending at the position and starting at or before kv_missing_from(). Nothing is visible
        before all of it is written; with write_behind, what is too large for memory only after copy_next(). Not kept
        (checkpoint_id None) when the tier has no room even after eviction, a write fails, or the rows begin too late because
        blocks were evicted in between. Raises PayloadMismatch when components do not fit.

        proven: logits computed from this state were finite. If not, it can be matched and does not outlive the process until
        prove(); spoil() takes it away.
        """
        return self._placing.put(tokens, salt, boundary, payload, session=session, proven=proven)

    # ── on the device ────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, pools: Pools) -> None:
        """Let checkpoints stay in an engine's pools; once, before the first admit(). Its thread calls all of this section."""
        with self._lock:
            self._kept.device = Device(pools)
            self._placing.moves = Moves(self._placing, self._kept, self._kept.device, lambda name: self._wanted_below([name]))

    def admit(
        self,
        tokens: np.ndarray,
        salt: bytes,
        boundary: Boundary,
        hold: int,
        *,
        logits: bool,
        session: str = "",
        stays: bool = True,
        proven: bool = True,
    ) -> PutResult:
        """Keep the state after tokens[: boundary.position], which lies in the engine's pools under `hold`, without copying it.

        The hold is the cache's once this returns, also when it was not kept. logits: they are held too.
        stays False: copied to the next tier and released at once. proven: see put().
        """
        return self._placing.admit(tokens, salt, boundary, hold, logits=logits, session=session, stays=stays, proven=proven)

    def move(self, limit: int, *, short: bool) -> bool:
        """Copy a piece, of about `limit` bytes, of what should leave the device or be elsewhere too. False: nothing to do.

        short: the pools should have more room, so that the next turn need not wait for it.
        """
        with self._lock:
            moves = self._placing.moves
            return moves is not None and moves.work(limit, short)

    def make_device_room(self, nbytes: int) -> int:
        """Release states worth about `nbytes` in the engine's pools, at least one; how many, 0 if there is none to release.

        Running turns come first: what no other tier has is copied if that is worth it, and goes even if it cannot be.
        """
        with self._lock:
            moves = self._placing.moves
            return 0 if moves is None else moves.make_room(nbytes)

    # ── whether it is right ──────────────────────────────────────────────────────────────────────────────────────

    def prove(self, checkpoint_ids: Iterable[str]) -> None:
        """Logits computed from these were finite. Unknown ids are ignored."""
        with self._lock:
            found = [record for record in map(self._record, checkpoint_ids) if record is not None and not record.proven]
            if self._copies.prove(found):
                self.on_waiting()

    def spoil(self, checkpoint_ids: Iterable[str]) -> None:
        """Logits computed from these were not finite: take away those that nothing has proved, pinned or not.

        One that is in use is not matched any more and goes when its use ends.
        """
        with self._lock:
            for checkpoint_id in checkpoint_ids:
                record = self._record(checkpoint_id)
                if record is not None and not record.proven:
                    record.pins.clear()
                    record.spoiled = True
                    self.evict(checkpoint_id)

    def _record(self, checkpoint_id: str) -> Record | None:
        staged = self._staging.items.get(checkpoint_id)
        return self._kept.records.get(checkpoint_id) if staged is None else staged.record

    # ── before a turn comes ──────────────────────────────────────────────────────────────────────────────────────

    def expect(self, tokens: np.ndarray, salt: bytes, for_s: float) -> bool:
        """A context that begins like `tokens` will come: evict its deepest checkpoint after others for so many seconds.

        Returns whether it lies on a slow tier alone, so that prefetching it would help.
        """
        with self.peek(tokens, salt) as match, self._lock:
            if match.record is not None:
                match.record.expected_until = self._clock() + for_s
            return match.tier == "disk"

    def peek(self, tokens: np.ndarray, salt: bytes) -> Match:
        """What match() will find for a context that goes on behind `tokens`; no use, hit or session is counted."""
        return self._lookup.peek(tokens, salt)

    def may_prefetch(self, nbytes: int) -> bool:
        """Whether so many bytes may be brought to memory now, beside those that were brought there and not used yet."""
        with self._lock:
            upper = self._kept.shelves[0]
            unused = sum(upper.context_bytes(r.position) for r in self._kept.records.values() if r.prefetched)
            return unused + nbytes <= upper.tier.budget_bytes // PREFETCH_SHARE

    def put_prefetched(self, tokens: np.ndarray, salt: bytes, boundary: Boundary, payload: Payload) -> bool:
        """put() of what a lower tier has. False: it is gone there by now, or memory has no room."""
        return self._placing.put_prefetched(tokens, salt, boundary, payload)

    # ── lists, pins ──────────────────────────────────────────────────────────────────────────────────────────────

    def checkpoints(self, session: str | None = None, deepest: int | None = None) -> list[CheckpointInfo]:
        """What a session placed or used (None: everything), by rising position. deepest: only so many, the last of them."""
        with self._lock:
            ids = list(self._kept.records) if session is None else list(self._kept.sessions.get(session, ()))
            records = sorted((self._kept.records[i] for i in ids), key=lambda r: (r.position, r.id))
            records = records if deepest is None else records[-deepest:]
            return [self._kept.describe(record) for record in records]

    def sessions(self) -> dict[str, int]:
        """Deepest saved position of every session that placed or used a checkpoint."""
        with self._lock:
            kept = self._kept
            return {name: max((kept.records[i].position for i in ids), default=0) for name, ids in kept.sessions.items()}

    def forget(self, session: str) -> None:
        """Drop a session's pins and its list; its checkpoints stay for others until evicted. Unknown sessions are ignored."""
        with self._lock:
            self._kept.forget(session)
            self._staging.forget(session)
            self.on_waiting()

    def pin(self, checkpoint_id: str, session: str = "") -> bool:
        """Protect from eviction until unpin() by the same session, and let it be written below. False when none is known so."""
        with self._lock:
            record = self._kept.records.get(checkpoint_id)
            if record is None:
                return False
            record.pins.add(session)
            self._kept.join(record, session)
            self._kept.tell(record, session)
            self._copies.want([checkpoint_id])
            self.on_waiting()
            return True

    def unpin(self, checkpoint_id: str, session: str = "") -> bool:
        """False when it was not pinned by this session."""
        with self._lock:
            record = self._kept.records.get(checkpoint_id)
            if record is None or session not in record.pins:
                return False
            record.pins.discard(session)
            self._kept.tell(record, session)
            self.on_waiting()
            return True

    def settle(self, checkpoint_ids: Iterable[str]) -> None:
        """The turn that placed these has ended and has said what it wants; from now on they are evicted by worth alone."""
        with self._lock:
            for checkpoint_id in checkpoint_ids:
                record = self._kept.records.get(checkpoint_id)
                if record is not None:
                    record.fresh = False

    def stats(self) -> CacheStats:
        with self._lock:
            return figures(self._index, self._kept, self._lookup, self._placing)

    @property
    def dropped(self) -> int:
        """Checkpoints that had to leave the first tier before they were copied to the second one."""
        return self._kept.dropped

    def set_budget(self, name: TierName, budget_bytes: int) -> bool:
        """Change what a tier may hold; trim() evicts what is over it. False: there is no such tier, or it is the engine's."""
        with self._lock:
            found = self._trim.set_budget(name, budget_bytes)
            if found:
                self.on_waiting()
            return found

    def trim(self) -> bool:
        """Evict a few of what is over a budget that was made smaller. False: there is nothing to do now."""
        if not self._trim.work_waits:
            return False
        with self._lock:
            more = self._trim.work()
            if not self._trim.work_waits:
                self.on_waiting()
            return more

    def evict(self, checkpoint_id: str) -> bool:
        """Remove a checkpoint from every tier now. False when unknown, pinned or in use."""
        with self._lock:
            waited = self._staging.drop(checkpoint_id)
            record = self._kept.records.get(checkpoint_id)
            if record is None or record.pins:
                return waited
            self._staging.drop_behind(record)
            if record.in_use:
                return False
            resident = self._kept.resident(record)
            if resident is not None and resident.readers:
                return False
            self._kept.evict(record)
            return True

    # ── durability ───────────────────────────────────────────────────────────────────────────────────────────────

    def recover(
        self,
        known: Mapping[bytes, Known] | None = None,
        progress: Progress | None = None,
        users: Users | None = None,
    ) -> int:
        """Find the checkpoints that the tiers still hold from before a restart; their number. Call it once, first of all.

        known, progress, users: see statecache.recover. A bad segment is set aside and never an error.
        """
        with self._lock:
            if self._kept.records:
                raise RuntimeError("recover() after checkpoints were put")
            for shelf in self._kept.shelves:
                arguments = (shelf, self._kept, self.namespace, self._placing.id_of, self._hash128, self._clock())
                recover(*arguments, known=known, users=users, progress=progress)
            return len(self._kept.records)

    def on_member(self, call: Callable[[str, bytes | None, bool], None]) -> None:
        """call(session, state segment of the last tier or None when all is forgotten, pinned): told under the lock."""
        self._kept.on_member = call

    def uses(self) -> list[tuple[bytes, int, float]]:
        """(state segment in the second tier, hits, seconds since used) of what was used since the last call."""
        with self._lock:
            since, self._uses_told = self._uses_told, self._clock()
            return self._kept.uses(since)

    def want(self, checkpoint_ids: Iterable[str]) -> None:
        """Let copy_next() bring these to the second tier, in this order. Unknown ids, and what is there, are ignored.

        What only the device has is copied to the first tier by move() before.
        """
        ids = list(checkpoint_ids)
        with self._lock:
            if self._placing.moves is not None and len(self._kept.shelves) > 1:
                self._placing.moves.want(ids)
            self._copies.want(ids)

    def want_all(self) -> None:
        """Everything that only the first tier or the device has, newest first."""
        with self._lock:
            if self._placing.moves is not None and len(self._kept.shelves) > 1:
                self._placing.moves.want_all()
            self._copies.want_all()

    def lose(self, name: TierName, segments: Set[bytes]) -> int:
        """A tier does not have these any more: what the others have of it is wanted there again. Returns how many are gone."""
        with self._lock:
            shelf = next(shelf for shelf in self._kept.shelves if shelf.tier.name == name)
            lost = self._kept.lose(shelf, segments)
            left = [record.id for record in lost if record.id in self._kept.records]
            self.want(left)
            return len(lost) - len(left)

    def _wanted_below(self, checkpoint_ids: list[str]) -> None:
        self._copies.want(checkpoint_ids)
        self.on_waiting()

    def copy_next(self, most: int = 1) -> int | None:
        """Bring the next wanted checkpoints to the second tier, `most` or fewer: bytes written, None when none is wanted any
        more. They outlive the process when this returns, if they are proven.

        The bytes are written without the lock, so matches and saves go on. Raises TierError; that checkpoint is then not wanted
        any more, after TierFailed it is again.
        """
        return self._copies.copy_next(most)

    def write_back(self, max_bytes: int = 1 << 62) -> int:
        """Copy what only the first tier has to the next one, newest first, about `max_bytes` of it; bytes written.

        Evicted checkpoints move down by themselves unless write_behind; this makes the others survive a restart.
        """
        self.want_all()
        return self._copies.write_back(max_bytes)
