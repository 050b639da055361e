"""Watches what experts and pages are worth, and whether another program wants the device, and moves the border for it.

Looks once in a window; between them it only notes how few pages were free. The decisions are value.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.budget import RESERVE_BYTES
from engine.elastic.boundary import Boundary, Divided
from engine.elastic.plan import divide
from engine.elastic.value import Costs, Patience, Seen, from_others, to_others, wish
from engine.errors import InvalidRequest
from engine.kvcache.store import StateStore
from engine.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)
WINDOW_NS = 2_000_000_000


class Controller:
    """One per engine. divided.trade: whether slots and pages may trade by what they are worth; what others want is given in
    any case. clock_ns: of windows."""

    def __init__(
        self,
        boundary: Boundary,
        divided: Divided,
        store: StateStore,
        scheduler: Scheduler,
        clock_ns: Callable[[], int],
    ) -> None:
        self._boundary, self._experts, self._store, self._scheduler = boundary, divided.experts, store, scheduler
        self._reserve_bytes = min(RESERVE_BYTES, divided.device.memory().total // 20)
        self._trade, self._clock_ns = divided.trade, clock_ns
        self._patience, self._free_windows = Patience(), 0
        self._next_ns = clock_ns() + WINDOW_NS
        self._least_free = store.pages.free
        self._counted = (0, 0, 0)

    def look(self) -> None:
        """Between passes, as often as there is a chance. Sets the boundary's target; moves nothing itself."""
        self._least_free = min(self._least_free, self._store.pages.free)
        if self._clock_ns() < self._next_ns:
            return
        self._next_ns = self._clock_ns() + WINDOW_NS
        seen = self._take()
        if self._boundary.moving or self._yield_to_others() or not self._trade or self._experts is None:
            return
        boundary, pool = self._boundary, self._experts
        rates, size = pool.rates, boundary.memory.bounds.record_bytes
        miss_ns = size * 1000 // max(1, rates.both_link_mbs + rates.both_cpu_mbs)
        page_ns = boundary.memory.bounds.page_bytes * 1000 // max(1, rates.copy_mbs)
        wished = 0 if pool.resident else wish(boundary.memory.bounds, boundary.sizes, pool.total, seen, Costs(miss_ns, page_ns))
        if not self._patience.grants(wished):
            return
        try:
            divide(boundary.memory.bounds, boundary.chunks, boundary.sizes.slots - wished)
        except InvalidRequest:
            return  # the last chunk's rest
        log.info("memory is worth moving slots=%d seen=%s", -wished, seen)
        boundary.ask(boundary.sizes.slots - wished)

    def _take(self) -> Seen:
        """What happened since the last window. Waits for the device, which is idle between steps."""
        scheduler, page_bytes = self._scheduler, max(1, self._boundary.memory.bounds.page_bytes)
        hits, misses = self._experts.totals()[2:] if self._experts is not None else (0, 0)
        now = (hits, misses, scheduler.loaded_bytes)
        hits, misses, loaded = (new - old for new, old in zip(now, self._counted, strict=True))
        seen = Seen(hits, misses, scheduler.short_pages, loaded // page_bytes, self._least_free)
        self._counted = now
        self._least_free, scheduler.short_pages = self._store.pages.free, 0
        return seen

    def _yield_to_others(self) -> bool:
        """Give memory up that another program wants, take back what it does not want any more. Whether either happened."""
        boundary = self._boundary
        free, chunk = boundary.device.free_bytes(), boundary.memory.bounds.chunk_bytes
        less = to_others(free, self._reserve_bytes, chunk)
        if less:
            self._free_windows = 0
            log.warning("another program wants the device free_bytes=%d giving_bytes=%d", free, less * chunk)
            boundary.allow(max(0, boundary.used_chunks - less))
            return True
        back = min(from_others(free, self._reserve_bytes, chunk), boundary.home_chunks - boundary.used_chunks)
        self._free_windows = self._free_windows + 1 if back > 0 and boundary.lent_chunks else 0
        if self._free_windows < 3:
            return False
        self._free_windows = 0
        boundary.allow(min(boundary.home_chunks, boundary.used_chunks + back))
        return True
