"""Each way in which agents edit their context, played over a WebSocket through the shipped model's own template.

`Agent.turn` already holds every turn to this: the server rendered the ids that were expected, reused exactly the deepest
checkpoint below the divergence, and reported the place where the context parted. Here is said what that must come to for each
edit, why the server says it happened, and that the answer is what a cold run gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from statecache.policy import Policy
from statecache.types import BoundaryKind
from tests.e2e.agents import CALCULATE, ORDER, RESULTS, WEATHER, Agent, Json, Turn, World

SYSTEM = "You are a helpful assistant. Be brief."
QUESTION = "What is the weather in Lisbon?"
NEXT = "What is the weather in Oslo?"
MakeAgent = Callable[..., Agent]
some_ways = pytest.mark.parametrize("chained", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["resent", "chained"])
ways = pytest.mark.parametrize("chained", [False, True], ids=["resent", "chained"])


@pytest.fixture
def agent(world: World) -> Iterator[MakeAgent]:
    made: list[Agent] = []

    def make(**options: Any) -> Agent:
        made.append(Agent(world, **{"instructions": SYSTEM, "tools": [WEATHER], **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def begun(make: MakeAgent, **options: Any) -> Agent:
    """An agent that has asked for the weather and been answered: a thought, a call, its result, a thought, an answer."""
    one = make(**options)
    answer = one.ask(QUESTION)
    assert "17" in answer.said
    assert [t.calls[0]["name"] for t in one.turns[:-1]] == ["get_weather"]
    assert one.turns[1].reused == len(one.turns[0].prompt) + len(one.turns[0].generated) - 1
    return one


def system_end(turn: Turn) -> int:
    """Tokens of system text and tools: up to and with the first end of a turn."""
    ends = turn.text.markers.turn_end
    return next(i for i, token in enumerate(turn.prompt.tolist()) if token in ends) + 1


# ── 1. thinking is dropped when the user speaks again ────────────────────────────────────────────────────────────


@ways
def test_dropped_thinking_costs_only_what_follows_the_first_thought(agent: MakeAgent, chained: bool) -> None:
    one = begun(agent, chained=chained)
    first = one.turns[0]
    one.user(NEXT)
    turn = one.turn()
    assert (turn.reused, turn.report["checkpoint"]["kind"]) == (len(first.prompt), BoundaryKind.PROMPT_END)
    assert first.shown(0, turn.reused).endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert first.shown(turn.reused).startswith("<think>")
    place, item, cause = turn.divergence or (0, None, "")
    assert (place, cause) == (turn.reused, "thinking_dropped")
    assert one.items[item or 0]["type"] in ("reasoning", "function_call")
    assert turn.report["divergence"]["before"].startswith("<think>")
    one.check_cold(turn)
    one.check_placed()


@pytest.mark.parametrize("left_out", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["emptied", "left out"])
def test_thinking_that_the_client_empties_or_leaves_out_is_the_same_edit(agent: MakeAgent, left_out: bool) -> None:
    one = begun(agent)
    for item in one.items:
        if item["type"] == "reasoning":
            item["content"] = []
    if left_out:
        one.items = [i for i in one.items if i["type"] != "reasoning"]
    one.user(NEXT)
    turn = one.turn()
    assert turn.reused == len(one.turns[0].prompt)
    assert turn.divergence is not None
    assert turn.divergence[2] == "thinking_dropped"
    one.check_cold(turn)


def test_thinking_left_out_before_a_tool_result_goes_back_to_before_the_thought(agent: MakeAgent) -> None:
    """The template still writes an empty block there, so only its opening agrees."""
    one = agent()
    one.user(QUESTION)
    first = one.turn()
    one.items = [i for i in one.items if i["type"] != "reasoning"]
    one.result(first.calls[0], RESULTS["get_weather"])
    turn = one.turn()
    assert turn.reused == len(first.prompt)
    assert turn.divergence is not None
    assert turn.divergence[0] > turn.reused
    assert turn.divergence[2] == "thinking_dropped"
    one.check_cold(turn)


@some_ways
def test_retained_thinking_only_appends(agent: MakeAgent, chained: bool) -> None:
    one = begun(agent, chained=chained, options={"agentserve": {"events": True, "retain": "all"}})
    last = one.turns[-1]
    one.user(NEXT)
    turn = one.turn()
    assert turn.reused == len(last.prompt) + len(last.generated) - 1
    assert turn.divergence is None
    assert turn.shown(0).count("<think>") >= 3
    one.check_cold(turn)


# ── 2. old tool output is replaced, the last few are kept ────────────────────────────────────────────────────────


def test_cleared_tool_output_goes_back_to_the_call_before_it(agent: MakeAgent) -> None:
    one = agent(options={"agentserve": {"events": True, "retain": "all"}})
    for question in (QUESTION, NEXT):
        one.ask(question)
    outputs = [i for i in one.items if i["type"] == "function_call_output"]
    outputs[0]["output"] = "[Old tool result content cleared]"
    one.user("What is the weather in Rome?")
    turn = one.turn()
    first = one.turns[0]
    assert turn.reused == len(first.prompt) + len(first.generated) - 1
    assert turn.report["checkpoint"]["kind"] == BoundaryKind.TURN
    place, item, cause = turn.divergence or (0, None, "")
    assert place > turn.reused
    assert cause == "tool_output_changed"
    assert one.items[item or 0] is outputs[0]
    assert turn.report["divergence"]["after"].startswith("[Old")
    one.check_cold(turn)
    # Cleared once, it stays cleared: from here on the context only appends.
    one.answer_calls(turn)
    one.user("Thank you!")
    assert one.turn().divergence is None
    one.check_placed()


def test_one_of_two_parallel_outputs_cleared_keeps_the_other(agent: MakeAgent) -> None:
    one = agent()
    one.user("What is the weather in Lisbon and in Rome?")
    first = one.turn()
    for number, call in enumerate(first.calls):
        one.result(call, RESULTS["get_weather"].replace("17", str(17 + number)))
    one.turn()
    last = next(i for i in reversed(one.items) if i["type"] == "function_call_output")
    last["output"] = "[cleared]"
    del one.items[-len(one.turns[-1].output) :]
    turn = one.turn()
    assert turn.divergence is not None
    assert turn.divergence[2] == "tool_output_changed"
    assert turn.report["checkpoint"]["kind"] == (BoundaryKind.TOOL_RESULT if len(first.calls) > 1 else BoundaryKind.TURN)
    one.check_cold(turn)


# ── 3. a reminder moves to the newest user message ───────────────────────────────────────────────────────────────

REMINDER = "\n<system-reminder>Answer briefly.</system-reminder>"


def test_a_moved_reminder_costs_from_where_it_was(agent: MakeAgent) -> None:
    one = begun(agent)
    before = one.turns[-1]
    one.ask("Thank you!" + REMINDER)
    asked = next(i for i in one.items if REMINDER.strip() in str(i.get("content")))
    asked["content"][0]["text"] = "Thank you!"
    one.user(NEXT + REMINDER)
    turn = one.turn()
    place, item, cause = turn.divergence or (0, None, "")
    assert cause == "reminder_moved"
    assert one.items[item or 0] is asked
    # Everything up to the message that lost it: the turn before ends there, in the form that its successor has seen.
    assert turn.shown(turn.reused, place).endswith("Thank you!")
    assert turn.shown(0, turn.reused).endswith(before.said)
    one.check_cold(turn)


# ── 4–6. something changes in the system text ────────────────────────────────────────────────────────────────────

LONG = "You are a careful assistant. Use a tool whenever one fits, and answer in one short sentence."
CHANGING = {
    "nonce at its start": "x-billing-nonce: {}. " + LONG,
    "counter at its end": LONG + " Requests so far: {}.",
    "timestamp": LONG + " It is 2026-03-01 10:15:{}. Be kind.",
}


@pytest.mark.parametrize("form", CHANGING.values(), ids=CHANGING)
def test_a_changing_system_text_is_named(agent: MakeAgent, form: str) -> None:
    one = begun(agent, instructions=form.format("41"))
    one.instructions = form.format("57")
    one.user(NEXT)
    turn = one.turn()
    place, item, cause = turn.divergence or (0, None, "")
    assert (item, cause) == (None, "system_changed")
    assert turn.shown(0, place).endswith(form.split("{}")[0][-10:])
    assert turn.reused == 0 or turn.report["checkpoint"]["kind"] == BoundaryKind.SHADOW
    # It changes again, in the same place, which by now has a checkpoint if much lies before it.
    one.instructions = form.format("03")
    one.items[-len(turn.output) :] = []
    turn = one.turn()
    assert turn.divergence == (place, None, "system_changed")
    if place >= Policy().junction_tokens:
        assert (turn.reused, turn.report["checkpoint"]["kind"]) == (place, BoundaryKind.JUNCTION)
        one.check_cold(turn)
    one.check_placed()


# ── 7. tools are re-ordered, or one of them changes ──────────────────────────────────────────────────────────────


def test_reordered_tools_are_named_and_both_orders_kept(agent: MakeAgent) -> None:
    one = begun(agent, tools=[WEATHER, CALCULATE])
    one.tools = [CALCULATE, WEATHER]
    one.user(NEXT)
    turn = one.turn()
    assert turn.divergence is not None
    assert turn.divergence[1:] == (None, "tools_reordered")
    assert SYSTEM in turn.shown(0, turn.divergence[0])
    one.tools = [WEATHER, CALCULATE]
    one.items[-len(turn.output) :] = []
    back = one.turn()
    assert back.reused == len(one.turns[0].prompt)  # as if it had never been otherwise
    one.check_cold(back)


def test_a_dynamic_tool_description_is_named_and_costs_only_what_is_behind_it(agent: MakeAgent) -> None:
    def tools(session: str) -> list[Json]:
        return [WEATHER, {**CALCULATE, "description": "Evaluate an expression for session " + session}, ORDER]

    one = begun(agent, tools=tools("7f3a"))
    one.tools = tools("91bc")
    one.user(NEXT)
    turn = one.turn()
    place, item, cause = turn.divergence or (0, None, "")
    assert (item, cause) == (None, "tools_changed")
    assert turn.shown(0, place).endswith("for session ")
    one.tools = tools("c5d2")
    one.items[-len(turn.output) :] = []
    turn = one.turn()
    assert (turn.reused, turn.report["checkpoint"]["kind"]) == (place, BoundaryKind.JUNCTION)
    one.check_cold(turn)


def test_an_added_tool_is_named(agent: MakeAgent) -> None:
    one = begun(agent)
    one.tools = [WEATHER, ORDER]
    one.user(NEXT)
    turn = one.turn()
    assert turn.divergence is not None
    assert turn.divergence[1:] == (None, "tools_changed")


# ── 8. compaction ────────────────────────────────────────────────────────────────────────────────────────────────


def test_compaction_asks_at_full_reuse_and_starts_again_behind_the_tools(agent: MakeAgent) -> None:
    one = begun(agent)
    last = one.turns[-1]
    # As Codex does it: everything again without an id, and a request for a summary; then a short new context.
    one.user("Summarize our conversation for a new session.")
    asked = one.turn()
    assert asked.reused == len(one.turns[0].prompt)  # the template drops the thinking of the turn before
    one.items = []
    one.user("Summary of the conversation so far: " + last.said)
    one.user(NEXT)
    turn = one.turn()
    assert turn.report["checkpoint"]["kind"] == BoundaryKind.SYSTEM
    assert turn.reused == system_end(turn) == system_end(last)
    place, item, cause = turn.divergence or (0, None, "")
    assert (item, cause) == (0, "history_replaced")
    assert turn.shown(0, place).endswith("<|im_start|>user\n")
    one.check_cold(turn)


# ── 9. a sub-agent interleaves ───────────────────────────────────────────────────────────────────────────────────


def test_a_sub_agent_costs_the_main_agent_nothing(world: World, agent: MakeAgent) -> None:
    one = begun(agent)
    one.user(NEXT)
    call = one.turn()
    sub = agent(instructions="You look things up for another agent.", tools=[ORDER], like=one)
    sub.ask("What is the status of order A-1041?")
    assert sub.turns[0].reused == 0
    assert sub.turns[0].divergence is not None
    assert sub.turns[0].divergence[1:] == (None, "new_context")
    one.answer_calls(call)
    turn = one.turn()
    assert turn.reused == len(call.prompt) + len(call.generated) - 1
    assert turn.divergence is None
    one.check_cold(turn)
    # And back: the sub-agent goes on where it was.
    sub.user("And of order B-2207?")
    back = sub.turn()
    assert back.reused == len(sub.turns[0].prompt)
    sub.check_cold(back)
    one.check_placed()


# ── 10. own output comes back in other tokens ────────────────────────────────────────────────────────────────────


@some_ways
def test_own_output_keeps_the_tokens_that_were_sampled(agent: MakeAgent, chained: bool) -> None:
    """Letters that nothing but chance chooses are rarely written in the tokens that an encoder chooses."""
    odd = 0
    for seed in range(12):
        form = {"format": {"type": "regex", "pattern": "[a-z ]{20,40}"}}
        wild = {"temperature": 2.0, "seed": seed, "max_output_tokens": 200, "text": form}
        one = agent(chained=chained, options={**wild, "agentserve": {"events": True, "retain": "all"}})
        one.user("Tell me a long story about Oslo.")
        first = one.turn()
        if first.response["status"] != "completed" or first.calls:
            continue
        again = one.text.tokenizer.encode(first.said)
        text = [int(i) for i in first.generated if int(i) not in one.text.tokenizer.marker_by_id]
        odd += again.tolist() != text[-len(again) :]
        one.options = {"agentserve": {"events": True, "retain": "all"}}
        one.user("Go on.")
        turn = one.turn()
        assert turn.reused == len(first.prompt) + len(first.generated) - 1
        assert turn.divergence is None
        # Compared by ids: somebody else who sends this text gets the tokens that the encoder chooses.
        assert one.world.cold(turn.prompt) == turn.generated.tolist()
        if odd >= 2:
            break
    assert odd, "no answer was sampled in unusual tokens, so nothing was shown"


# ── 11. the prompt opens a thinking block that history does not have ─────────────────────────────────────────────


def test_an_empty_thinking_block_of_the_prompt_is_gone_from_history(agent: MakeAgent) -> None:
    one = agent(options={"reasoning": {"effort": "none"}})
    one.user("Hello there!")
    first = one.turn()
    assert first.shown(0, len(first.prompt)).endswith("<think>\n\n</think>\n\n")
    one.user(QUESTION)
    turn = one.turn()
    assert first.shown(0, turn.reused).endswith("<|im_start|>assistant\n")
    assert turn.report["checkpoint"]["kind"] == BoundaryKind.THINK_OPEN
    assert turn.divergence is not None
    assert turn.divergence[2] == "thinking_dropped"
    one.check_cold(turn)
