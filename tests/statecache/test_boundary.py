"""Where checkpoints are placed: prompt cuts and markers in generated ids."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statecache.boundary import GeneratedBoundaries, prompt_cuts
from statecache.policy import KIND_WEIGHT, Policy
from statecache.types import Boundary, BoundaryKind, MarkerTable

K = BoundaryKind
THINK, END_THINK, CALL, END_CALL, END = 1, 2, 3, 4, 5
MARKERS = MarkerTable((THINK,), (END_THINK,), (CALL,), (END_CALL,), (END,))


def cuts(boundaries, n, policy=None, after=0):
    return [(c.position, c.kind) for c in prompt_cuts(boundaries, n, policy or Policy(), after=after)]


def test_a_prompt_gets_boundaries_end_shadows_and_ladder():
    found = cuts([Boundary(500, K.SYSTEM, 0), Boundary(900, K.USER, 1)], 20_000)
    assert found == [
        (500, K.SYSTEM),
        (900, K.USER),
        (8192, K.LADDER),
        (16384, K.LADDER),
        (19_744, K.SHADOW),
        (19_936, K.SHADOW),
        (20_000, K.PROMPT_END),
    ]


def test_a_prompt_shorter_than_a_block_still_gets_its_end():
    assert cuts([], 3) == [(3, K.PROMPT_END)]
    assert cuts([], 65) == [(1, K.SHADOW), (65, K.PROMPT_END)]


def test_only_positions_behind_the_restored_one_are_cut():
    assert cuts([Boundary(500, K.SYSTEM), Boundary(900, K.USER)], 1000, after=900) == [(936, K.SHADOW), (1000, K.PROMPT_END)]


def test_a_junction_is_placed_where_it_saves_enough():
    def junctions(after: int, parted_at: int, policy: Policy | None = None) -> list[int]:
        found = prompt_cuts([Boundary(500, K.SYSTEM)], 1000, policy or Policy(), after=after, parted_at=parted_at)
        return [c.position for c in found if c.kind is K.JUNCTION]

    assert junctions(0, 432) == [432]
    assert junctions(400, 432) == [432]
    assert junctions(401, 432) == []
    assert junctions(0, 0) == []
    assert junctions(0, 1000) == []
    assert junctions(0, 500) == []  # the boundary there has the better name
    assert junctions(0, 432, Policy(junction_tokens=0)) == []


def test_the_better_kind_names_a_shared_position():
    assert (100, K.SYSTEM) in cuts([Boundary(100, K.SYSTEM), Boundary(100, K.USER)], 164)
    assert cuts([Boundary(100, K.THINK_OPEN), Boundary(164, K.SYSTEM)], 164) == [(100, K.THINK_OPEN), (164, K.SYSTEM)]


@pytest.mark.parametrize("position", [0, 11])
def test_a_boundary_outside_the_prompt_is_an_error(position):
    with pytest.raises(ValueError, match="outside a prompt of 10"):
        prompt_cuts([Boundary(position, K.USER)], 10, Policy())


@given(
    st.lists(st.tuples(st.integers(1, 30_000), st.sampled_from(list(K))), max_size=12),
    st.integers(1, 30_000),
    st.integers(0, 30_000),
    st.sampled_from([0, 100, 8192]),
)
def test_cuts_rise_are_unique_and_cover_every_boundary(raw, n, after, ladder):
    boundaries = [Boundary(min(p, n), k) for p, k in raw]
    after = min(after, n)
    found = prompt_cuts(boundaries, n, Policy(ladder_tokens=ladder), after=after)
    positions = [c.position for c in found]
    assert positions == sorted(set(positions))
    assert all(after < p <= n for p in positions)
    by_position = {c.position: c.kind for c in found}
    for b in boundaries:
        if b.position > after:
            assert KIND_WEIGHT[by_position[b.position]] >= KIND_WEIGHT[b.kind]
    assert after == n or n in by_position


def generated(ids, start=100, **kwargs):
    parser = GeneratedBoundaries(MARKERS, start, **kwargs)
    return [(b.position, b.kind) for b in parser.push_all(ids)]


def test_thinking_then_a_call_then_the_end():
    ids = [THINK, 50, 51, END_THINK, 60, CALL, 70, 71, END_CALL, END]
    assert generated(ids) == [
        (100, K.THINK_OPEN),
        (104, K.THINK_CLOSE),
        (105, K.CALL_OPEN),
        (109, K.CALL_CLOSE),
        (109, K.TURN),
    ]


def test_a_call_inside_open_thinking_closes_it():
    parser = GeneratedBoundaries(MARKERS, 10)
    assert parser.push(THINK) == Boundary(10, K.THINK_OPEN)
    assert parser.thinking
    assert parser.push(CALL) == Boundary(11, K.CALL_OPEN)
    assert not parser.thinking


def test_two_calls_in_a_row_share_the_position_between_them():
    ids = [CALL, 7, END_CALL, CALL, 8, END_CALL, END]
    assert generated(ids, 0) == [(0, K.CALL_OPEN), (3, K.CALL_CLOSE), (3, K.CALL_OPEN), (6, K.CALL_CLOSE), (6, K.TURN)]


def test_markers_inside_a_call_are_arguments():
    assert generated([CALL, THINK, END_THINK, CALL, END_CALL], 0) == [(0, K.CALL_OPEN), (5, K.CALL_CLOSE)]


def test_thinking_that_the_prompt_opened_closes():
    assert generated([9, END_THINK], 5, thinking=True) == [(7, K.THINK_CLOSE)]
    assert generated([9, END_THINK], 5) == [(7, K.THINK_CLOSE)]


def test_a_dialect_without_call_ends_starts_every_call():
    parser = GeneratedBoundaries(MarkerTable(call_open=(CALL,), turn_end=(END,)), 0)
    assert parser.push_all([CALL, 8, CALL, 8, END]) == [
        Boundary(0, K.CALL_OPEN),
        Boundary(2, K.CALL_OPEN),
        Boundary(4, K.TURN),
    ]


def test_a_tokenizer_without_markers_gives_no_boundaries():
    assert GeneratedBoundaries(MarkerTable(), 0).push_all(range(20)) == []


@given(st.lists(st.integers(1, 8), max_size=60), st.lists(st.integers(0, 60), max_size=5), st.integers(0, 1000))
def test_boundaries_are_the_same_under_any_chunking(ids, chunk_edges, start):
    whole = GeneratedBoundaries(MARKERS, start).push_all(ids)
    parser = GeneratedBoundaries(MARKERS, start)
    pieces = []
    edges = sorted({0, len(ids), *(min(e, len(ids)) for e in chunk_edges)})
    for a, b in itertools.pairwise(edges):
        pieces += parser.push_all(ids[a:b])
    assert pieces == whole
    positions = [b.position for b in whole]
    assert positions == sorted(positions)
    assert all(start <= p <= start + len(ids) for p in positions)
    assert len(whole) == len(set(whole))
    assert parser.position == start + len(ids)


@given(st.lists(st.integers(1, 60), max_size=60), st.integers(0, 1000))
def test_tokens_that_mark_nothing_need_not_be_pushed(ids, start):
    whole = GeneratedBoundaries(MARKERS, start).push_all(ids)
    parser = GeneratedBoundaries(MARKERS, start)
    marking = [(start + i, token) for i, token in enumerate(ids) if token in parser.marking]
    assert [b for b in (parser.push_at(at, token) for at, token in marking) if b is not None] == whole
