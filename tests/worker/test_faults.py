"""Raise at the n-th call of anything that turns use: each ends once, nothing stays held, the answer is right or an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.worker.messages import Cut, TurnFailed, TurnFinished
from statecache.match import Match
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
CACHE_CALLS = ("match", "admit", "move", "read", "release")
ENGINE_CALLS = ("submit", "declare_cut", "cancel", "copy_rest", "copy_kv")
PLACES = ("device", "device, always short", "memory")


def harness(place: str) -> Harness:
    """Where states are: in the engine's pools, there until the next chore, or in memory at once."""
    h = Harness(stays=place != "memory")
    h.engine.short = place == "device, always short"
    return h


def around_calls(h: Harness, monkeypatch: pytest.MonkeyPatch, name: str, around: Callable) -> None:
    """Let around(real, *arguments) be called instead of a method of the cache or of its matches."""
    owner = Match if name in ("read", "release") else h.cache
    real: Callable = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: around(real, *args, **kwargs))


def calls_of(place: str) -> Counter[str]:
    """How often the story calls each, where nothing fails."""
    h, calls = harness(place), Counter[str]()

    def counted(name: str) -> Callable:
        def around(real: Callable, *args: object, **kwargs: object) -> object:
            calls[name] += 1
            return real(*args, **kwargs)

        return around

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in CACHE_CALLS:
            around_calls(h, monkeypatch, name, counted(name))
        story(h)
    return calls + Counter(h.engine.calls)


CALLS = {place: calls_of(place) for place in PLACES}


def break_call(h: Harness, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, error: Exception) -> None:
    """Make the nth call of a method raise, before or after (release) it did its work."""
    calls = 0

    def broken(real: Callable, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        result = real(*args, **kwargs) if calls != nth or name == "release" else None
        if calls == nth:
            raise error
        return result

    around_calls(h, monkeypatch, name, broken)


def made_in(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """(place, name) of the calls that the story makes there."""
    return [(place, name) for place in PLACES for name in names if CALLS[place][name]]


def test_the_story_calls_everything_that_is_made_to_fail() -> None:
    assert {name for _, name in made_in(CACHE_CALLS + ENGINE_CALLS)} == {*CACHE_CALLS, *ENGINE_CALLS}


@pytest.mark.parametrize(("place", "name"), made_in(CACHE_CALLS))
@settings(max_examples=examples(22, 100), deadline=None)
@given(data=st.data(), error=st.sampled_from([OSError(28, "disk full"), KeyError("lost"), MemoryError()]))
def test_a_failing_cache_changes_no_answer_and_holds_nothing(
    place: str, name: str, data: st.DataObject, error: Exception
) -> None:
    h, nth = harness(place), data.draw(st.integers(1, CALLS[place][name]), "nth")
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


@pytest.mark.parametrize(("place", "name"), made_in(ENGINE_CALLS))
@settings(max_examples=examples(16, 100), deadline=None)
@given(data=st.data())
def test_a_failing_engine_call_ends_at_most_its_turn_and_holds_nothing(place: str, name: str, data: st.DataObject) -> None:
    h, nth = harness(place), data.draw(st.integers(1, CALLS[place][name]), "nth")
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
