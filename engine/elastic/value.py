"""What a chunk of memory is worth on either side, by what was seen in a window of time, and when that is reason enough to move
one. Integers only: nanoseconds, counts, chunks.

Nobody knows how many more experts would be found in a few more slots, but it lies between two lines: the misses fall at least
as fast as straight down to none where every expert has a slot, and a slot holds at most its even share of the hits. So growing
is judged by the first, shrinking by the second, and what lies between moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.elastic.plan import Bounds, Sizes

STEP_SHARE = 16
"""A move takes at most a sixteenth of the slots."""
WINDOWS = 3
"""In a row that must wish the same before anything moves."""
REST = 5
"""Windows after a move that are only watched: caches fill, and states come back."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One window. hits, misses: of experts in decode steps. short_pages: most pages that were asked for and not free.
    restored_pages: that were filled again from the host. least_free: fewest free pages."""

    hits: int = 0
    misses: int = 0
    short_pages: int = 0
    restored_pages: int = 0
    least_free: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """miss_ns: what an expert takes that is not in a slot. page_ns: a page that comes back from the host."""

    miss_ns: int
    page_ns: int


def wish(bounds: Bounds, now: Sizes, experts: int, seen: Seen, costs: Costs) -> int:
    """Slots that should go to pages (> 0), or come from them (< 0); 0 = what there is is right, or not clearly wrong."""
    if not bounds.record_bytes or not bounds.page_bytes:
        return 0
    step = max(1, now.slots // STEP_SHARE)
    if seen.least_free * 4 < now.pages:
        missing = max(seen.short_pages, seen.restored_pages)
        slots = min(step, -(-missing * bounds.page_bytes // bounds.record_bytes), now.slots - bounds.least_slots)
        pages = min(missing, slots * bounds.record_bytes // bounds.page_bytes, bounds.most_pages - now.pages)
        lost_ns = slots * seen.hits * costs.miss_ns // now.slots
        # Half as much again: what is moved back and forth costs both ways.
        if slots > 0 and pages > 0 and pages * costs.page_ns * 2 > lost_ns * 3:
            return slots
        return 0
    idle = min(seen.least_free - now.pages // 2, now.pages - bounds.least_pages)
    slots = min(step, idle * bounds.page_bytes // bounds.record_bytes, bounds.most_slots - now.slots, experts - now.slots)
    if slots > 0 and seen.misses * costs.miss_ns * slots // (experts - now.slots) > 0:
        return -slots
    return 0


class Patience:
    """Lets a wish through when it has lasted."""

    def __init__(self) -> None:
        self._way = self._windows = self._rest = 0

    def grants(self, wished: int) -> bool:
        """Whether to move now. wished: of this window, of which only the direction counts."""
        way = (wished > 0) - (wished < 0)
        self._windows = self._windows + 1 if way == self._way else 1
        self._way = way
        if self._rest:
            self._rest -= 1
            return False
        if way == 0 or self._windows < WINDOWS:
            return False
        self._windows, self._rest = 0, REST
        return True


def to_others(free_bytes: int, reserve_bytes: int, chunk_bytes: int) -> int:
    """Chunks to give back because another program wants the device: up to the reserve, once half of that is gone."""
    if free_bytes * 2 >= reserve_bytes:
        return 0
    return -(-(reserve_bytes - free_bytes) // chunk_bytes)


def from_others(free_bytes: int, reserve_bytes: int, chunk_bytes: int) -> int:
    """Chunks that can be taken back with the reserve left free; none before there is twice that, so that nothing swings."""
    if free_bytes < 2 * reserve_bytes:
        return 0
    return (free_bytes - reserve_bytes) // chunk_bytes
