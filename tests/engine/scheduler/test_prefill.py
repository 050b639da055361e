"""Chunk edges and slice choice, as arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.prefill import choose_slices, next_edge


@given(
    start=st.integers(0, 300),
    more=st.integers(1, 300),
    chunk=st.integers(1, 80),
    edges=st.lists(st.integers(1, 600), unique=True).map(sorted),
)
def test_edges_from_any_start_are_the_canonical_ones_behind_it(start, more, chunk, edges):
    prompt = start + more
    want = sorted({p for p in (*range(chunk, prompt, chunk), *edges, prompt) if start < p <= prompt})
    at, got = start, []
    while at < prompt:
        at = next_edge(at, prompt, chunk, edges)
        got.append(at)
    assert got == want


@given(lengths=st.lists(st.integers(1, 100), min_size=1), budget=st.integers(-5, 200))
def test_the_first_slice_always_runs_and_the_others_within_the_budget(lengths, budget):
    chosen = choose_slices(lengths, budget)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert len(chosen) == 1 or sum(lengths[i] for i in chosen) <= budget
    left = budget - sum(lengths[i] for i in chosen)
    assert all(lengths[i] > left for i in range(len(lengths)) if i not in chosen)
