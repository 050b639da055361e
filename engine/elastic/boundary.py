"""Moves the border between expert slots and KV pages while the engine serves, in an order that no kernel can notice.

What shrinks is left first: experts and pages that lie behind the new end move or are forgotten, with their maps and tables, and
the device has finished. Then memory goes from one side's addresses to the other's, and only then is it used there. An error on
the way leaves the sizes as they were before that step.

Between steps of the engine, by the thread that steps, and never while a pass is open: its tables name pages and slots.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.device.base import Device
from engine.elastic.memory import Memory
from engine.elastic.plan import Sizes, divide, most_slots, shrunk, toward
from engine.errors import EngineError, OutOfPages, Unsupported
from engine.kvcache.store import Held, StateStore
from engine.moe.cost import Rates
from engine.scheduler.scheduler import Scheduler
from engine.types import MemoryReport

log = logging.getLogger(__name__)
PIECE_BYTES = 1 << 30
"""Moved between two steps while requests run: a stream waits for no more than that."""


class SlotUser(Protocol):
    """Whoever uses the slots. See gpu/experts.ExpertPool."""

    resident: bool

    @property
    def total(self) -> int:
        """Experts over all layers."""
        ...

    @property
    def rates(self) -> Rates: ...

    def totals(self) -> tuple[int, int, int, int]:
        """Since the start: fetches, experts on the CPU, hits, misses. Waits for the device."""
        ...

    def leave(self, slots: int) -> int: ...
    def enter(self, slots: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Divided:
    """The device's memory that can change hands, as loading divided it. experts: None for a model without any. watch: give
    memory to other programs that want it; trade: and move it by what it is worth."""

    memory: Memory
    sizes: Sizes
    experts: SlotUser | None
    device: Device
    watch: bool = False
    trade: bool = False


class Boundary:
    """One per engine. sizes: now. target: what is asked for, reached a piece at a time. trouble: why the last target was
    given up, "" if it was not."""

    def __init__(self, divided: Divided, store: StateStore, scheduler: Scheduler) -> None:
        self.memory, self.sizes, self.device = divided.memory, divided.sizes, divided.device
        self.target = self.sizes
        self.home_chunks = divided.memory.chunks
        """In hand at the start, and again when others have given back what they took."""
        self.chunks = self.home_chunks
        self._asked = self.sizes.slots
        self.trouble = ""
        self.moves = 0
        self._experts = divided.experts
        self._store, self._scheduler = store, scheduler

    @property
    def moving(self) -> bool:
        return self.target != self.sizes

    def ask(self, slots: int) -> None:
        """Have so many slots, and pages of what they leave. Raises InvalidRequest or Unsupported."""
        if self._experts is None:
            raise Unsupported("expert slots: this model has no experts")
        if self._experts.resident:
            why = "every expert is on the device and the host's copy was given back: set engine.slots to keep it"
            raise Unsupported(f"expert slots: cannot be resized, since {why}")
        self.target = divide(self.memory.bounds, self.chunks, slots)
        self._asked = slots
        self.trouble = ""

    def limits(self) -> tuple[int, int]:
        """Fewest and most slots that can be asked for now."""
        bounds = self.memory.bounds
        return bounds.least_slots, most_slots(bounds, self.chunks)

    def report(self) -> MemoryReport:
        bounds, (least, most) = self.memory.bounds, self.limits()
        fixed = not self._elastic_slots
        return MemoryReport(
            slots=self.sizes.slots,
            wanted_slots=self.target.slots,
            least_slots=self.sizes.slots if fixed else least,
            most_slots=self.sizes.slots if fixed else most,
            experts=self._experts.total if self._experts is not None else 0,
            slot_bytes=bounds.record_bytes,
            pages=self.sizes.pages,
            wanted_pages=self.target.pages,
            page_tokens=self._store.page_size,
            page_bytes=bounds.page_bytes,
            moves=self.moves,
            lent_bytes=self.lent_bytes,
            fixed=self.memory.fixed or "",
            trouble=self.trouble,
        )

    @property
    def used_chunks(self) -> int:
        """By what is there now."""
        bounds = self.memory.bounds
        return bounds.slot_chunks(self.sizes.slots) + bounds.page_chunks(self.sizes.pages)

    @property
    def lent_chunks(self) -> int:
        """Given up for other programs."""
        return max(0, self.home_chunks - self.chunks)

    @property
    def lent_bytes(self) -> int:
        return self.lent_chunks * self.memory.bounds.chunk_bytes

    def allow(self, chunks: int) -> None:
        """Have so many chunks in all from now on. Fewer are taken from the slots first; of more the slots get back what they
        were asked to be, then the pages."""
        bounds, now = self.memory.bounds, self.sizes
        more = chunks > self.chunks
        self.chunks = chunks
        if not more:
            self.target = shrunk(bounds, now, max(0, self.used_chunks - chunks))
            return
        slots = bounds.slots_in(max(0, chunks - bounds.page_chunks(now.pages)))
        slots = max(now.slots, min(slots, self._asked)) if self._elastic_slots else now.slots
        self.target = Sizes(slots, max(now.pages, bounds.pages_in(max(0, chunks - bounds.slot_chunks(slots)))))

    @property
    def _elastic_slots(self) -> bool:
        return self._experts is not None and not self._experts.resident

    def advance(self, whole: bool = False) -> None:
        """Go on toward the target: all the way, or about PIECE_BYTES. What cannot be had ends the attempt; raises it."""
        try:
            while self.moving:
                self._apply(toward(self.memory.bounds, self.sizes, self.target, 1 << 62 if whole else PIECE_BYTES))
                if not whole:
                    break
        except EngineError as error:
            self.trouble = str(error)
            self.target = self.sizes
            log.warning("memory not moved slots=%d pages=%d reason=%s", self.sizes.slots, self.sizes.pages, error)
            raise
        finally:
            # What nobody uses is others' to have.
            bounds = self.memory.bounds
            self.memory.let_go(bounds.slot_chunks(self.sizes.slots) + bounds.page_chunks(self.sizes.pages))

    def _apply(self, sizes: Sizes) -> None:
        memory, store, bounds, now = self.memory, self._store, self.memory.bounds, self.sizes
        memory.secure(bounds.slot_chunks(sizes.slots) + bounds.page_chunks(sizes.pages))
        if sizes.pages < now.pages:
            self._leave_pages(sizes.pages)
        moved = 0
        if sizes.slots < now.slots:
            assert self._experts is not None
            moved = self._experts.leave(sizes.slots)
        self.sizes = Sizes(min(now.slots, sizes.slots), min(now.pages, sizes.pages))
        memory.fit(sizes)
        if sizes.pages > now.pages:
            store.enter_pages(sizes.pages)
        if sizes.slots > now.slots:
            assert self._experts is not None
            self._experts.enter(sizes.slots)
        self.sizes = sizes
        self.moves += 1
        log.info("memory moved slots=%d was=%d pages=%d was=%d kept=%d", sizes.slots, now.slots, sizes.pages, now.pages, moved)

    def _leave_pages(self, keep: int) -> None:
        self._make_room(keep)
        renamed = self._store.leave_pages(keep)
        if renamed is not None:
            for seq in self._scheduler.running:
                if seq.table is not None:
                    seq.table.rename(renamed)
                if seq.loading is not None:
                    seq.loading.rename(renamed)
            for seq in self._scheduler.waiting:
                if isinstance(seq.restore, Held):
                    seq.restore.pages = renamed[seq.restore.pages]
        self.device.synchronize()

    def _make_room(self, keep: int) -> None:
        """Held states are released by their owner until what is used fits. Raises OutOfPages if that is not enough."""
        scheduler, refs = self._scheduler, self._store.pages.refs
        while True:
            missing = int(np.count_nonzero(refs)) - keep
            if missing <= 0:
                return
            if scheduler.reclaim is None or not self._store.holds or scheduler.reclaim(missing) <= 0:
                raise OutOfPages(missing, 0)
