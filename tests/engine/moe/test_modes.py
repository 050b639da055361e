"""The choice of modes on rates that were recorded on GPUs: what it chooses must be nearly as fast as the better pure way."""

from __future__ import annotations

from random import Random

import pytest

from engine.moe.modes import MODES, MOST_ROUNDS, SETTLE_STEPS, SURE_WINDOWS, WINDOW_STEPS, Mode, ModeChoice

Rounds = dict[Mode, tuple[float, float, float]]
RECORDED: dict[str, Rounds] = {
    "25%": {
        "fetch": (58.8, 58.2, 59.4),
        "cpu": (110.7, 107.5, 113.1),
        "hybrid": (130.3, 125.8, 133.7),
        "whole": (125.9, 123.0, 130.8),
    },
    "25%, four": {
        "fetch": (63.8, 63.7, 64.1),
        "cpu": (122.3, 108.6, 140.5),
        "hybrid": (155.2, 149.8, 160.1),
        "whole": (154.9, 150.4, 159.0),
    },
    "84%": {
        "fetch": (187.6, 183.2, 193.0),
        "cpu": (276.9, 263.7, 289.9),
        "hybrid": (285.4, 263.1, 310.0),
        "whole": (280.6, 257.8, 296.4),
    },
    "84%, four": {
        "fetch": (242.3, 239.4, 245.8),
        "cpu": (495.5, 462.7, 499.0),
        "hybrid": (466.7, 457.0, 481.8),
        "whole": (511.2, 475.7, 519.1),
    },
    "84%, a slower CPU": {
        "fetch": (197.5, 184.9, 200.4),
        "cpu": (243.0, 239.4, 255.4),
        "hybrid": (260.0, 240.6, 267.5),
        "whole": (261.6, 257.7, 263.2),
    },
    "84%, the trace": {
        "fetch": (366.5, 357.4, 377.2),
        "cpu": (340.0, 337.1, 361.2),
        "hybrid": (368.0, 355.0, 374.0),
    },
    "84%, a CPU without its library": {
        "fetch": (339.0, 335.6, 344.1),
        "cpu": (69.0, 56.5, 72.6),
        "hybrid": (66.9, 66.0, 77.3),
        "whole": (75.5, 66.3, 95.2),
    },
}
"""Tokens a second by mode: median, p10 and p90 of rounds of 64 steps, of H200s (docs/gpu.md)."""
TENTHS = 2.56
"""Standard deviations between p10 and p90."""
LEARN = 720
"""Steps before it counts, as the benchmark leaves them."""


def played(rates: Rounds, seed: int, steps: int) -> list[Mode]:
    """Modes of these steps. Times wander from window to window as they did from round to round, and from step to step."""
    random = Random(seed)
    choice = ModeChoice(modes=[mode for mode in MODES if mode in rates])
    used: list[Mode] = []
    drift = 0.0
    for step in range(steps):
        mode = choice.current
        median, low, high = rates[mode]
        if step % WINDOW_STEPS == 0:
            drift = random.gauss(0, (high - low) / TENTHS / median)
        used.append(mode)
        choice.record(int(1e9 / median * max(0.5, 1 + drift + random.gauss(0, 0.08))))
    return used


def share_of_pure(rates: Rounds, used: list[Mode]) -> float:
    pure = max(rates["fetch"][0], rates["cpu"][0])
    return len(used) / sum(pure / rates[mode][0] for mode in used)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("where", RECORDED)
def test_by_recorded_rates_it_is_nearly_as_fast_as_the_better_pure_way(where, seed):
    rates = RECORDED[where]
    used = played(rates, seed, LEARN + 4000)
    assert share_of_pure(rates, used[LEARN:]) >= 0.97


@pytest.mark.parametrize("where", RECORDED)
def test_on_average_it_is_nearly_as_fast_as_the_best_of_all(where):
    rates = RECORDED[where]
    best = max(rate for rate, _, _ in rates.values()) / max(rates["fetch"][0], rates["cpu"][0])
    shares = [share_of_pure(rates, played(rates, seed, LEARN + 2000)[LEARN:]) for seed in range(20)]
    assert sum(shares) / len(shares) >= 0.975 * best


def test_rounds_go_back_and_forth_and_then_the_near_ones_are_tried_until_they_are_known():
    times = {"hybrid": 1000, "whole": 1050, "cpu": 1200, "fetch": 2000}
    choice, used = ModeChoice(), []
    for _ in range(16 * (WINDOW_STEPS + SETTLE_STEPS)):
        used.append(choice.current)
        choice.record(times[choice.current])
    windows = used[:: WINDOW_STEPS + SETTLE_STEPS]
    assert windows[:7] == [*MODES, "cpu", "whole", "hybrid"]  # what took twice as long sits the second round out
    assert sorted(windows[7:11]) == ["hybrid", "hybrid", "whole", "whole"]
    assert windows.count("whole") >= SURE_WINDOWS
    assert choice.mode == "hybrid"


@pytest.mark.parametrize("share", [0.7, 0.9, 0.97])
def test_a_cache_that_fills_does_not_make_the_last_one_tried_look_best(share):
    """Seen on a GPU: 9.3, 6.7, 6.6 and 6.1 ms in the first windows, and 3.5, 3.5, 3.7 and 4.9 later."""
    times = {"hybrid": 3500, "whole": 3550, "cpu": 3700, "fetch": 4900}
    choice, cold = ModeChoice(), 6000.0
    for step in range(40 * (WINDOW_STEPS + SETTLE_STEPS)):
        choice.record(times[choice.current] + int(cold))
        cold *= share if step % WINDOW_STEPS == 0 else 1
    assert choice.mode in ("hybrid", "whole")


def test_rounds_end():
    choice = ModeChoice()
    for step in range(20 * len(MODES) * (WINDOW_STEPS + SETTLE_STEPS)):
        choice.record(10**9 // (step + 1))  # faster and faster
        if choice._steady:
            break
    assert choice.windows <= MOST_ROUNDS * len(MODES)


def test_steps_that_were_launched_in_the_mode_before_do_not_count():
    choice = ModeChoice(modes=("hybrid", "cpu"))
    for late in (9, 90_000):
        mode = choice.current
        for step in range(WINDOW_STEPS + SETTLE_STEPS):
            choice.record(late if step < SETTLE_STEPS else 500)
        assert choice.ns[mode] == 500
    assert set(choice.ns) == {"hybrid", "cpu"}


def test_one_slow_window_does_not_drop_what_is_fastest():
    choice = ModeChoice(modes=("hybrid", "cpu"))
    for window in range(40):
        for _ in range(WINDOW_STEPS + SETTLE_STEPS):
            choice.record(1080 if choice.current == "cpu" else 1200 if window == 30 else 1000)
    assert choice.mode == "hybrid"
