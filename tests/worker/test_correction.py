"""Corrections find the quantile that they are for, each size its own, and few far-off turns move neither."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.worker.correction import LEAST, MOST, SIZES, Correction, size_of


@pytest.mark.parametrize("percent", [50, 75])
@pytest.mark.parametrize("base", [20_000, 900_000, 40_000_000])
def test_so_many_turns_come_no_later_than_predicted(percent: int, base: int) -> None:
    rng, correction = random.Random(percent + base), Correction(percent)
    # Most take what was predicted or a little more; some are passed by others, a few of them many times.
    takes = [round(base * rng.choice((1.0, 1.1, 1.2, 1.3, 1.6, 2.5, rng.uniform(3, 20)))) for _ in range(3000)]
    in_time = 0
    for number, actual in enumerate(takes):
        in_time += number >= 500 and actual <= correction.of(base)
        correction.came(base, actual)
    # One that is within a fiftieth of it moves nothing, so that what comes often may stand a little on either side.
    assert abs(in_time / 2500 - percent / 100) < 0.15


def test_what_warns_lies_above_what_is_usual_and_a_size_says_nothing_of_another() -> None:
    rng, usual, cautious = random.Random(1), Correction(50), Correction(75)
    for _ in range(400):
        actual = round(1_000_000 * rng.lognormvariate(0.2, 0.5))
        usual.came(1_000_000, actual)
        cautious.came(1_000_000, actual)
    assert cautious.of(1_000_000) > 1.15 * usual.of(1_000_000)
    assert usual.of(20_000) == 20_000


@given(turns=st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 40)), max_size=60), percent=st.integers(1, 99))
def test_a_correction_stays_within_its_limits_and_is_kept(turns: list[tuple[int, int]], percent: int) -> None:
    correction = Correction(percent)
    for us, actual in turns:
        correction.came(us, actual)
    assert all(LEAST <= permille <= MOST for permille in correction.known)
    again = Correction(percent, correction.known)
    assert [again.of(us) for us, _ in turns] == [correction.of(us) for us, _ in turns]


@given(st.integers(0, 1 << 60), st.integers(0, 1 << 60))
def test_longer_predictions_are_of_no_smaller_size(a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert 0 <= size_of(low) <= size_of(high) < SIZES
