"""Turns over the fake engine. Its state is a digest of its tokens, so it refuses a restore of anything but the exact prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentserve.worker.messages import (
    Checkpoints,
    Cut,
    ListCheckpoints,
    PinCheckpoint,
    Progress,
    Saved,
    Tokens,
    TurnFailed,
    TurnFinished,
)
from statecache.types import BoundaryKind
from tests.fakes.engine import EOS, next_token
from tests.worker.harness import Harness

PROMPT = list(range(14, 60)) * 5  # 230 tokens
SYSTEM = Cut(70, BoundaryKind.SYSTEM)


def greedy(prompt: list[int], count: int) -> list[int]:
    """What a cold run must answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_the_next_turn_reuses_all_but_the_last_sampled_token() -> None:
    h = Harness()
    first = h.turn(PROMPT, cuts=[SYSTEM])
    h.run()
    assert h.matched(first).position == 0
    assert h.answer(first) == greedy(PROMPT, 8)
    context = PROMPT + h.answer(first) + [20, 21, 22]
    second = h.turn(context)
    h.run()
    assert h.matched(second).position == len(PROMPT) + 7
    assert h.matched(second).kind is BoundaryKind.TURN
    assert h.matched(second).divergence is None
    assert h.answer(second) == greedy(context, 8)
    end = h.end(second)
    assert isinstance(end, TurnFinished)
    assert end.reused_tokens == len(PROMPT) + 7
    assert end.written_tokens == 1 + 3 + 7  # the last answer's end, what was added, the new answer but its last token
    cold = h.end(first)
    assert isinstance(cold, TurnFinished)
    assert cold.written_tokens == len(PROMPT) + 7
    h.assert_nothing_is_held()


def test_an_edit_falls_back_to_the_deepest_boundary_below_it() -> None:
    h = Harness()
    h.turn(PROMPT, cuts=[SYSTEM, Cut(150, BoundaryKind.TOOL_RESULT), Cut(190, BoundaryKind.USER)])
    h.run()
    edited = [*PROMPT[:170], 2, 3, *PROMPT[172:]]
    second = h.turn(edited)
    h.run()
    matched = h.matched(second)
    assert (matched.position, matched.kind) == (166, BoundaryKind.SHADOW)  # 64 before the prompt end
    assert (matched.divergence, matched.cause) == (170, "tokens")
    edited = [*PROMPT[:160], 2, *PROMPT[161:]]
    third = h.turn(edited)
    h.run()
    assert (h.matched(third).position, h.matched(third).kind) == (150, BoundaryKind.TOOL_RESULT)
    assert h.answer(third) == greedy(edited, 8)


def test_what_changes_again_and_again_costs_only_what_is_behind_it() -> None:
    """A counter in the system text, before any boundary: the place is learned when it has changed once."""
    h = Harness()
    turns = [h.turn([*PROMPT[:60], counter, *PROMPT[61:]], cuts=[SYSTEM]) for counter in (2, 3, 4) if h.run() is None]
    h.run()
    assert [h.matched(t).position for t in turns] == [0, 0, 60]
    assert h.matched(turns[2]).kind is BoundaryKind.JUNCTION
    assert h.answer(turns[2]) == greedy([*PROMPT[:60], 4, *PROMPT[61:]], 8)


def test_an_identical_prompt_needs_no_forward_pass() -> None:
    h = Harness()
    first = h.turn(PROMPT)
    h.run()
    second = h.turn(PROMPT)
    h.run()
    assert h.matched(second).position == len(PROMPT)
    assert h.answer(second) == h.answer(first)
    assert h.end(second).prompt_tokens == len(PROMPT)  # pyright: ignore[reportAttributeAccessIssue]


def test_boundaries_in_generated_tokens_become_checkpoints() -> None:
    h = Harness()
    n = len(PROMPT)
    turn = h.turn(PROMPT, script=[30, 10, 31, 32, 11, 33, 12, 34, 35, 13, EOS], max_tokens=50)
    h.run()
    kinds = dict(h.saved(turn))
    assert kinds[n] == "prompt_end"
    assert kinds[n + 1] == "think_open"
    assert kinds[n + 5] == "think_close"
    assert kinds[n + 6] == "call_open"
    assert (n + 10, "call_close") not in h.saved(turn)
    assert kinds[n + 10] == "turn"  # the call's end and the turn's end are one place, saved once, under the better name
    # An agent that drops the thinking comes back to just before it.
    dropped = [*PROMPT, 30, 33, 12]
    again = h.turn(dropped)
    h.run()
    assert (h.matched(again).position, h.matched(again).kind) == (n + 1, BoundaryKind.THINK_OPEN)
    assert h.end(turn).reason == "stop"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_prewarm_saves_the_prompt_and_generates_nothing() -> None:
    h = Harness()
    warm = h.turn(PROMPT, generate=False)
    h.run()
    assert h.answer(warm) == []
    assert (len(PROMPT), "prompt_end") in h.saved(warm)
    assert h.matched(h.turn(PROMPT)).position == len(PROMPT)
    h.run()


def test_a_cancelled_prefill_is_kept_up_to_where_it_stopped() -> None:
    h = Harness()
    turn = h.turn(PROMPT)
    for _ in range(3):
        h.loop.step()
    h.loop.cancel(turn)
    h.loop.cancel(turn)
    h.run()
    end = h.end(turn)
    assert isinstance(end, TurnFinished)
    assert (end.reason, end.ttft_s) == ("cancelled", None)
    assert (48, "partial") in h.saved(turn)
    retry = h.turn(PROMPT)
    h.run()
    assert h.matched(retry).position == 48
    assert h.answer(retry) == greedy(PROMPT, 8)
    h.assert_nothing_is_held()


def test_an_interrupted_answer_can_be_continued() -> None:
    h = Harness()
    turn = h.turn(PROMPT, max_tokens=1000)
    while len(h.answer(turn)) < 5:
        h.loop.step()
    h.loop.cancel(turn)
    h.run()
    assert h.saved(turn)[-1] == (len(PROMPT) + 4, "partial")
    goes_on = h.turn([*PROMPT, *h.answer(turn), 20, 21])
    h.run()
    assert h.matched(goes_on).position == len(PROMPT) + 4
    h.assert_nothing_is_held()


def test_a_passed_deadline_fails_the_turn_and_keeps_its_work() -> None:
    h = Harness()
    turn = h.turn(PROMPT, deadline_s=2.0)
    h.loop.step()
    h.clock_s += 1.9
    h.loop.step()
    h.clock_s += 0.2
    h.run()
    end = h.end(turn)
    assert isinstance(end, TurnFailed)
    assert end.code == "deadline_exceeded"
    assert "2100 ms" in end.message
    assert "2000 ms" in end.message
    retry = h.turn(PROMPT, deadline_s=2.0)
    h.run()
    assert h.matched(retry).position == 32
    assert isinstance(h.end(retry), TurnFinished)
    h.assert_nothing_is_held()


def test_a_deadline_after_the_first_token_does_nothing() -> None:
    h = Harness()
    turn = h.turn(PROMPT[:10], deadline_s=1.0)
    h.loop.step()
    h.clock_s += 10
    h.run()
    assert isinstance(h.end(turn), TurnFinished)


def test_nan_leaves_nothing_to_match_and_others_go_on() -> None:
    h = Harness()
    h.engine.nan.add("t1")
    bad = h.turn(PROMPT, cuts=[SYSTEM])
    good = h.turn([3, *PROMPT])
    h.run()
    end = h.end(bad)
    assert isinstance(end, TurnFailed)
    assert end.code == "server_error"
    assert "NaN" in end.message
    assert isinstance(h.end(good), TurnFinished)
    again = h.turn(PROMPT)
    assert h.matched(again).position == 0
    h.run()
    h.assert_nothing_is_held()


@pytest.mark.parametrize("place", ["device", "memory"])
@pytest.mark.parametrize("first_ends", ["well", "in NaN"])
def test_what_two_turns_build_on_goes_only_if_neither_proved_it(place: str, first_ends: str) -> None:
    h = Harness(stays=place == "device", chunk=16)
    if first_ends == "in NaN":
        h.engine.nan.add("t1")
    first = h.turn(PROMPT, cuts=[SYSTEM])
    while not h.of(first, Saved):
        h.loop.step()
    second = h.turn([*PROMPT[:70], 5, 6, 7])
    assert h.matched(second).position == 70
    h.engine.nan.add(second)
    h.run()
    assert isinstance(h.end(second), TurnFailed)
    third = h.turn(PROMPT)
    assert (h.matched(third).position == 0) is (first_ends == "in NaN"), h.matched(third).position
    h.run()
    h.assert_nothing_is_held()


def test_what_one_turn_proved_stays_when_the_turn_that_saved_it_ends_in_nan() -> None:
    h = Harness()
    h.engine.nan.add("t1")
    first = h.turn(PROMPT, cuts=[SYSTEM])
    while not h.of(first, Saved):
        h.loop.step()
    second = h.turn([*PROMPT[:70], 5, 6, 7])
    h.run()
    assert isinstance(h.end(first), TurnFailed)
    assert isinstance(h.end(second), TurnFinished)
    assert h.matched(h.turn(PROMPT)).position == 70
    h.run()
    h.assert_nothing_is_held()


@pytest.mark.parametrize("ends", ["cancelled", "prewarmed", "in NaN"])
def test_what_a_turn_without_a_token_left_outlives_the_process_unless_it_ended_in_nan(tmp_path: Path, ends: str) -> None:
    h = Harness(stays=False, disk=tmp_path)
    if ends == "in NaN":
        h.engine.nan.add("t1")
    first = h.turn(PROMPT, cuts=[SYSTEM], generate=ends != "prewarmed")
    while not h.of(first, Saved):
        h.loop.step()
    (record,) = h.cache._kept.records.values()
    assert not record.proven
    h.states.want([record.id])
    assert h.states.writer is not None
    h.states.writer.flush(60.0)
    assert not list(tmp_path.glob("*/??/*"))
    if ends == "cancelled":
        h.loop.cancel(first)
    h.run()
    assert record.proven is (ends != "in NaN")
    h.states.close()
    again = Harness(stays=False, disk=tmp_path)
    assert bool(again.cache.checkpoints()) is (ends != "in NaN")
    again.states.close()


@pytest.mark.parametrize("generated", [0, 1, 5])
def test_a_state_is_proven_when_it_is_saved_if_a_token_came_from_it(generated: int) -> None:
    h = Harness(stays=False)
    turn = h.turn(PROMPT, cuts=[SYSTEM], max_tokens=8)
    while len(h.loop._turns[turn].generated) < generated or not h.of(turn, Saved):
        h.loop.step()
    proven = {record.position: record.proven for record in h.cache._kept.records.values()}
    assert proven
    seen = len(PROMPT) + len(h.loop._turns[turn].generated) - 1 if generated else 0
    assert all(is_proven == (position <= seen) for position, is_proven in proven.items())
    h.run()
    assert all(record.proven for record in h.cache._kept.records.values())


def test_waiting_turns_hear_of_their_place_every_second() -> None:
    h = Harness(rows=1)
    h.turn(PROMPT)
    second, third = h.turn([3, *PROMPT]), h.turn([4, *PROMPT])
    h.loop.step()
    h.loop.tick()
    assert not h.of(third, Progress)
    h.clock_s += 1.0
    h.loop.tick()
    h.loop.tick()
    (frame,) = h.of(third, Progress)
    assert (frame.queued, frame.processed, frame.total) == (2, 0, len(PROMPT) + 1)
    assert frame.eta_s > h.of(second, Progress)[0].eta_s > 0
    h.run()


def test_another_salt_reuses_nothing() -> None:
    h = Harness()
    h.turn(PROMPT)
    h.run()
    other = h.turn(PROMPT, salt=b"other")
    h.run()
    assert (h.matched(other).position, h.matched(other).cause) == (0, "cold")


def test_impossible_turns_are_refused_by_name() -> None:
    h = Harness(max_context=100)
    too_long, empty, wild = h.turn(PROMPT), h.turn([]), h.turn([1, 9999])
    ends = [h.end(t) for t in (too_long, empty, wild)]
    assert [e.code for e in ends if isinstance(e, TurnFailed)] == ["context_length_exceeded", "invalid_value", "invalid_value"]
    assert "230" in ends[0].message  # pyright: ignore[reportAttributeAccessIssue]
    assert "9999" in ends[2].message  # pyright: ignore[reportAttributeAccessIssue]
    bad_cut = h.turn(PROMPT[:50], cuts=[Cut(51, BoundaryKind.USER)])
    assert isinstance(h.end(bad_cut), TurnFailed)
    h.assert_nothing_is_held()


def test_a_session_lists_what_it_placed_and_forgets_it() -> None:
    h = Harness()
    turn = h.turn(PROMPT, session="mine")
    h.run()
    h.loop.list_checkpoints(ListCheckpoints(7, "mine"))
    listing = h.frames[-1]
    assert listing.query_id == 7  # pyright: ignore[reportAttributeAccessIssue]
    rows = listing.rows  # pyright: ignore[reportAttributeAccessIssue]
    assert [(row.position, row.kind.value) for row in rows] == sorted(h.saved(turn))
    h.bridge.forget("mine")
    h.loop.list_checkpoints(ListCheckpoints(8, "mine"))
    assert h.frames[-1].rows == ()  # pyright: ignore[reportAttributeAccessIssue]
    assert h.matched(h.turn(PROMPT)).position == len(PROMPT)
    h.run()


def test_without_room_for_checkpoints_turns_still_run() -> None:
    h = Harness(ram_bytes=0)
    first = h.turn(PROMPT)
    h.run()
    second = h.turn(PROMPT)
    h.run()
    assert h.saved(first) == []
    assert h.answer(second) == h.answer(first) == greedy(PROMPT, 8)
    h.assert_nothing_is_held()


def test_a_session_pins_and_releases_its_own_checkpoints_only() -> None:
    h = Harness(ram_bytes=60_000, stays=False)
    h.turn(PROMPT, session="mine")
    h.run()
    h.loop.pin_checkpoint(PinCheckpoint(1, "mine", "", True))
    (answer,) = [f for f in h.frames if isinstance(f, Checkpoints)]
    assert answer.found
    assert [row.pinned for row in answer.rows] == [False] * (len(answer.rows) - 1) + [True]
    deepest = answer.rows[-1]
    h.loop.pin_checkpoint(PinCheckpoint(2, "other", deepest.id, False))
    h.loop.pin_checkpoint(PinCheckpoint(3, "other", "", True))
    assert [f.found for f in h.frames if isinstance(f, Checkpoints)][1:] == [False, False]
    for seed in range(40):  # much more than fits
        h.turn([seed + 20, *PROMPT], session="noise", generate=False)
        h.run()
    assert h.cache.stats().tiers["ram"].evictions > 0
    assert deepest.id in {info.id for info in h.cache.checkpoints()}
    h.loop.pin_checkpoint(PinCheckpoint(4, "mine", "", False))
    assert not any(info.pinned for info in h.cache.checkpoints())
    h.assert_nothing_is_held()


def test_shadows_move_to_where_a_client_edits() -> None:
    """Each prompt keeps all but the last 700 tokens of the one before."""
    h = Harness(ram_bytes=1 << 24)
    for n in range(30):
        prompt = [*PROMPT * 4, *[20 + i % 7 for i in range(10 * n)], *[30 + (i * n) % 11 for i in range(700)]]
        h.turn(prompt, max_tokens=1, session="editor")
        h.run()
    new = h.turn([6, *prompt], max_tokens=1)
    h.run()
    assert {len(prompt) + 1 - position for position, kind in h.saved(new) if kind == "shadow"} == {256, 1024}
    other = h.turn([5, *prompt], max_tokens=1, salt=b"other")
    h.run()
    assert {len(prompt) + 1 - position for position, kind in h.saved(other) if kind == "shadow"} == {64, 256}
    h.assert_nothing_is_held()


def test_tokens_leave_before_states_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(stays=False)
    copied: list[str] = []
    waiting: list[Tokens] = []

    def watch(name: str) -> None:
        plain = getattr(h.engine, name)

        def copy(*arguments: Any) -> Any:
            copied.append(name)
            waiting.extend(frame for frame in h.frames[h.flushed :] if isinstance(frame, Tokens))
            return plain(*arguments)

        monkeypatch.setattr(h.engine, name, copy)

    watch("copy_kv")
    watch("copy_rest")
    turn = h.turn(PROMPT)
    h.run()
    assert h.answer(turn) == greedy(PROMPT, 8)
    assert len(h.of(turn, Saved)) > 0
    assert "copy_rest" in copied
    assert waiting == []


def test_a_turn_that_calls_a_tool_is_expected_to_go_on_and_another_is_not() -> None:
    h = Harness()
    h.turn(PROMPT, session="calls", script=[30, 12, 34, 13, EOS], max_tokens=50)
    h.turn([3, *PROMPT], session="says", script=[30, 31, EOS], max_tokens=50)
    h.run()
    expected = {
        session: {i.position for i in h.cache.checkpoints(session) if h.cache._kept.records[i.id].expected_until > h.clock_s}
        for session in ("calls", "says")
    }
    assert expected == {"calls": {len(PROMPT) + 4}, "says": set()}
