"""What memory is worth: moves go where time is saved, within bounds, not back and forth, and others get what they want."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.elastic.plan import Bounds, Sizes
from engine.elastic.value import REST, WINDOWS, Costs, Patience, Seen, from_others, to_others, wish

BOUNDS = Bounds(6 << 20, 640 << 10, 6 << 20, 8, 1400, 1024, 16384)
NOW = Sizes(1280, 2048)
COSTS = Costs(miss_ns=60_000, page_ns=12_000)
counts = st.integers(0, 10**6)


@given(
    st.builds(Sizes, st.integers(8, 1400), st.integers(1024, 16384)),
    st.builds(Seen, counts, counts, st.integers(0, 20000), st.integers(0, 20000), st.integers(0, 16384)),
    st.builds(Costs, counts, counts),
)
def test_wishes_stay_within_the_bounds(now, seen, costs):
    slots = wish(BOUNDS, now, 5120, seen, costs)
    assert abs(slots) <= max(1, now.slots // 16)
    if slots > 0:
        assert now.slots - slots >= BOUNDS.least_slots
        assert max(seen.short_pages, seen.restored_pages) > 0
    if slots < 0:
        assert now.slots - slots <= BOUNDS.most_slots
        assert seen.misses > 0
        given_up = -slots * BOUNDS.record_bytes // BOUNDS.page_bytes
        assert now.pages - given_up >= BOUNDS.least_pages
        assert seen.least_free - given_up >= now.pages // 2 - 1, "pages that are used now are not idle"


def test_pages_that_are_missed_are_taken_from_slots_that_are_worth_less():
    short = Seen(hits=1000, misses=200, short_pages=400, least_free=0)
    assert wish(BOUNDS, NOW, 5120, short, COSTS) > 0
    assert wish(BOUNDS, NOW, 5120, Seen(10**7, 200, 400, 0, 0), COSTS) == 0, "every slot is busy"
    assert wish(BOUNDS, NOW, 5120, Seen(1000, 200, 400, 0, 1000), COSTS) == 0, "pages were free all the time"


def test_idle_pages_go_to_slots_where_experts_are_missed():
    assert wish(BOUNDS, NOW, 5120, Seen(1000, 900, 0, 0, 2000), COSTS) < 0
    assert wish(BOUNDS, NOW, 5120, Seen(1000, 0, 0, 0, 2000), COSTS) == 0
    assert wish(BOUNDS, NOW, 5120, Seen(1000, 900, 0, 0, 1000), COSTS) == 0, "half of the pages are kept for the next turns"


@given(st.lists(st.integers(-2, 2), max_size=60))
def test_only_what_lasts_is_granted_and_then_there_is_rest(wishes):
    patience, granted = Patience(), []
    for at, wished in enumerate(wishes):
        if patience.grants(wished):
            granted.append(at)
            last = wishes[at - WINDOWS + 1 : at + 1]
            assert len(last) == WINDOWS
            assert all(w * wished > 0 for w in last)
    assert all(after - before > REST for before, after in pairwise(granted))


def test_a_wish_that_lasts_is_granted_once_it_has():
    patience = Patience()
    assert [patience.grants(1) for _ in range(WINDOWS)] == [False] * (WINDOWS - 1) + [True]


@given(st.integers(0, 1 << 31), st.integers(1, 1 << 29), st.integers(1, 1 << 24))
def test_what_is_given_to_others_is_not_taken_back_at_once(free, reserve, chunk):
    given_up = to_others(free, reserve, chunk)
    if given_up:
        assert free < reserve <= free + given_up * chunk < reserve + chunk
        assert from_others(free, reserve, chunk) == 0
    taken = from_others(free, reserve, chunk)
    if taken:
        assert to_others(free - taken * chunk, reserve, chunk) == 0
