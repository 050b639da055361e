"""Turns that come together compute what they share once, and nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.worker.flights import Flight, join
from agentserve.worker.messages import Cut, TurnFinished
from statecache.types import BoundaryKind
from tests.worker.harness import Harness
from tests.worker.test_turn_loop import greedy

LONG = [14 + (7 * i) % 45 for i in range(900)]
SYSTEM = Cut(600, BoundaryKind.SYSTEM)
ids = st.lists(st.integers(1, 2), min_size=1, max_size=12)


def test_identical_prompts_are_prefilled_once() -> None:
    h = Harness(ram_bytes=1 << 22)
    turns = [h.turn(LONG, max_tokens=3) for _ in range(3)]
    h.run()
    assert [h.matched(t).position for t in turns] == [0, 900, 900]
    assert all(h.answer(t) == greedy(LONG, 3) for t in turns)
    assert h.loop.load().counters["prefill_tokens"] < 1000
    h.assert_nothing_is_held()


def test_a_shared_system_prompt_is_prefilled_once() -> None:
    h = Harness(ram_bytes=1 << 22)
    prompts = [[*LONG[:600], 20 + n, *LONG[n : n + 50]] for n in range(3)]
    turns = [h.turn(prompt, cuts=[SYSTEM], max_tokens=2) for prompt in prompts]
    h.run()
    assert [h.matched(t).position for t in turns] == [0, 600, 600]
    assert all(h.answer(t) == greedy(p, 2) for t, p in zip(turns, prompts, strict=True))
    h.assert_nothing_is_held()


def test_other_principals_do_not_wait() -> None:
    h = Harness(ram_bytes=1 << 22)
    h.turn(LONG)
    other = h.turn(LONG, salt=b"other")
    assert h.matched(other).position == 0
    h.run()
    h.assert_nothing_is_held()


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 5, 30, 55, 56, 57, 58])
def test_cancelling_one_of_them_at_any_step_leaves_the_others_right(who: int, steps: int) -> None:
    h = Harness(ram_bytes=1 << 22)
    turns = [h.turn(LONG, cuts=[SYSTEM], max_tokens=3) for _ in range(3)]
    for _ in range(steps):
        h.loop.step()
    h.loop.cancel(turns[who])
    h.run()
    for number, turn in enumerate(turns):
        end = h.end(turn)
        assert isinstance(end, TurnFinished)
        if number != who or end.reason != "cancelled":
            assert h.answer(turn) == greedy(LONG, 3)
    h.assert_nothing_is_held()


def test_a_deadline_ends_the_wait() -> None:
    h = Harness(ram_bytes=1 << 22)
    first = h.turn(LONG, max_tokens=3)
    second = h.turn(LONG, deadline_s=1.0)
    h.clock_s += 2.0
    h.run()
    assert h.end(second).code == "deadline_exceeded"  # pyright: ignore[reportAttributeAccessIssue]
    assert h.answer(first) == greedy(LONG, 3)
    h.assert_nothing_is_held()


def test_a_cache_without_room_makes_nobody_wait_for_ever() -> None:
    h = Harness(ram_bytes=0)
    turns = [h.turn(LONG, max_tokens=3) for _ in range(3)]
    h.run()
    assert all(h.answer(t) == greedy(LONG, 3) for t in turns)
    h.assert_nothing_is_held()


@given(
    mine=ids,
    theirs=ids,
    processed=st.integers(0, 12),
    cuts=st.sets(st.integers(1, 12)),
    known=st.integers(0, 12),
    least=st.integers(0, 4),
)
def test_what_is_waited_for_is_shared_and_still_to_come(mine, theirs, processed, cuts, known, least) -> None:
    cuts = sorted(c for c in cuts if c <= len(theirs))
    found = join(np.array(mine, np.uint32), known, [Flight("t", np.array(theirs, np.uint32), processed, cuts)], least)
    useful = [
        c
        for c in cuts
        if c > processed
        and mine[:c] == theirs[:c]
        and len(mine) >= c
        and (c < len(mine) or mine == theirs)
        and c - known >= least > 0
    ]
    assert (found[1] if found else None) == (useful[-1] if useful else None)
