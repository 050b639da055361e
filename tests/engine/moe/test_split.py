"""The division of misses while serving: rates follow what was seen, modes what steps take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.moe.cost import ASSUMED
from engine.moe.modes import WINDOW_STEPS
from engine.moe.split import LEAST_BYTES, REFIT_STEPS, MissSplit

GB = 10**9
MEASURED = replace(ASSUMED, direct_mbs=18_000)


def split(mode: str = "auto", inter: int = 512) -> MissSplit:
    return MissSplit(MEASURED, 6_000_000, 8, 4, mode, inter)  # type: ignore[arg-type]


def test_refits_use_what_happened_since_the_last_one():
    made = split()
    assert made.refit(fetch_ns=GB, fetched_bytes=10 * GB, cpu_ns=GB, cpu_bytes=40 * GB)
    assert made.rates.both_link_mbs == (3 * ASSUMED.both_link_mbs + 10_000) // 4
    assert made.rates.both_cpu_mbs == (3 * ASSUMED.both_cpu_mbs + 40_000) // 4
    old = made.rates
    assert not made.refit(GB + 1, 10 * GB + LEAST_BYTES - 1, GB, 40 * GB)
    assert made.rates == old, "too little was moved to say anything"


def test_a_refit_is_due_now_and_then_and_never_with_a_fixed_table():
    made = split()
    assert [made.stepped(1, 1000) for _ in range(REFIT_STEPS)].count(True) == 1
    made.fix(((0, 64),))
    assert not any(made.stepped(1, 1000) for _ in range(2 * REFIT_STEPS))
    assert made.table("hybrid", 1) == ((0, 64),)


def test_batch_sizes_choose_for_themselves():
    made = split()
    for _ in range(20 * WINDOW_STEPS):
        made.stepped(1, {"hybrid": 1000, "whole": 1100, "fetch": 700, "cpu": 1500}[made.mode(1)])
        made.stepped(4, {"hybrid": 1000, "whole": 1100, "fetch": 1500, "cpu": 700}[made.mode(4)])
        made.stepped(2, {"hybrid": 1000, "whole": 900, "fetch": 1500, "cpu": 1200}[made.mode(2)])
    assert [made._choices[rows].mode for rows in (1, 2, 4)] == ["fetch", "whole", "cpu"]


@pytest.mark.parametrize(("mode", "table"), [("fetch", tuple((m, 0) for m in range(33))), ("cpu", ((0, 0),))])
def test_a_mode_that_was_set_stays(mode, table):
    made = split(mode)
    for _ in range(5 * WINDOW_STEPS):
        made.stepped(1, 1000)
        assert made.mode(1) == mode
    assert made.table(made.mode(1), 1) == table


def test_only_experts_that_may_be_divided_are():
    assert any(taken for _, taken in split("hybrid").table("hybrid", 1))
    assert not any(taken for _, taken in split("hybrid", inter=0).table("hybrid", 1))
    assert not any(taken for _, taken in MissSplit(ASSUMED, 6_000_000, 8, 4, "hybrid", 512).table("hybrid", 1))
    assert split("hybrid").table("whole", 1) == split("hybrid", inter=0).table("hybrid", 1)
    assert [split(mode).divides for mode in ("auto", "hybrid", "fetch", "cpu")] == [True, True, False, False]
    assert not split(inter=0).divides
    assert not MissSplit(ASSUMED, 6_000_000, 8, 4, "hybrid", 512).divides


def test_whole_experts_are_a_mode_of_their_own_only_where_experts_may_be_divided():
    seen: dict[int, set[str]] = {}
    for inter in (512, 0):
        made = split(inter=inter)
        seen[inter] = set()
        for _ in range(8 * WINDOW_STEPS):
            seen[inter].add(made.mode(1))
            made.stepped(1, 1000)
    assert seen == {512: {"hybrid", "whole", "cpu", "fetch"}, 0: {"hybrid", "cpu", "fetch"}}
