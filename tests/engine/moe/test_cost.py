"""The cost model against the formula worked out by hand and by exhaustive search, and the choice of modes on simulated
machines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.moe.cost import (
    ASSUMED,
    RING_LEAST,
    RING_PART,
    SHARE_ROWS,
    LayerPlan,
    Rates,
    decode_table,
    divisions,
    expected_union,
    keepers,
    layer_ns,
    plan_layer,
    ring_part,
    ring_slots,
    streams,
    union_table,
)
from engine.moe.modes import MODES, WINDOW_STEPS, ModeChoice

SERVER = Rates(hbm_mbs=4_000_000, link_mbs=50_000, copy_mbs=55_000, cpu_mbs=92_000, both_link_mbs=49_000, both_cpu_mbs=65_000)
RECORD = 6_291_456
rates = st.builds(
    Rates,
    *(st.integers(1, 10**6) for _ in range(6)),
    *(st.integers(0, 10**5) for _ in range(3)),
    direct_mbs=st.just(0) | st.integers(1, 10**6),
    direct_ns=st.integers(0, 10**5),
)


def test_the_formula_on_a_layer_worked_out_by_hand():
    # 3 fetched at 49 and 5 on the CPU at 65 GB/s: 385.2 µs and their reads from device memory, against 483.9 µs.
    assert layer_ns(SERVER, RECORD, 0, 8, 3) == 5 * (RECORD * 1000 // 65_000) + 8_000 + 4_000
    assert layer_ns(SERVER, RECORD, 0, 8, 8) == 8 * (RECORD * 1000 // 50_000 + RECORD * 1000 // 4_000_000) + 3_000 + 4_000
    assert layer_ns(SERVER, RECORD, 8, 0, 0) == 8 * (RECORD * 1000 // 4_000_000) + 4_000


@given(rates=rates, record=st.integers(1, 10**7), most=st.integers(0, 20), active=st.integers(0, 20))
def test_the_table_is_the_best_q_for_every_number_of_misses_and_the_larger_of_equals(rates, record, most, active):
    table = decode_table(rates, record, most, active)
    for m, q in enumerate(table):
        costs = [layer_ns(rates, record, max(0, active - m), m, other) for other in range(m + 1)]
        assert costs[q] == min(costs)
        assert all(cost > costs[q] for cost in costs[q + 1 :])


@given(
    rates=rates,
    record=st.integers(1, 10**7),
    most=st.integers(0, 12),
    active=st.integers(0, 20),
    inter=st.integers(0, 5 * SHARE_ROWS),
)
def test_no_division_is_better_than_the_tables_and_equals_fetch_most_and_take_least(rates, record, most, active, inter):
    whole = decode_table(rates, record, most, active)
    for m, chosen in enumerate(divisions(rates, record, most, active, inter)):
        known = {
            (q, taken): layer_ns(rates, record, max(0, active - m), m, q, taken, max(1, inter))
            for q in range(m + 1)
            for taken in range(0, max(1, inter), SHARE_ROWS)
            if not taken or (min(1, whole[m]) <= q < m and rates.direct_mbs)
        }
        least = min(known.values())
        assert chosen == max((d for d in known if known[d] == least), key=lambda d: (d[0], -d[1]))


@given(
    rates=rates,
    record=st.integers(1, 10**7),
    most=st.integers(0, 12),
    active=st.integers(0, 20),
    inter=st.integers(1, 12 * SHARE_ROWS),
)
def test_dividing_below_whole_experts_is_never_slower_by_the_models_own_figures(rates, record, most, active, inter):
    whole = decode_table(rates, record, most, active)
    for m, (q, taken) in enumerate(divisions(rates, record, most, active, inter)):
        hits = max(0, active - m)
        best = layer_ns(rates, record, hits, m, q, taken, inter)
        assert best <= layer_ns(rates, record, hits, m, whole[m])
        assert q >= min(1, whole[m])
        assert 0 <= taken < inter
        assert taken % SHARE_ROWS == 0


@given(rates=rates, inter=st.integers(0, 5 * SHARE_ROWS))
def test_experts_stay_whole_where_the_device_does_not_read_them_fast_enough(rates, inter):
    for slow in (replace(rates, direct_mbs=0), replace(rates, direct_mbs=1, direct_ns=10**12)):
        got = divisions(slow, RECORD, 8, 8, inter)
        assert got == tuple((q, 0) for q in decode_table(slow, RECORD, 8, 8))


def test_a_refit_takes_what_is_read_directly_along_with_the_link():
    measured = replace(SERVER, direct_mbs=40_000)
    assert measured.refitted(49_000 // 2, None).direct_mbs == pytest.approx(40_000 * 7 / 8, rel=0.001)
    assert measured.refitted(None, 1).direct_mbs == 40_000
    assert SERVER.refitted(1, 1).direct_mbs == 0
    assert replace(SERVER, direct_mbs=1).refitted(1, 1).direct_mbs == 1


def test_one_miss_is_divided_so_that_link_and_cpu_end_together():
    measured = replace(SERVER, link_mbs=50_000, both_link_mbs=47_000, both_cpu_mbs=78_000, direct_mbs=47_000, direct_ns=3_000)
    (fetched, taken) = divisions(measured, RECORD, 8, 8, 512)[1]
    assert (fetched, taken) == (0, 192)
    whole, parts = layer_ns(measured, RECORD, 7, 1, 0), layer_ns(measured, RECORD, 7, 1, 0, taken, 512)
    assert parts == RECORD * 1000 // 78_000 * 320 // 512 + 8_000 + 4_000
    assert parts * 10 < whole * 8
    six = divisions(measured, RECORD, 8, 8, 512)[6]
    assert layer_ns(measured, RECORD, 2, 6, *six, 512) < layer_ns(measured, RECORD, 2, 6, 2)


def test_the_parts_of_the_formula_with_rows_taken():
    # One of three fetched; of the other two a quarter goes over the link as well, behind it and more slowly.
    measured = replace(SERVER, direct_mbs=40_000, direct_ns=5_000)
    each_link, each_cpu = RECORD * 1000 // 49_000, RECORD * 1000 // 65_000
    link = each_link + RECORD * 1000 // 4_000_000 + 3_000 + 2 * (RECORD * 1000 // 40_000) * 128 // 512 + 5_000
    assert layer_ns(replace(measured, both_cpu_mbs=10**9), RECORD, 0, 3, 1, 128, 512) == link + 4_000
    assert layer_ns(measured, RECORD, 0, 3, 1, 128, 512) == max(link, 2 * each_cpu * 384 // 512 + 8_000) + 4_000


def test_a_server_shares_its_misses_as_its_rates_are():
    table = decode_table(SERVER, RECORD, 8, 8)
    assert table[8] == 3
    assert table[0] == 0
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(table))


@pytest.mark.parametrize(
    ("changes", "want"), [({"both_cpu_mbs": 1, "cpu_mbs": 1}, 8), ({"both_link_mbs": 1, "link_mbs": 1}, 0)]
)
def test_a_path_that_is_useless_is_not_used(changes, want):
    assert decode_table(replace(SERVER, **changes), RECORD, 8, 8)[8] == want


def test_the_more_tokens_an_expert_has_the_less_is_left_to_the_cpu():
    shares = [union_table(SERVER, RECORD, 256, tokens, 8, 256)[200] for tokens in (8, 64, 256, 1024, 8192)]
    assert shares == sorted(shares)
    assert shares[0] < 120
    assert shares[-1] > 180


@given(tokens=st.integers(0, 20_000), top_k=st.integers(1, 16), experts=st.integers(1, 512))
def test_the_union_of_evenly_chosen_experts(tokens, top_k, experts):
    k = min(top_k, experts)
    exact = experts * (1 - (1 - k / experts) ** tokens)
    assert abs(expected_union(tokens, top_k, experts) - exact) <= 1.5
    assert expected_union(tokens, top_k, experts) <= experts


def plan(tokens: int, missing: int, ring: int = 512, compute_ns: int = 500_000, rates: Rates = SERVER, crossing: int = 12_288):
    return plan_layer(
        rates,
        RECORD,
        tokens=tokens,
        top_k=8,
        experts=256,
        missing=missing,
        handoff_tokens=1024,
        handoff_bytes=crossing,
        ring=ring,
        compute_ns=compute_ns,
    )


def test_short_suffixes_fetch_their_union_with_the_cpu_and_long_ones_stream():
    short, long = plan(64, 192), plan(8192, 192, compute_ns=3_000_000)
    assert short.stream_ns is not None
    assert short.union_ns < short.stream_ns
    assert short.table is not None
    assert short.union_ns < 200 * RECORD // 90
    assert long.stream_ns is not None
    assert long.stream_ns < long.union_ns
    assert long.table is None
    assert plan(8192, 192, ring=0).stream_ns is None
    assert plan(8192, 0).union_ns == plan(8192, 0).stream_ns == 0


def test_a_cpu_that_multiplies_many_tokens_shares_a_pass_that_otherwise_streams():
    few, many = (plan(1024, 192, rates=replace(SERVER, cpu_tokens=tokens)) for tokens in (4, 32))
    assert streams([few] * 20)
    assert not streams([many] * 20)
    assert many.table is not None
    assert 64 < many.table[192] < 128  # 49 GB/s of link to 65 of CPU
    # 192 experts through 114 GB/s together, and 12.6 MB of tokens there and back through 50.
    assert many.union_ns == pytest.approx(192 * RECORD / 114 + 1024 * 12_288 / 50, rel=0.03)


def test_a_pass_whose_tokens_cost_more_on_their_way_than_the_cpu_saves_is_fetched_alone():
    alone, shared = plan(512, 12, crossing=10**6), plan(512, 12, crossing=0)
    assert alone.table is None
    assert shared.table is not None
    assert alone.union_ns == layer_ns(SERVER, RECORD, 0, 12, 12) > shared.union_ns


def test_a_short_suffix_costs_less_the_shorter_it_is():
    costs = [plan(tokens, 192).union_ns for tokens in (8, 16, 64, 256)]
    assert costs == sorted(costs)
    assert costs[0] * 2 < costs[2]


def test_a_pass_streams_all_layers_or_none_by_the_sum():
    quick, slow, never = LayerPlan(10, 90), LayerPlan(200, 90), LayerPlan(500, None)
    assert streams([slow, quick])
    assert not streams([quick, quick])
    assert not streams([slow, never])
    assert not streams([LayerPlan(0, 0)])


@given(slots=st.integers(1, 12_000), layers=st.integers(1, 100), experts=st.integers(1, 512), missing=st.integers(0, 512))
def test_a_ring_leaves_half_of_the_pool_and_a_slot_a_layer(slots, layers, experts, missing):
    ring = ring_slots(slots, layers, experts, missing)
    assert 0 <= ring <= slots // 2
    assert ring == 0 or slots - ring >= layers


def test_parts_of_a_ring_grow_with_the_compute_that_they_come_behind():
    rates = replace(ASSUMED, copy_mbs=50_000)  # 20 ns a kilobyte
    parts = [ring_part(rates, 5_000_000, compute_ns) for compute_ns in (0, 100_000, 500_000, 10**9)]
    assert parts == [RING_LEAST, RING_LEAST, 20, RING_PART]
    assert ring_slots(4096, 40, 256, 64, parts[2]) == 40


def test_only_clearly_hot_experts_stay_the_hottest_first():
    assert keepers([10, 1, 0, 30, 25, 2], [0, 1, 3, 4], 5) == [3, 4]
    assert keepers([10, 1, 0, 30, 25, 2], [0, 1, 3, 4], 1) == [3]
    assert keepers([5, 5, 5, 5], [0, 1], 5) == []


def test_refitting_moves_by_a_quarter_and_only_what_was_seen():
    moved = ASSUMED.refitted(link_mbs=10_000, cpu_mbs=None)
    assert moved.both_link_mbs == (3 * 18_000 + 10_000) // 4
    assert moved.both_cpu_mbs == ASSUMED.both_cpu_mbs


def simulate(times: dict[str, int], windows: int) -> tuple[ModeChoice, list[str]]:
    choice, used = ModeChoice(), []
    for _ in range(windows * WINDOW_STEPS):
        used.append(choice.current)
        choice.record(times[choice.current])
    return choice, used


@pytest.mark.parametrize("best", MODES)
def test_the_fastest_mode_wins_and_others_cost_little(best):
    times = {mode: 1000 if mode == best else 2000 for mode in MODES}
    choice, used = simulate(times, 300)
    assert choice.mode == best
    spent = sum(times[mode] for mode in used[10 * WINDOW_STEPS :])
    assert spent <= 1.03 * 1000 * len(used[10 * WINDOW_STEPS :])


def test_a_mode_that_becomes_faster_is_found_again():
    choice, _ = simulate({"hybrid": 1000, "whole": 1300, "fetch": 1200, "cpu": 1200}, 40)
    assert choice.mode == "hybrid"
    times = {"hybrid": 1500, "whole": 1500, "fetch": 1000, "cpu": 1200}
    for _ in range(200 * WINDOW_STEPS):
        choice.record(times[choice.current])
    assert choice.mode == "fetch"


def test_noise_does_not_switch():
    choice = ModeChoice()
    for number in range(100 * WINDOW_STEPS):
        choice.record(1000 + (number * 7919) % 20)
    assert choice.mode == "hybrid"
