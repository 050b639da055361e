"""The routing lab: known answers on tiny traces, an optimum that nobody beats, and what it says of the published rates."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.routing import sources
from benchmarks.routing.__main__ import main
from benchmarks.routing.figures import RATES, compare, expert_us
from benchmarks.routing.policies import Belady, Outcome, SlotCache, Static, placements, replay
from benchmarks.routing.trace import DEMO, Trace, load
from engine.moe.cost import layer_ns

EVERY = (0, 1, 2)


def one_layer(*experts: int, of: int = 4, prompt: int = 0) -> Trace:
    """top-1; the first `prompt` tokens are prompt. counted_from is the first generated token's quarter."""
    routes = np.array(experts, dtype=np.uint16).reshape(-1, 1, 1)
    return Trace("tiny", of, routes, np.arange(len(experts)) >= prompt)


def missed(trace: Trace, placement) -> list[int]:
    """Misses of every generated token, the first ones too."""
    out = []
    for generated, start, end in trace.phases():
        if not generated:
            placement.prefill(trace.routes[start:end])
            continue
        for token in range(start, end):
            out.append(sum(placement.token(i, trace.routes[token, i].tolist())[0] for i in range(trace.layers)))
    return out


def test_lru_forgets_in_a_cycle_what_the_optimum_keeps():
    cycle = one_layer(*[0, 1, 2] * 4)
    assert missed(cycle, SlotCache("lru", 2, 1, 4, EVERY)) == [1] * 12
    # With 2 slots over a cycle of 3 the optimum keeps two for good and lets the third pass by.
    assert missed(cycle, Belady(2, cycle)) == [1, 1, 1] + [0, 0, 1] * 3


def test_the_optimum_does_not_keep_what_is_never_used_again():
    trace = one_layer(0, 1, 3, 0, 1, 2, 0, 1)
    assert missed(trace, Belady(2, trace)) == [1, 1, 1, 0, 0, 1, 0, 0]


def test_misses_that_run_on_the_cpu_do_not_enter_the_cache():
    trace = one_layer(0, 0, 0)
    assert missed(trace, SlotCache("lru", 2, 1, 4, (0,))) == [1, 1, 1]
    assert missed(trace, SlotCache("lru", 2, 1, 4, EVERY)) == [1, 0, 0]


def test_a_floor_keeps_layers_from_taking_each_others_last_slots():
    routes = np.array([[[0], [0]], [[1], [0]], [[2], [0]], [[3], [0]]], dtype=np.uint16)
    trace = Trace("two layers", 4, routes, np.ones(4, dtype=bool))
    floor = SlotCache("lru_floor", 4, 2, 4, EVERY)
    assert [floor.token(0, [e])[0] + floor.token(1, [0])[0] for e in (0, 1, 2, 3)] == [2, 1, 1, 1]
    assert replay(trace, SlotCache("lru_floor", 4, 2, 4, EVERY)).misses[:, 1].tolist() == [0, 0, 0]


def test_static_placement_knows_the_prompt_or_nothing():
    trace = one_layer(3, 3, 2, 3, 2, 0, 1, prompt=3)
    assert missed(trace, Static(2, 1, 4, by_prefill=True)) == [0, 0, 1, 1]
    assert missed(trace, Static(2, 1, 4, by_prefill=False)) == [1, 1, 0, 0]


def test_prefill_leaves_the_most_used_experts_in_slots():
    cache = SlotCache("lru", 4, 1, 16, EVERY)
    assert cache.prefill(np.array([[[5]], [[5]], [[9]], [[5]]], dtype=np.uint16)) == 2
    assert cache.token(0, [5]) == (0, 0)
    assert cache.token(0, [7]) == (1, 1)


def test_a_long_prefill_borrows_the_coldest_slots():
    cache = SlotCache("lru", 8, 1, 16, EVERY)
    for expert in range(8):
        cache.token(0, [expert])
    cache.prefill(np.full((600, 1, 1), 7, dtype=np.uint16))
    assert [cache.map.slot_for_id[e] >= 0 for e in range(8)] == [False] * 4 + [True] * 4


routes = st.lists(st.permutations(range(5)).map(lambda p: p[:2]), min_size=8, max_size=40)


def best_by_trying(trace: Trace, slots: int) -> int:
    """Fewest misses over all tokens, by trying every content of the slots after every token. One layer."""
    costs = {frozenset(): 0}
    for row in trace.routes[:, 0].tolist():
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            cost += sum(e not in held for e in row)
            here = sorted(held | set(row))
            for keep in product((False, True), repeat=len(here)):
                left = frozenset(e for e, kept in zip(here, keep, strict=True) if kept)
                if len(left) <= slots:
                    after[left] = min(cost, after.get(left, cost))
        costs = after
    return min(costs.values())


@settings(max_examples=15, deadline=None)
@given(rows=routes.map(lambda r: r[:9]), slots=st.integers(1, 3))
def test_the_optimum_is_what_trying_everything_finds(rows, slots):
    trace = Trace("tried", 5, np.array(rows, dtype=np.uint16)[:, None, :], np.ones(len(rows), dtype=bool))
    assert sum(missed(trace, Belady(slots, trace))) == best_by_trying(trace, slots)


@settings(max_examples=20, deadline=None)
@given(rows=routes, slots=st.integers(2, 5), prompt=st.integers(0, 4))
def test_nobody_misses_less_than_the_optimum(rows, slots, prompt):
    generated = np.arange(len(rows)) >= prompt
    trace = Trace("random", 5, np.array(rows, dtype=np.uint16)[:, None, :], generated)
    best = sum(missed(trace, Belady(slots, trace)))
    for (policy, _), make in placements(trace, slots, (0, 1, 1)).items():
        given_before = slots if policy.startswith("static") else 0
        assert sum(missed(trace, make())) >= best - given_before


def test_a_recording_comes_back_from_its_file(tmp_path):
    trace = sources.local(layers=2, experts=16, top_k=2, turns=2, prompt=5, output=9)
    trace.save(tmp_path / "trace.npz")
    again = load(tmp_path / "trace.npz")
    assert np.array_equal(again.routes, trace.routes)
    assert np.array_equal(again.generated, trace.generated)
    assert list(again.phases()) == [(False, 0, 5), (True, 5, 14), (False, 14, 19), (True, 19, 28)]
    assert again.counted_from() == 19
    assert (np.sort(trace.routes, axis=2)[:, :, 1:] > np.sort(trace.routes, axis=2)[:, :, :-1]).all()


def test_the_local_trace_misses_as_published():
    share, trace = sources.PUBLISHED_RESIDENT, sources.local(layers=2)
    lines = compare(trace, share, RATES["server"])
    missing = {line["policy"]: 1 - line["hit_rate"] for line in lines if line["misses"] != "shared"}
    for policy, published in sources.PUBLISHED_MISSES.items():
        assert missing[policy] == pytest.approx(published, abs=0.04), policy


def test_the_demo_models_recording_has_locality():
    trace = load(DEMO)
    assert (trace.layers, trace.experts, trace.top_k) == (8, 16, 2)
    assert trace.overlap() > 2 * trace.top_k / trace.experts


def test_time_is_the_cost_models():
    rates = RATES["desktop"]
    outcome = Outcome(8, np.array([[0, 3], [2, 3]]), np.array([[0, 1], [2, 3]]), 0)
    parts = [layer_ns(rates, 1000, 8 - m, m, f) for m, f in ((0, 0), (3, 1), (2, 2), (3, 3))]
    assert expert_us(outcome, rates, 1000) == pytest.approx(sum(parts) / 2 / 1000)


def test_the_command_prints_a_line_for_each_policy_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    trace = sources.local(layers=2, experts=16, top_k=2, turns=2, prompt=5, output=20, name="small")
    trace.save(tmp_path / "small.npz")
    main(["--trace", str(tmp_path / "small.npz"), "--resident", "25", "50", "--plot", str(tmp_path / "p.png")])
    out = capsys.readouterr().out
    assert out.count('"benchmark": "routing"') == 2 * 9
    assert "static, blind" in out
    assert (tmp_path / "p.png").stat().st_size > 10_000
