"""What else agents do with contexts, and how much of it must be reused: sharing, branching, growing, repeating, rewriting JSON.

As in test_context_edits.py, `Agent.turn` holds every turn to the deepest checkpoint that it agrees with.
"""

from __future__ import annotations

import itertools
import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentserve.cli.private_server import private_server
from statecache.types import BoundaryKind
from tests.e2e.agents import ORDER, WEATHER, Agent, Json, Turn, World, settings, tool
from tests.e2e.conftest import DEMO_MODEL

SYSTEM = "You are a helpful assistant. Be brief."
QUESTION = "What is the weather in Lisbon?"
KEEP = {"agentserve": {"events": True, "retain": "all"}}
THERMOSTAT = tool("set_thermostat", "Set the temperature in a room", room="string", temperature="integer")
MakeAgent = Callable[..., Agent]


@pytest.fixture
def agent(world: World) -> Iterator[MakeAgent]:
    made: list[Agent] = []

    def make(**options: Any) -> Agent:
        made.append(Agent(options.pop("world", world), **{"instructions": SYSTEM, "tools": [WEATHER], **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def whole(turn: Turn) -> int:
    """Tokens that the turn left behind in the cache: all but the last sampled one."""
    return len(turn.prompt) + len(turn.generated) - 1


def test_a_second_session_starts_behind_the_shared_instructions_and_tools(agent: MakeAgent) -> None:
    first = agent()
    first.ask(QUESTION)
    second = agent(like=first)
    second.user("Hello there!")
    turn = second.turn()
    assert turn.report["checkpoint"]["kind"] == BoundaryKind.SYSTEM
    assert turn.shown(0, turn.reused).endswith("</tools><|im_end|>")
    second.check_cold(turn)


def test_branches_of_one_response_do_not_disturb_each_other(agent: MakeAgent) -> None:
    main = agent(chained=True, options=KEEP)
    root = main.ask(QUESTION)
    branches = []
    for question in ("Thank you!", "What is the weather in Oslo?"):
        one = agent(like=main, chained=True, options=KEEP)
        one.items, one.turns, one._sent = list(main.items), list(main.turns), main._sent
        one.user(question)
        branches.append((one, one.turn()))
    for _, turn in branches:
        assert turn.reused == whole(root)
        assert turn.body["previous_response_id"] == root.response["id"]
    for one, turn in branches:
        one.user("Hello there!")
        assert one.turn().reused == whole(turn)
    main.user("And in Rome?")
    last = main.turn()
    assert last.reused == whole(root)
    main.check_cold(last)


INSTRUCTIONS = " ".join(f"Rule {n}: answer in one short sentence, name the city, and never guess a value." for n in range(16))


def test_ten_turns_that_only_append_prefill_only_what_is_new(agent: MakeAgent, record_property: Callable[..., None]) -> None:
    """Each reuses all but the last token of the one before: 96.1% to 98.0% of prompts that grow from 721 to 1,313 tokens."""
    one = agent(instructions=INSTRUCTIONS, options=KEEP)
    for city in ("Lisbon", "Oslo", "Rome", "Paris", "Madrid"):
        one.ask(f"What is the weather in {city}?")
    assert len(one.turns) >= 10
    for before, turn in itertools.pairwise(one.turns):
        assert turn.divergence is None
        assert turn.reused == whole(before)
    shares = [turn.reused / len(turn.prompt) for turn in one.turns[1:]]
    record_property("reused_share", [round(s, 4) for s in shares])
    assert min(shares) >= 0.95
    one.check_placed()


def test_an_identical_prompt_prefills_nothing(agent: MakeAgent) -> None:
    one = agent()
    one.user(QUESTION)
    first = one.turn()
    one.items = one.items[:1]
    again = one.turn()
    assert again.reused == len(again.prompt) == len(first.prompt)
    assert again.divergence is None
    assert again.generated.tolist() == first.generated.tolist()
    calls = [c["call_id"] for t in one.turns for c in t.calls]
    assert len(set(calls)) == len(calls)
    # Not even one that is asked for with another number of tokens or at random.
    one.items = one.items[:1]
    one.options = {"temperature": 1.0, "seed": 3, "max_output_tokens": 5}
    assert one.turn().reused == len(first.prompt)


def test_a_prewarmed_context_is_there_for_the_first_turn(agent: MakeAgent) -> None:
    """As Codex begins: a developer message and tools without an answer, then the question behind it."""
    one = agent(instructions=None, chained=True, options={"generate": False})
    one.items.append({"type": "message", "role": "developer", "content": [{"type": "input_text", "text": SYSTEM}]})
    warm = one.turn()
    assert warm.output == []
    one.options = {}
    one.user(QUESTION)
    turn = one.turn()
    assert turn.reused == len(warm.prompt)
    assert turn.divergence is None
    one.check_cold(turn)


def test_an_edited_question_keeps_the_turns_before_it(agent: MakeAgent) -> None:
    one = agent(options=KEEP)
    last = one.ask(QUESTION)
    one.user("Thank you!")
    one.turn()
    asked = max(i for i, item in enumerate(one.items) if item.get("role") == "user")
    del one.items[asked:]  # the message is written anew, what followed it is gone
    one.user("Hello there!")
    turn = one.turn()
    assert turn.reused >= whole(last)
    assert turn.divergence is not None
    assert turn.divergence[1:] == (asked, "message_changed")
    one.check_cold(turn)


def test_a_turn_that_ends_with_its_first_call_is_whole_for_the_next(agent: MakeAgent) -> None:
    """Generation goes on for a moment behind the only call that was wanted, how far is a matter of time. No client sees it."""
    one = agent(options={**KEEP, "parallel_tool_calls": False})
    one.user("What is the weather in Lisbon and in Oslo?")
    first = one.turn()
    (call,) = first.calls
    assert first.generated[-1] in first.text.markers.call_close
    one.result(call, "cloudy")
    one.held_to_all = False  # the last token may or may not have reached the state
    turn = one.turn()
    assert turn.reused >= whole(first)
    assert turn.divergence is None
    one.check_cold(turn)


# ── the same said in other bytes ─────────────────────────────────────────────────────────────────────────────────


def _turned(value: Any) -> Any:
    """The same JSON value with the keys of every object in reverse order."""
    if isinstance(value, dict):
        return {k: _turned(v) for k, v in reversed(value.items())}
    return [_turned(v) for v in value] if isinstance(value, list) else value


def test_tools_with_their_keys_in_another_order_are_the_same_prompt(agent: MakeAgent) -> None:
    one = agent(tools=[WEATHER, THERMOSTAT], options=KEEP)
    last = one.ask(QUESTION)
    one.tools = [_turned(t) for t in one.tools]
    assert json.dumps(one.tools) != json.dumps([WEATHER, THERMOSTAT])
    one.user("Thank you!")
    turn = one.turn()
    assert turn.reused == whole(last)
    assert turn.divergence is None


def test_tools_described_as_mcp_does_are_the_same_prompt(agent: MakeAgent) -> None:
    one = agent(options=KEEP)
    last = one.ask(QUESTION)
    mcp = {"name": WEATHER["name"], "description": WEATHER["description"], "inputSchema": WEATHER["parameters"]}
    one.tools = [mcp]
    one.user("Thank you!")
    assert one.turn().reused == whole(last)


REWRITES: dict[str, Callable[[Json], str]] = {
    "compact": lambda a: json.dumps(a, separators=(",", ":")),
    "keys turned": lambda a: json.dumps(_turned(a)),
    "floats": lambda a: json.dumps({k: float(v) if isinstance(v, int) else v for k, v in a.items()}),
    "escaped": lambda a: "{" + ", ".join(f'"{k}": {_escaped(v)}' for k, v in a.items()) + "}",
}


def _escaped(value: Any) -> str:
    return '"' + "".join(f"\\u{ord(c):04x}" for c in value) + '"' if isinstance(value, str) else json.dumps(value)


def test_calls_written_in_other_json_keep_their_tokens(agent: MakeAgent) -> None:
    one = agent(tools=[THERMOSTAT], options=KEEP)
    one.user("Set the temperature in the kitchen to 21 degrees.")
    first = one.turn()
    (call,) = first.calls
    arguments = json.loads(call["arguments"])
    assert arguments["temperature"] == 21, "the model wrote no number, so nothing would be shown"
    asked = list(one.items)
    for rewrite in REWRITES.values():
        one.items = [{**i, "arguments": rewrite(arguments)} if i["type"] == "function_call" else i for i in asked]
        one.result(call, "ok, currently 19")
        turn = one.turn()
        assert turn.reused >= whole(first)
        assert turn.divergence is None
        assert turn.prompt.tolist() == one.turns[1].prompt.tolist()
    # Another value is another call.
    one.items = [{**i, "arguments": json.dumps({**arguments, "temperature": 22})} if i is asked[-1] else i for i in asked]
    one.result(call, "ok, currently 19")
    turn = one.turn()
    assert turn.divergence is not None
    assert turn.divergence[2] == "call_changed"
    assert one.items[turn.divergence[1] or 0]["type"] == "function_call"
    one.check_cold(turn)


# ── other servers ────────────────────────────────────────────────────────────────────────────────────────────────


def other_world(directory: Path, *flags: str, model_dir: Path = DEMO_MODEL) -> Iterator[World]:
    (directory / "settings.toml").write_text(settings("exact"))
    common = ("--config", str(directory / "settings.toml"), "--threads", "1", "--model", str(model_dir))
    with private_server(directory / "state", flags=(*common, *flags)) as running:
        running.start()
        world = World(running, model_dir)
        yield world
        world.close()


@pytest.fixture
def opening_world(tmp_path: Path) -> Iterator[World]:
    """The shipped model with a template that opens the thinking in the generation prompt, as many do."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    template = model / "chat_template.jinja"
    source = template.read_text()
    prompt = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined"
    assert source.count(prompt) == 1
    opened = "{%- else %}\n        {{- '<think>\\n' }}\n    {%- endif %}\n{%- endif %}"
    head, tail = source.split(prompt)
    template.write_text(head + prompt + tail.rsplit("{%- endif %}\n{%- endif %}", 1)[0] + opened)
    yield from other_world(tmp_path, model_dir=model)


def test_a_prompt_that_opens_thinking_agrees_up_to_before_it(opening_world: World, agent: MakeAgent) -> None:
    one = agent(world=opening_world)
    one.user(QUESTION)
    first = one.turn()
    assert first.shown(0, len(first.prompt)).endswith("<|im_start|>assistant\n<think>\n")
    one.answer_calls(first)
    second = one.turn()
    assert second.reused == whole(first)  # in the same user turn nothing is dropped
    one.items = [i for i in one.items if i["type"] != "reasoning"]
    one.user("Thank you!")
    turn = one.turn()
    assert turn.shown(0, turn.reused).endswith(f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert turn.report["checkpoint"]["kind"] == BoundaryKind.THINK_OPEN
    assert turn.divergence is not None
    assert turn.divergence[2] == "thinking_dropped"
    one.check_cold(turn)


@pytest.fixture
def small_world(tmp_path: Path) -> Iterator[World]:
    yield from other_world(tmp_path, "--cache-mb", "16")


@pytest.mark.slow
def test_a_busy_sub_agent_does_not_push_the_main_agent_out(small_world: World, agent: MakeAgent) -> None:
    """A cache that holds a few dozen states: what the main agent comes back to is worth more than what the sub-agent passed."""
    main = agent(world=small_world, options=KEEP)
    last = main.ask(QUESTION)
    sub = agent(world=small_world, instructions="You look things up for another agent.", tools=[ORDER], like=main, options=KEEP)
    sub.held_to_all = False
    for number in range(12):
        sub.ask(f"What is the status of order A-{1041 + number}?")
    main.held_to_all = False
    main.user("Thank you!")
    turn = main.turn()
    assert evictions(small_world) > 0
    assert turn.reused == whole(last)
    main.check_cold(turn)


def evictions(world: World) -> float:
    target = world.server.target
    with urllib.request.urlopen(urllib.request.Request(target.url + "/metrics", headers=target.headers), timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    name = 'agentserve_worker_counter{name="ram_evictions",'
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
