"""The engine's counters: what passes computed and how long they took, and what is free now."""

from __future__ import annotations

from engine.ahead import Begun
from engine.elastic.boundary import Boundary
from engine.holds import Holds
from engine.kvcache.store import StateStore
from engine.models.base import SlotCounters
from engine.scheduler.pace import Work, pairs
from engine.scheduler.scheduler import Scheduler, Slice
from engine.types import EngineStats


class Figures:
    """slots: of the model's experts, None without any. boundary: of memory that changes hands, None if none does. begun: steps
    before they are asked for."""

    def __init__(
        self,
        store: StateStore,
        scheduler: Scheduler,
        holds: Holds,
        slots: SlotCounters | None,
        boundary: Boundary | None,
        begun: Begun,
    ) -> None:
        self._store, self._scheduler, self._holds = store, scheduler, holds
        self._slots, self._boundary, self._begun = slots, boundary, begun
        self._prefill_tokens = self._decode_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0

    def count(self, slices: list[Slice], ns: int) -> None:
        """A pass over them took so long. A mixed one's time is divided by tokens."""
        decode = prefill = context = looked_back = 0
        for part in slices:
            if part.decode:
                decode += 1
                context += part.start
            else:
                prefill += part.end - part.start
                looked_back += pairs(part.start, part.end)
        self._scheduler.pace.observe(Work(decode, context, prefill, looked_back), ns // 1000)
        seconds = ns / 1e9
        self._decode_tokens += decode
        self._prefill_tokens += prefill
        self._decode_seconds += seconds * decode / (decode + prefill)
        self._prefill_seconds += seconds * prefill / (decode + prefill)

    def stats(self) -> EngineStats:
        """Counters since the start and what is free now. Rows are those of recurrent state; without any, of requests."""
        scheduler, store, boundary, begun = self._scheduler, self._store, self._boundary, self._begun
        rows = store.total_rows or scheduler.max_rows
        arena = self._holds.memory_stats()
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_prefill_tokens=scheduler.unprefilled_tokens(),
            free_pages=store.pages.free,
            total_pages=store.pages.total,
            free_rows=store.rows.free if store.total_rows else rows - len(scheduler.running),
            total_rows=rows,
            held=len(store.holds),
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            slot_hits=self._slots.hits if self._slots else 0,
            slot_misses=self._slots.misses if self._slots else 0,
            cuts_skipped=scheduler.cuts_skipped,
            preemptions=scheduler.preemptions,
            pauses=scheduler.pauses,
            expert_slots=0 if boundary is None else boundary.sizes.slots,
            memory_moves=0 if boundary is None else boundary.moves,
            lent_bytes=0 if boundary is None else boundary.lent_bytes,
            pinned_bytes=0 if arena is None else arena.pinned,
            pinned_used_bytes=0 if arena is None else arena.used,
            not_pinned_bytes=0 if arena is None else arena.elsewhere,
            ahead_used=begun.used,
            ahead_wrong=begun.wrong,
            ahead_ended=begun.ended,
            ahead_joined=begun.joined,
            guesses=begun.guesses,
            wrong_guesses=begun.wrong_guesses,
        )
