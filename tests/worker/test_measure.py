"""Restore or compute again: decided by measured speeds, and a slow tier gets another chance."""

from __future__ import annotations

from agentserve.worker.measure import TRY_AGAIN, Measure
from agentserve.worker.turns import Found
from engine.types import EngineStats
from tests.worker.harness import Harness
from tests.worker.test_turn_loop import greedy

PROMPT = list(range(14, 60)) * 5
MIB = 1 << 20


def test_loading_wins_while_prefill_is_slower_than_bandwidth_over_bytes_per_token() -> None:
    measure = Measure()
    assert measure.worth_restoring(100, 100 * MIB, "disk")  # nothing is known yet
    measure.restored(100 * MIB, 1.0, "disk")
    assert measure.worth_restoring(100, 10_000 * MIB, "disk")  # the prefill rate is a guess still
    stats = Harness().engine.stats()
    measure.look(_with(stats, prefill_tokens=1000, prefill_seconds=10.0))  # 100 tokens/s
    assert measure.worth_restoring(1000, 999 * MIB, "disk")
    assert not measure.worth_restoring(1000, 1001 * MIB, "disk")
    assert measure.worth_restoring(1000, 1001 * MIB, "ram")
    answers = [measure.worth_restoring(1000, 1001 * MIB, "disk") for _ in range(TRY_AGAIN)]
    assert answers.count(True) == 1
    for _ in range(20):
        measure.restored(1000 * MIB, 1.0, "disk")
    assert measure.worth_restoring(1000, 1001 * MIB, "disk")


def test_a_restore_that_does_not_pay_is_computed_again() -> None:
    h = Harness()
    first = h.turn(PROMPT, max_tokens=3)
    h.run()
    h.bridge.worth = lambda tokens, nbytes, tier: False
    again = h.turn(PROMPT, max_tokens=3)
    h.run()
    assert h.matched(again).position == 0
    assert h.answer(again) == h.answer(first) == greedy(PROMPT, 3)
    assert h.bridge.not_worth == 1
    assert Found(0, None, None, None, "none").position == 0
    h.assert_nothing_is_held()


def _with(stats: EngineStats, **changes: float) -> EngineStats:
    from dataclasses import replace

    return replace(stats, **changes)  # pyright: ignore[reportArgumentType]
