"""The border between slots and pages: sizes fit their memory, ways lead to their end, and what moves is what is worth it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.elastic.plan import Bounds, Sizes, chunk_size, divide, most_slots, page_moves, shrunk, slot_moves, toward
from engine.errors import InvalidRequest, OutOfPages


@st.composite
def borders(draw: st.DrawFn) -> tuple[Bounds, Sizes]:
    """Bounds, and sizes within them."""
    record, page = draw(st.integers(1, 40)) * 512, draw(st.integers(1, 12)) * 256
    least_slots, least_pages = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    most_slots, most_pages = least_slots + draw(st.integers(0, 60)), least_pages + draw(st.integers(0, 200))
    bounds = Bounds(record, page, chunk_size(4096, record), least_slots, most_slots, least_pages, most_pages)
    return bounds, Sizes(draw(st.integers(least_slots, most_slots)), draw(st.integers(least_pages, most_pages)))


def chunks_of(bounds: Bounds, sizes: Sizes) -> int:
    return bounds.slot_chunks(sizes.slots) + bounds.page_chunks(sizes.pages)


def within(bounds: Bounds, sizes: Sizes) -> bool:
    return bounds.least_slots <= sizes.slots <= bounds.most_slots and bounds.least_pages <= sizes.pages <= bounds.most_pages


@given(borders(), st.data())
def test_what_can_be_asked_for_fits_and_leaves_nothing_useful_over(border, data):
    bounds, now = border
    chunks = chunks_of(bounds, now)
    most = most_slots(bounds, chunks)
    assert most >= now.slots
    slots = data.draw(st.integers(bounds.least_slots, most))
    sizes = divide(bounds, chunks, slots)
    assert sizes.slots == slots
    assert within(bounds, sizes)
    left = chunks - chunks_of(bounds, sizes)
    assert left >= 0
    assert sizes.pages == bounds.most_pages or bounds.page_chunks(sizes.pages + 1) > bounds.page_chunks(sizes.pages) + left
    for wrong in (bounds.least_slots - 1, most + 1):
        with pytest.raises(InvalidRequest, match=f"slots: got {wrong}, accepted: {bounds.least_slots} to {most}"):
            divide(bounds, chunks, wrong)


@given(borders(), borders(), st.integers(1, 1 << 18))
def test_pieces_lead_to_the_target_and_never_take_more_than_both_ends(border, other, piece):
    bounds, now = border
    target = Sizes(
        min(max(other[1].slots, bounds.least_slots), bounds.most_slots),
        min(max(other[1].pages, bounds.least_pages), bounds.most_pages),
    )
    most = max(chunks_of(bounds, now), chunks_of(bounds, target))
    for _ in range(1000):
        if now == target:
            return
        after = toward(bounds, now, target, piece)
        assert after != now, "stuck"
        assert within(bounds, after)
        assert chunks_of(bounds, after) <= most
        for name in ("slots", "pages"):
            have, want, got = (getattr(sizes, name) for sizes in (now, target, after))
            assert min(have, want) <= got <= max(have, want)
        assert abs(after.slots - now.slots) <= max(1, piece // bounds.record_bytes)
        assert abs(after.pages - now.pages) <= max(1, piece // bounds.page_bytes)
        now = after
    raise AssertionError("did not arrive")


@given(borders(), st.integers(0, 80))
def test_under_pressure_slots_give_way_first_and_pages_only_then(border, chunks):
    bounds, now = border
    after = shrunk(bounds, now, chunks)
    assert within(bounds, after)
    assert after.slots <= now.slots
    assert after.pages <= now.pages
    given_up = chunks_of(bounds, now) - chunks_of(bounds, after)
    least = Sizes(bounds.least_slots, bounds.least_pages)
    assert given_up >= chunks or after == least
    if after.pages < now.pages:
        assert after.slots == bounds.least_slots
    if 0 < chunks <= bounds.slot_chunks(now.slots) - bounds.slot_chunks(bounds.least_slots):
        assert given_up <= chunks + bounds.slot_chunks(1), "more than was asked for"


@given(st.data())
def test_the_lately_used_experts_are_kept(data):
    owners = data.draw(st.lists(st.integers(-1, 3), min_size=1, max_size=20))
    owners = [-1 if owner < 0 else at for at, owner in enumerate(owners)]  # distinct flat ids
    last_use = data.draw(st.lists(st.integers(0, 9), min_size=len(owners), max_size=len(owners)))
    keep = data.draw(st.integers(0, len(owners)))
    moves = slot_moves(owners, last_use, keep)
    sources, dests = [source for source, _ in moves], [dest for _, dest in moves]
    assert len({*sources}) == len(sources)
    assert len({*dests}) == len(dests)
    assert all(source >= keep > dest and owners[source] >= 0 for source, dest in moves)
    replaced = {owners[dest] for dest in dests}
    stay = [last_use[s] for s in range(keep) if owners[s] >= 0 and owners[s] not in replaced] + [last_use[s] for s in sources]
    gone = [
        last_use[s] for s, owner in enumerate(owners) if owner >= 0 and s not in sources and (s >= keep or owner in replaced)
    ]
    assert not gone or not stay or (len(stay) == keep and min(stay) >= max(gone))


@given(st.lists(st.integers(0, 3), max_size=30), st.data())
def test_every_used_page_behind_the_end_moves_to_a_free_one_before_it(refs, data):
    counts = np.array(refs, dtype=np.int32)
    keep = data.draw(st.integers(0, len(refs)))
    used = [i for i in range(keep, len(refs)) if refs[i]]
    free = [i for i in range(keep) if not refs[i]]
    if len(used) > len(free):
        with pytest.raises(OutOfPages, match=f"need {len(used)} KV pages, {len(free)} free"):
            page_moves(counts, keep)
        return
    sources, dests = page_moves(counts, keep)
    assert sources.tolist() == used
    assert len({*dests.tolist()}) == len(used)
    assert {*dests.tolist()} <= {*free}


def test_a_chunk_is_one_expert_in_whole_pieces():
    assert chunk_size(2 << 20, 6_291_456) == 3 * (2 << 20)
    assert chunk_size(2 << 20, 6_291_457) == 4 * (2 << 20)
    assert chunk_size(2 << 20, 1) == 2 << 20
