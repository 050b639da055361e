"""How the device's memory is divided between expert slots and KV pages, and what has to move when the border does. Integers
only: bytes, counts, ids.

Memory comes in chunks. Each side has the first bytes of its own addresses, as many chunks as its units need; a side shrinks at
its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import InvalidRequest, OutOfPages

NONE = -1


@dataclass(frozen=True, slots=True)
class Bounds:
    """record_bytes, page_bytes: of one slot and one page, 0 = the model has none of them. least_*, most_*: that there may
    be."""

    record_bytes: int
    page_bytes: int
    chunk_bytes: int
    least_slots: int
    most_slots: int
    least_pages: int
    most_pages: int

    def slot_chunks(self, slots: int) -> int:
        return chunks_for(slots, self.record_bytes, self.chunk_bytes)

    def page_chunks(self, pages: int) -> int:
        return chunks_for(pages, self.page_bytes, self.chunk_bytes)

    def slots_in(self, chunks: int) -> int:
        return min(self.most_slots, chunks * self.chunk_bytes // self.record_bytes) if self.record_bytes else 0

    def pages_in(self, chunks: int) -> int:
        return min(self.most_pages, chunks * self.chunk_bytes // self.page_bytes) if self.page_bytes else self.most_pages


@dataclass(frozen=True, slots=True)
class Sizes:
    """slots and pages, as divided."""

    slots: int
    pages: int


def chunk_size(granularity: int, record_bytes: int) -> int:
    """One expert in whole pieces of the granularity: finer than that nothing is moved, coarser it would not fit the slots."""
    return -(-max(record_bytes, 1) // granularity) * granularity


def chunks_for(count: int, unit_bytes: int, chunk_bytes: int) -> int:
    return -(-count * unit_bytes // chunk_bytes)


def divide(bounds: Bounds, chunks: int, slots: int) -> Sizes:
    """So many slots of a number of chunks, pages in the rest. Raises InvalidRequest where that is not within the bounds."""
    least, most = bounds.least_slots, most_slots(bounds, chunks)
    if not least <= slots <= most:
        raise InvalidRequest("slots", slots, f"{least} to {most}")
    return Sizes(slots, bounds.pages_in(chunks - bounds.slot_chunks(slots)))


def most_slots(bounds: Bounds, chunks: int) -> int:
    """What the slots may have of a number of chunks, the least pages left out."""
    return bounds.slots_in(max(0, chunks - bounds.page_chunks(bounds.least_pages)))


def shrunk(bounds: Bounds, now: Sizes, chunks: int) -> Sizes:
    """Sizes that take at least so many chunks less, as far as the bounds allow: slots first, since the host has their experts
    too."""
    have = bounds.slot_chunks(now.slots)
    slots = min(now.slots, max(bounds.least_slots, bounds.slots_in(max(0, have - chunks))))
    left = chunks - (have - bounds.slot_chunks(slots))
    pages = now.pages
    if left > 0:
        fewer = bounds.pages_in(max(0, bounds.page_chunks(pages) - left))
        pages = min(pages, max(bounds.least_pages, fewer))
    return Sizes(slots, pages)


def toward(bounds: Bounds, now: Sizes, target: Sizes, most_bytes: int) -> Sizes:
    """The next sizes on the way from now to target, of which no side changes by much more than most_bytes, or one unit."""

    def step(have: int, want: int, unit_bytes: int) -> int:
        most = max(1, most_bytes // max(1, unit_bytes))
        return max(have - most, min(have + most, want))

    slots = step(now.slots, target.slots, bounds.record_bytes)
    pages = step(now.pages, target.pages, bounds.page_bytes)
    # What grows must not take what the other side has not given up yet.
    total = max(
        bounds.slot_chunks(now.slots) + bounds.page_chunks(now.pages),
        bounds.slot_chunks(target.slots) + bounds.page_chunks(target.pages),
    )
    if slots < now.slots and pages > now.pages:
        pages = max(now.pages, min(pages, bounds.pages_in(max(0, total - bounds.slot_chunks(slots)))))
    if pages < now.pages and slots > now.slots:
        slots = max(now.slots, min(slots, bounds.slots_in(max(0, total - bounds.page_chunks(pages)))))
    return Sizes(slots, pages)


def slot_moves(owners: Sequence[int], last_use: Sequence[int], keep: int) -> list[tuple[int, int]]:
    """(from, to): which experts of slots from `keep` on go to earlier ones. owners: flat ids, NONE = free.

    The most lately used ones, each to a free slot, or to the one unused for longest if that is older than it.
    """
    leaving = sorted((s for s in range(keep, len(owners)) if owners[s] != NONE), key=lambda s: (-last_use[s], s))
    places = sorted(range(keep), key=lambda s: (owners[s] != NONE, last_use[s], s))
    moves = []
    for source, dest in zip(leaving, places, strict=False):
        if owners[dest] != NONE and last_use[dest] >= last_use[source]:
            break
        moves.append((source, dest))
    return moves


def page_moves(refs: np.ndarray, keep: int) -> tuple[np.ndarray, np.ndarray]:
    """(from, to), int32: every used page from `keep` on, to a free earlier one. refs: references to each page, 0 = free.

    Raises OutOfPages if there are not enough free ones.
    """
    used = np.flatnonzero(refs[keep:]).astype(np.int32) + np.int32(keep)
    free = np.flatnonzero(refs[:keep] == 0).astype(np.int32)
    if len(used) > len(free):
        raise OutOfPages(len(used), len(free))
    return used, free[: len(used)]
