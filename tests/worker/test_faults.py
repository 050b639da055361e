"""Raise at the n-th call of anything that turns use: each ends once, nothing stays held, the answer is right or an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.worker.messages import Cut, TurnFailed, TurnFinished
from statecache.types import BoundaryKind
from tests.budget import examples
from tests.fakes.engine import EOS
from tests.worker.harness import Harness
from tests.worker.test_turn_loop import greedy

PROMPT = list(range(14, 60)) * 3
SCRIPT = [10, 30, 11, 12, 31, 13, EOS]


def story(h: Harness) -> dict[str, list[int]]:
    """Turns of one session: cold, appended, edited, cancelled in prefill, cancelled in decode, repeated. Id → answer."""
    ids = [h.turn(PROMPT, cuts=[Cut(40, BoundaryKind.SYSTEM)], max_tokens=6)]
    h.run()
    ids.append(h.turn([*PROMPT, *greedy(PROMPT, 6), 20, 21], script=SCRIPT, max_tokens=20))
    h.run()
    ids.append(h.turn([*PROMPT[:100], 5, *PROMPT[101:]], max_tokens=4))
    ids.append(h.turn([7, *PROMPT], max_tokens=4))
    h.loop.step()
    h.loop.step()
    h.loop.cancel(ids[-1])
    h.run()
    ids.append(h.turn([*PROMPT[:30], 6], max_tokens=1000))
    for _ in range(6):
        h.loop.step()
    h.loop.cancel(ids[-1])
    ids.append(h.turn(PROMPT, max_tokens=6))
    h.run()
    return {turn_id: h.answer(turn_id) for turn_id in ids}


CLEAN = story(Harness())
CACHE_CALLS = ("match", "kv_missing_from", "put", "admit", "move", "checkpoints", "forget", "stats", "evict", "read", "release")
ENGINE_CALLS = ("submit", "declare_cut", "cancel", "copy_rest", "copy_kv")
PLACES = ("device", "device, always short", "memory")


def break_call(h: Harness, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, error: Exception) -> None:
    """Make the nth call of a cache method raise, before or after (release) it did its work."""
    from statecache.match import Match

    owner = Match if name in ("read", "release") else h.cache
    real: Callable = getattr(owner, name)
    calls = 0

    def broken(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if name == "release":
            real(*args, **kwargs)
        if calls == nth:
            raise error
        return None if name == "release" else real(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def harness(place: str) -> Harness:
    """Where states are: in the engine's pools, there until the next chore, or in memory at once."""
    h = Harness(stays=place != "memory")
    h.engine.short = place == "device, always short"
    return h


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CACHE_CALLS)
@settings(max_examples=examples(22, 100), deadline=None)
@given(nth=st.integers(1, 40), error=st.sampled_from([OSError(28, "disk full"), KeyError("lost"), MemoryError()]))
def test_a_failing_cache_changes_no_answer_and_holds_nothing(place: str, name: str, nth: int, error: Exception) -> None:
    h = harness(place)
    with pytest.MonkeyPatch.context() as monkeypatch:
        break_call(h, monkeypatch, name, nth, error)
        answers = story(h)
    assert all(isinstance(h.end(turn_id), TurnFinished) for turn_id in answers)
    decoded_then_cancelled = "t5"
    for turn_id, answer in answers.items():
        if turn_id == decoded_then_cancelled:
            assert answer == CLEAN[turn_id][: len(answer)] or answer[: len(CLEAN[turn_id])] == CLEAN[turn_id]
        else:
            assert answer == CLEAN[turn_id]
    h.assert_nothing_is_held()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ENGINE_CALLS)
@settings(max_examples=examples(16, 100), deadline=None)
@given(nth=st.integers(1, 40))
def test_a_failing_engine_call_ends_at_most_its_turn_and_holds_nothing(place: str, name: str, nth: int) -> None:
    h = harness(place)
    h.engine.fail_at = (name, nth)
    answers = story(h)
    if name == "cancel":
        h.engine.fail_at = None
    ends = {turn_id: h.end(turn_id) for turn_id in answers}
    failed = [turn_id for turn_id, end in ends.items() if isinstance(end, TurnFailed)]
    assert len(failed) <= 1
    assert all(ends[turn_id].code == "server_error" for turn_id in failed)  # pyright: ignore[reportAttributeAccessIssue]
    for turn_id in set(answers) - set(failed) - {"t4", "t5"}:
        assert answers[turn_id] == CLEAN[turn_id]
    h.assert_nothing_is_held()


@given(steps=st.integers(0, 30), chunk=st.integers(1, 40), waiting=st.booleans())
def test_a_cancel_at_any_step_frees_everything_and_a_replay_is_right(steps: int, chunk: int, waiting: bool) -> None:
    h = Harness(chunk=chunk, rows=1)
    if waiting:
        h.turn([9, *PROMPT], max_tokens=5)
    cancelled = h.turn(PROMPT, cuts=[Cut(40, BoundaryKind.SYSTEM)], max_tokens=6)
    for _ in range(steps):
        if h.engine.has_work:
            h.loop.step()
    h.loop.cancel(cancelled)
    h.run()
    end = h.end(cancelled)
    assert isinstance(end, TurnFinished)
    assert h.answer(cancelled) == greedy(PROMPT, 6)[: len(h.answer(cancelled))]
    replay = h.turn(PROMPT, max_tokens=6)
    h.run()
    assert h.answer(replay) == greedy(PROMPT, 6)
    if end.ttft_s is None and steps > 0 and not waiting:
        assert h.matched(replay).position >= min(chunk, len(PROMPT) - 1)
    h.assert_nothing_is_held()


def test_a_corrupt_checkpoint_is_recomputed() -> None:
    h = Harness(stays=False)
    h.turn(PROMPT)
    h.run()
    real = h.engine._check

    def refuse(snapshot, tokens) -> None:
        h.engine._check = real
        from engine.errors import SnapshotMismatch

        raise SnapshotMismatch("a component is at another position")

    h.engine._check = refuse
    again = h.turn(PROMPT)
    h.run()
    assert (h.matched(again).position, h.matched(again).tier) == (0, None)
    assert h.answer(again) == greedy(PROMPT, 8)
    assert h.loop.load().counters["cache_errors"] == 1
    h.assert_nothing_is_held()
