"""The deadline's story is told in order, and predictions move the way their causes do."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.deadlines import DeadlineStatus, DeadlineTracker, blend

ON_TRACK, AT_RISK, MET, MISSED = DeadlineStatus.ON_TRACK, DeadlineStatus.AT_RISK, DeadlineStatus.MET, DeadlineStatus.MISSED


def statuses(tracker: DeadlineTracker, *steps: tuple[str, int, int]) -> list[DeadlineStatus]:
    told = []
    for what, elapsed, remaining in steps:
        report = tracker.predicted(elapsed, remaining) if what == "p" else getattr(tracker, what)(elapsed)
        if report is not None:
            assert (report.elapsed_ms, report.deadline_ms) == (elapsed, tracker.deadline_ms)
            told.append(report.status)
    return told


def test_a_turn_in_time_is_told_twice() -> None:
    steps = (("p", 0, 500), ("tick", 100, 0), ("p", 300, 200), ("first_token", 600, 0), ("tick", 5000, 0))
    assert statuses(DeadlineTracker(1000), *steps) == [ON_TRACK, MET]


def test_risk_comes_and_goes_with_the_prediction() -> None:
    steps = (("p", 0, 500), ("p", 100, 1000), ("p", 200, 100), ("first_token", 300, 0))
    assert statuses(DeadlineTracker(1000), *steps) == [ON_TRACK, AT_RISK, ON_TRACK, MET]


def test_what_few_turns_exceed_warns_although_the_prediction_is_in_time() -> None:
    tracker = DeadlineTracker(1000)
    report = tracker.foretold(100, 0.7, 1.1)
    assert report is not None
    assert (report.status, report.predicted_ttft_ms) == (DeadlineStatus.AT_RISK, 800)
    assert tracker.tick(500) is None, "time alone brings no better news"
    report = tracker.foretold(600, 0.1, 0.2)
    assert report is not None
    assert report.status is DeadlineStatus.ON_TRACK


def test_a_missed_deadline_is_told_when_it_passes_and_stays_missed() -> None:
    steps = (("p", 0, 2000), ("tick", 1001, 0), ("first_token", 2000, 0), ("p", 2001, 0))
    assert statuses(DeadlineTracker(1000), *steps) == [AT_RISK, MISSED]


def test_the_first_token_at_the_deadline_is_in_time_and_one_later_is_not() -> None:
    assert statuses(DeadlineTracker(1000), ("first_token", 1000, 0)) == [MET]
    assert statuses(DeadlineTracker(1000), ("first_token", 1001, 0)) == [MISSED]


def test_a_deadline_below_one_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="deadline_ms: got 0"):
        DeadlineTracker(0)


@given(st.lists(st.tuples(st.sampled_from(["p", "tick", "first_token"]), st.integers(0, 3000), st.integers(0, 3000))))
def test_exactly_one_final_status_and_none_after_it(steps: list[tuple[str, int, int]]) -> None:
    steps = sorted(steps, key=lambda step: step[1])
    told = statuses(DeadlineTracker(1000), *steps)
    final = [s for s in told if s in (MET, MISSED)]
    assert len(final) <= 1
    assert not final or told[-1] is final[0]
    assert all(a is not b for a, b in pairwise(told))


def test_whether_the_first_prediction_warned_is_remembered() -> None:
    tracker = DeadlineTracker(1000)
    assert tracker.warned is None
    tracker.predicted(10, 1500)
    tracker.predicted(20, 100)
    assert tracker.warned is True


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_blend_lies_between_and_converges(old: int, new: int) -> None:
    assert min(old, new) - 1 <= blend(old, new) <= max(old, new)
    value = old
    for _ in range(200):
        value = blend(value, new)
    assert abs(value - new) <= 4
