"""From the engine's pools to the next tier: what is copied there, in pieces, and what leaves the pools when they are short.

A state that stays on the device costs no copy until somebody else needs its pages, or it is to outlive the process. Copies
run piece by piece beside the engine's steps, and nothing waits for a piece; only a shortage in the middle of a step has to
finish one at once. Not thread-safe: StateCache calls it under its lock, from the thread that runs the engine.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from statecache.blocks import Growing
from statecache.checkpoint import PutResult, Record
from statecache.device import Copied, Copy, Device, Resident
from statecache.eviction import Candidate, eviction_order
from statecache.policy import worth_copying
from statecache.residency import Residency
from statecache.types import BLOCK_TOKENS, Boundary, KvRun, Payload

log = logging.getLogger(__name__)
MOST_RESIDENTS = 512
"""More than so many are not worth looking through when room is needed."""
LEAST_ORDERED = 8
ORDERED_SHARE = 2
ORDER_S = 10.0
"""One part in so many of the residents, first to go, is known in advance, for so long: to weigh all of them again costs as much
as to copy one, so each that goes has to pay for few."""


class Saves(Protocol):
    """The part of StateCache that takes a copy; see placing.py."""

    def grow(self, tokens: np.ndarray, salt: bytes, position: int) -> Growing | None: ...
    def add_rows(self, growing: Growing, blocks: Sequence[np.ndarray]) -> str: ...
    def put_grown(self, growing: Growing, record: Record, payload: Payload) -> PutResult: ...
    def shrink(self, growing: Growing) -> None: ...
    def kv_missing_from(self, tokens: np.ndarray, salt: bytes, position: int) -> int: ...
    def put(self, tokens: np.ndarray, salt: bytes, boundary: Boundary, payload: Payload) -> PutResult: ...


class Job:
    """One state on its way. work() goes on with it; result is set when it has arrived."""

    def __init__(self, saves: Saves, device: Device, resident: Resident, kv_token_bytes: int, *, leaves: bool) -> None:
        """leaves: it is released when it is copied."""
        self.resident = resident
        self.leaves = leaves
        self.result: PutResult | None = None
        record, pools = resident.record, device.pools
        self._saves = saves
        self._device = device
        self._width = max(1, kv_token_bytes)
        self._tokens = pools.tokens(resident.hold)
        # Block by block, so that no moment has to place a whole context; what it builds on cannot go meanwhile.
        self.growing = saves.grow(self._tokens, record.salt, record.position)
        self._at = self._start = (
            saves.kv_missing_from(self._tokens, record.salt, record.position) if self.growing is None else self.growing.tokens
        )
        self._runs: list[KvRun] = []
        self._again = self.growing is None
        self._coming: Copy | None = None
        self._last = False
        """What is coming is the rest."""

    def work(self, limit: int, *, wait: bool = False) -> None:
        """Take what has come, and let about `limit` bytes of KV come, or all the rest once those are there. One piece at a
        time, and what is on its way is waited for only if that is asked."""
        coming = self._coming or self._begin(limit)
        if not (wait or coming.done):
            return
        was_coming, self._coming = self._coming is coming, None
        self._arrived(coming.result())
        if was_coming and self.result is None:
            self._coming = self._begin(limit)

    def _begin(self, limit: int) -> Copy:
        resident, pools = self.resident, self._device.pools
        record, full = resident.record, resident.record.position // BLOCK_TOKENS * BLOCK_TOKENS
        if self._at >= full and self._again:
            missing = self._saves.kv_missing_from(self._tokens, record.salt, record.position)
            if missing < self._start:  # what it builds on was evicted in the meantime
                self._at = self._start = missing
                self._runs, self._again = [], False
        self._last = self._at >= full
        if self._last:
            self._coming = pools.rest(resident.hold, self._at)
        else:
            blocks = max(1, limit // (BLOCK_TOKENS * self._width))
            stop = min(full, self._at + blocks * BLOCK_TOKENS)
            # An array for each block, so that the memory tier can keep it as it is, and free it alone.
            self._coming = pools.rows(resident.hold, self._at, stop, BLOCK_TOKENS)
        return self._coming

    def _arrived(self, copied: Copied) -> None:
        resident, record = self.resident, self.resident.record
        if not self._last:
            self._device.copied_bytes += sum(rows.nbytes for rows in copied.kv)
        if self.growing is not None and not self._last:
            refused = self._saves.add_rows(self.growing, copied.kv)
            self._at = self.growing.tokens
            self.result = PutResult(None, 0, False, refused) if refused else None
            return
        for rows in copied.kv:
            self._runs.append(KvRun(self._at, rows))
            self._at += len(rows)
        if not self._last:
            return
        self._device.copied_bytes += sum(part.nbytes for part in copied.state.values())
        logits = copied.logits if resident.logits else None
        payload = Payload(record.position, tuple(self._runs), copied.state, logits)
        if self.growing is not None:
            self.result = self._saves.put_grown(self.growing, record, payload)
            return
        used_at, boundary = record.used_at, Boundary(record.position, record.kind, record.item)
        self.result = self._saves.put(self._tokens, record.salt, boundary, payload)
        record.used_at = used_at  # to be copied is not to be used

    def close(self) -> None:
        """Whatever came of it; blocks that no checkpoint needs are forgotten."""
        growing, self.growing = self.growing, None
        if growing is not None:
            self._saves.shrink(growing)


class Moves:
    """copied(id): told when a checkpoint that was wanted is in the next tier."""

    def __init__(self, saves: Saves, kept: Residency, device: Device, copied: Callable[[str], None]) -> None:
        self._saves = saves
        self._kept = kept
        self._device = device
        self._copied = copied
        self.wanted: OrderedDict[str, None] = OrderedDict()
        """Ids to be copied to the next tier, in this order."""
        self._job: Job | None = None
        self._told_of_failures = False
        self._order: deque[tuple[Resident, float]] = deque()
        """First to go, with when each was used, as it was at _ordered_at."""
        self._ordered_at = 0.0
        device.on_release = self._gone

    @property
    def waiting(self) -> int:
        return len(self.wanted)

    def want(self, checkpoint_ids: Iterable[str]) -> None:
        """Let those that only the device has be copied, after what waits already."""
        for checkpoint_id in checkpoint_ids:
            resident = self._device.residents.get(checkpoint_id)
            if resident is not None and not self._is_below(resident):
                self.wanted.setdefault(checkpoint_id)

    def want_all(self) -> None:
        """Everything proven that only the device has, most recently used first."""
        residents = sorted(self._device.residents.values(), key=lambda r: (r.record.used_at, r.record.position), reverse=True)
        self.want(r.record.id for r in residents if r.record.proven)

    def work(self, limit: int, short: bool) -> bool:
        """Do one bounded piece of what is to be done; False when there is nothing.

        short: the pools should have more room; then something leaves them once nothing is wanted any more.
        """
        job = self._job
        if job is None:
            job = self._job = self._next(short or len(self._device.residents) > MOST_RESIDENTS)
        if job is None:
            return False
        if job.resident.record.id in self._device.residents and not (job.leaves and self._is_below(job.resident)):
            self._piece(job, limit)
        else:
            job.result = PutResult(job.resident.record.id, 0, True)
        if job.result is not None:
            self._job = None
            job.close()
            self._end(job)
        return True

    def make_room(self, nbytes: int) -> int:
        """Release one or more states, about `nbytes` of them if possible; their number, 0 if none is left.

        A running turn needs the room now: what nobody else has is copied at once if it is worth that, and goes in any case.
        """
        released = 0
        for resident in self._victims():
            if resident.readers:
                continue
            if not self._is_below(resident):
                self._save_at_once(resident)
            nbytes -= self._device.pools.own_bytes(resident.hold)
            self._let_go(resident)
            released += 1
            if nbytes <= 0:
                break
        return released

    def out(self, record: Record) -> PutResult:
        """Copy one to the next tier and release it, now."""
        resident, result = self._device.residents[record.id], None
        if not self._is_below(resident):
            result = self._save_at_once(resident, always=True)
        shelf = self._kept.shelf_of(record)
        self._let_go(resident)
        return result or PutResult(record.id, 0, True, tier=None if shelf is None else shelf.tier.name)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _is_here(self, resident: Resident) -> bool:
        return self._device.residents.get(resident.record.id) is resident

    def _is_below(self, resident: Resident) -> bool:
        """Another tier has all of it."""
        shelf = self._kept.shelf_of(resident.record)
        return shelf is not None and (not resident.logits or shelf.holdings[resident.record.id].logits_key is not None)

    def _next(self, short: bool) -> Job | None:
        while self.wanted:
            resident = self._device.residents.get(next(iter(self.wanted)))
            if resident is not None and not self._is_below(resident):
                return self._job_of(resident, leaves=False)
            self._told(next(iter(self.wanted)))
        if short:
            for resident in self._victims():
                if not resident.readers and not resident.stuck:
                    return self._job_of(resident, leaves=True)
        return None

    def _job_of(self, resident: Resident, *, leaves: bool) -> Job:
        return Job(self._saves, self._device, resident, self._kept.shelves[0].layout.kv_token_bytes, leaves=leaves)

    def _piece(self, job: Job, limit: int) -> None:
        try:
            job.work(limit)
        except Exception as error:
            # Its bytes are still here; what failed is the copy.
            self._tell(job.resident.record, error)
            job.result = PutResult(None, 0, False, str(error))

    def _end(self, job: Job) -> None:
        assert job.result is not None
        record = job.resident.record
        if job.result.checkpoint_id is None:
            job.resident.stuck = True
            self.wanted.pop(record.id, None)
        else:
            self._told(record.id)
            if job.leaves and not job.resident.readers and self._is_here(job.resident):
                self._let_go(job.resident)

    def _told(self, checkpoint_id: str) -> None:
        if self.wanted.pop(checkpoint_id, self) is None:
            self._copied(checkpoint_id)

    def _save_at_once(self, resident: Resident, *, always: bool = False) -> PutResult | None:
        """None: it was not worth it."""
        record = resident.record
        fallback = next((p for p, mark in self._kept.index.above(record.id) if mark in self._kept.records), 0)
        wanted = record.pins or record.id in self.wanted
        layout, tokens = self._kept.shelves[0].layout, record.position - fallback
        nbytes = tokens * layout.kv_token_bytes + sum(size for _, size in layout.state)
        if not (always or wanted or worth_copying(tokens, nbytes, self._kept.policy)):
            return None
        job = self._job if self._job is not None and self._job.resident is resident else None
        try:
            job = job or self._job_of(resident, leaves=True)
            while job.result is None:
                job.work(1 << 30, wait=True)
            if job.result.checkpoint_id is not None:
                self._told(record.id)
            return job.result
        except Exception as error:
            self._tell(record, error)
            return PutResult(None, 0, False, str(error))
        finally:
            if job is not None:
                job.close()

    def _gone(self, resident: Resident) -> None:
        if self._job is not None and self._job.resident is resident:
            self._job.close()
            self._job = None

    def _tell(self, record: Record, error: Exception) -> None:
        """With all that is known the first time; a device that fails, fails every copy."""
        level, self._told_of_failures = logging.INFO if self._told_of_failures else logging.WARNING, True
        log.log(level, "state not copied from the device position=%d", record.position, exc_info=error)

    def _let_go(self, resident: Resident) -> None:
        record = resident.record
        self.wanted.pop(record.id, None)
        self._device.dropped += self._kept.shelf_of(record) is None
        self._kept.leave_device(record)

    def _victims(self) -> Iterator[Resident]:
        """First to go first. What is pinned or expected soon comes last: it may have to go, since running turns do not wait.

        One order serves several calls, as far as those next in it are as they were: a turn takes one row after another.
        """
        now = self._kept.clock()
        while self._order and self._ordered_at <= now < self._ordered_at + ORDER_S:
            resident, used_at = self._order.popleft()
            record = resident.record
            if not self._is_here(resident):
                continue
            if record.used_at != used_at or record.pins or record.expected_until > now:
                break
            yield resident
        order = self._in_order(now)
        known = max(LEAST_ORDERED, len(order) // ORDERED_SHARE)
        self._order = deque((resident, resident.record.used_at) for resident in order[:known])
        self._ordered_at = now
        for resident in order:
            if self._order and self._order[0][0] is resident:
                self._order.popleft()
            yield resident

    def _in_order(self, now: float) -> list[Resident]:
        residents = self._device.residents
        candidates: list[Candidate] = []
        for resident in residents.values():
            record = resident.record
            fallback = next((p for p, mark in self._kept.index.above(record.id) if mark in self._kept.records), 0)
            candidates.append(
                Candidate(
                    record.id,
                    record.kind,
                    max(0, int(now - record.used_at)),
                    record.hits,
                    record.position - fallback,
                    self._device.pools.own_bytes(resident.hold),
                )
            )
        order = eviction_order(candidates, self._kept.policy)
        records = {checkpoint_id: residents[checkpoint_id].record for checkpoint_id in order}
        order.sort(key=lambda checkpoint_id: (bool(records[checkpoint_id].pins), records[checkpoint_id].expected_until > now))
        return [residents[checkpoint_id] for checkpoint_id in order]
