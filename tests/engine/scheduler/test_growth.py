"""Planned pages and pauses, as arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.growth import QUANTUM_TOKENS, blend, planned_growth, to_pause

sizes = st.integers(0, 3000)


@given(length=st.integers(1, 3000), produced=sizes, most=sizes, typical=sizes, page=st.integers(1, 128))
def test_a_plan_covers_the_next_token_and_never_more_than_the_answer_may_have(length, produced, most, typical, page):
    pages = planned_growth(length, produced, most, typical, page)
    room = (-(-length // page) + pages) * page
    if produced >= most:
        assert pages == 0
    else:
        assert room >= length + 1
        assert room < length + (most - produced) + page
        assert room >= length + min(most - produced, typical - produced)


@given(values=st.lists(st.integers(0, 20_000), min_size=1), last=st.integers(0, 20_000))
def test_the_average_stays_between_what_it_saw_and_reaches_a_constant(values, last):
    average = values[0]
    for value in values:
        average = blend(average, value)
        assert min(values) <= average <= max(values)
    for _ in range(200):
        average = blend(average, last)
    assert average == last


@given(produced=st.lists(st.none() | st.integers(0, 500)))
def test_only_an_answer_beyond_its_quantum_is_paused_and_the_longest(produced):
    chosen = to_pause(produced)
    eligible = [tokens for tokens in produced if tokens is not None and tokens >= QUANTUM_TOKENS]
    if chosen is None:
        assert not eligible
    else:
        assert produced[chosen] == max(eligible)
