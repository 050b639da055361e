"""How agents edit their context, played through real templates: what stays equal reaches exactly as far as the edit allows.

The model samples an unusual segmentation (character by character), so that any re-tokenised stretch would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from agentserve.protocol.items import FunctionCall, FunctionCallOutput, FunctionTool, Item, Message, Reasoning
from statecache.boundary import GeneratedBoundaries
from statecache.types import BoundaryKind
from tests.agentserve.text.models import FAMILIES
from tests.agentserve.text.play import Agent, MemoryBook, output, request, system, user

families = pytest.mark.parametrize("family", FAMILIES)
DROPPING = ("qwen3", "qwen35", "demo")
dropping = pytest.mark.parametrize("family", DROPPING)

PROPERTIES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = FunctionTool(name="get_weather", description="Weather of a city", parameters=PROPERTIES)
CLOCK = FunctionTool(name="get_time", description="Time in a city", parameters=PROPERTIES)


class Played(Agent):
    """An agent that remembers its last turn: `told` is prompt and answer, `kept` the positions where state was saved."""

    def turn(
        self, *, text: str = "", calls: Sequence[tuple[str, dict[str, object]]] = (), thought: str | None = "Hm, so."
    ) -> None:
        rendered = self.render()
        tok = self.text.tokenizer
        sampled = self.write(
            reasoning=thought, text=text, calls=calls, split=lambda t: [i for c in t for i in tok.encode(c).tolist()]
        )
        self.told = np.concatenate([rendered.ids, np.array(sampled, np.uint32)])
        found = GeneratedBoundaries(self.text.markers, len(rendered.ids), thinking=rendered.opens_reasoning).push_all(sampled)
        self.kept = {c.position: c.kind for c in rendered.cuts} | {b.position: b.kind for b in found}
        self.sampled = sampled
        self.take(sampled)

    def after(self) -> tuple[int, BoundaryKind | None]:
        """Tokens that the next context shares with what was told, and the deepest boundary there."""
        ids = self.render().ids
        n = min(len(ids), len(self.told))
        unequal = np.flatnonzero(ids[:n] != self.told[:n])
        shared = int(unequal[0]) if len(unequal) else n
        below = [p for p in self.kept if p <= shared]
        return shared, self.kept[max(below)] if below else None

    def shown(self, end: int | None = None, start: int = 0) -> str:
        return self.text.tokenizer.decode(self.told[start:end])


def weather_session(family: str, **options: object) -> Played:
    """One user turn: a call, its result, an answer."""
    agent = Played(family, request(user("Weather in Paris?"), tools=(WEATHER, CLOCK), instructions="Be brief."))
    agent.request = replace(agent.request, **options)  # type: ignore[arg-type]
    agent.turn(calls=[("get_weather", {"city": "Paris", "days": 3})])
    agent.add(output("call_0", "sunny, 21 degrees"))
    agent.turn(text="It is sunny.")
    return agent


@families
def test_a_tool_result_only_appends(family: str):
    agent = Played(family, request(user("Weather in Paris?"), tools=(WEATHER,), instructions="Be brief."))
    agent.turn(text="Let me see.", calls=[("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})])
    agent.add(output("call_0", "sunny"), output("call_1", "rain"))
    shared, kind = agent.after()
    assert shared == len(agent.told)
    assert kind is BoundaryKind.TURN


@dropping
def test_a_new_user_turn_drops_thinking_back_to_the_header(family: str):
    agent = weather_session(family)
    agent.add(user("And tomorrow?"))
    shared, kind = agent.after()
    assert kind is BoundaryKind.THINK_OPEN
    assert agent.shown(shared).endswith("Weather in Paris?<|im_end|>\n<|im_start|>assistant\n")
    assert agent.text.tokenizer.decode(agent.rendered.ids).count("Hm, so.") == 0


@dropping
def test_what_follows_dropped_thinking_is_still_as_sampled(family: str):
    agent = weather_session(family)
    said = [i for c in "It is sunny." for i in agent.text.tokenizer.encode(c).tolist()]
    agent.add(user("And tomorrow?"))
    ids = agent.render().ids.tolist()
    assert any(ids[i : i + len(said)] == said for i in range(len(ids)))
    assert agent.rendered.spliced > len(said)


@families
def test_retain_all_only_appends_whatever_the_template_drops(family: str):
    agent = weather_session(family, retain="all")
    agent.add(user("And tomorrow?"))
    shared, _ = agent.after()
    assert shared == len(agent.told)
    agent.turn(text="Rain.")
    agent.add(user("Thanks."))
    assert agent.after()[0] == len(agent.told)
    assert agent.text.tokenizer.decode(agent.rendered.ids).count("Hm, so.") == 3


@families
def test_retain_all_without_thinking_only_appends(family: str):
    """Thinking switched off: the template opens and closes an empty block in the prompt, and drops it from history."""
    agent = weather_session(family, retain="all", thinking=False)
    agent.items = [i for i in agent.items if not isinstance(i, Reasoning)]
    plain = Played(family, request(user("Hello"), retain="all", thinking=False))
    plain.turn(text="Hi.", thought=None)
    plain.add(user("How are you?"))
    assert plain.after()[0] == len(plain.told)


def test_a_template_that_keeps_thinking_only_appends():
    agent = weather_session("keeping")
    agent.add(user("And tomorrow?"))
    assert agent.after()[0] == len(agent.told)


def test_generation_prompt_opens_thinking_that_history_does_not_have():
    agent = Played("qwen35", request(user("Hello")))
    agent.turn(text="Hi.")
    agent.items = [i for i in agent.items if not isinstance(i, Reasoning)]  # the client does not send it back
    agent.add(user("How are you?"))
    shared, kind = agent.after()
    assert kind is BoundaryKind.THINK_OPEN
    assert agent.shown(shared).endswith("<|im_start|>assistant\n")


@families
def test_a_cleared_tool_output_costs_only_what_is_behind_it(family: str):
    agent = weather_session(family, retain="all")
    index = next(i for i, x in enumerate(agent.items) if isinstance(x, FunctionCallOutput))
    agent.items[index] = output("call_0", "[cleared]")
    agent.add(user("And tomorrow?"))
    shared, kind = agent.after()
    assert agent.shown(shared).endswith("<tool_response>\n")
    assert kind is BoundaryKind.TURN
    assert agent.rendered.item_of(shared) == index
    told = [i for c in "It is sunny." for i in agent.text.tokenizer.encode(c).tolist()]
    ids = agent.rendered.ids.tolist()
    assert any(ids[i : i + len(told)] == told for i in range(len(ids)))


@families
def test_a_reminder_that_moves_costs_from_where_it_was(family: str):
    reminder = "<system-reminder>Tests first.</system-reminder>"
    agent = Played(family, request(user("Weather?\n" + reminder), tools=(WEATHER,), instructions="Be brief.", retain="all"))
    agent.turn(text="Where?")
    agent.items[0] = user("Weather?")
    agent.add(user("Paris.\n" + reminder))
    shared, kind = agent.after()
    assert agent.shown(shared).endswith("Weather?")
    assert kind is BoundaryKind.SYSTEM
    assert agent.rendered.item_of(shared) == 0


@families
@pytest.mark.parametrize(
    "change",
    [
        lambda: ("x-cc-nonce: 81723; Be brief.", "x-cc-nonce: 11111; Be brief."),
        lambda: ("Be brief. Turn 1.", "Be brief. Turn 2."),
        lambda: ("Now 2026-01-01 10:00:01. Be brief.", "Now 2026-01-01 10:00:07. Be brief."),
    ],
    ids=["nonce", "counter", "timestamp"],
)
def test_a_changing_system_text_is_found_in_the_instructions(family: str, change: Callable[[], tuple[str, str]]):
    before, after = change()
    agent = Played(family, request(user("Hello"), tools=(WEATHER,), instructions=before, retain="all"))
    agent.turn(text="Hi.")
    agent.request = replace(agent.request, instructions=after)
    agent.add(user("More."))
    shared, kind = agent.after()
    same = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    assert agent.shown(shared).endswith(before[:same][-8:])
    assert kind is None
    assert agent.rendered.item_of(shared) == -1


@families
def test_reordered_tools_are_found_in_the_instructions(family: str):
    agent = Played(family, request(user("Hello"), tools=(WEATHER, CLOCK), instructions="Be brief.", retain="all"))
    agent.turn(text="Hi.")
    agent.request = replace(agent.request, tools=(CLOCK, WEATHER))
    agent.add(user("More."))
    shared, kind = agent.after()
    assert agent.shown(shared).endswith(('"name": "get_', '"name": "get'))
    assert kind is None
    assert agent.rendered.item_of(shared) == -1


@families
def test_compaction_keeps_the_system_block(family: str):
    agent = weather_session(family)
    agent.items = [user("Summary: it was sunny.")]
    shared, kind = agent.after()
    assert kind is BoundaryKind.SYSTEM
    assert agent.shown(shared).endswith("<|im_end|>\n<|im_start|>user\n")


@families
def test_a_sub_agent_in_between_changes_nothing(family: str):
    book = MemoryBook()
    main = Played(family, request(user("Weather in Paris?"), tools=(WEATHER,), instructions="Be brief."), book)
    main.turn(calls=[("get_weather", {"city": "Paris"})])
    other = Played(family, request(user("Find it."), tools=(CLOCK,), instructions="You search."), book)
    other.calls = 100
    other.turn(calls=[("get_time", {"city": "Paris"})])
    main.add(output("call_0", "sunny"))
    other.add(output("call_100", "noon"))
    assert main.after()[0] == len(main.told)
    assert other.after()[0] == len(other.told)


@families
def test_two_answers_that_say_the_same_keep_their_own_tokens(family: str):
    agent = Played(family, request(user("Say OK."), retain="all"))
    tok = agent.text.tokenizer
    told = []
    for split in (lambda t: tok.encode(t).tolist(), lambda t: [i for c in t for i in tok.encode(c).tolist()]):
        rendered = agent.render()
        sampled = agent.write(reasoning="Fine.", text="Okay then, fine.", split=split)
        agent.take(sampled)
        told = [*rendered.ids.tolist(), *sampled]
        agent.add(user("Again."))
    assert agent.render().ids.tolist()[: len(told)] == told


@families
def test_a_client_may_trim_and_drop_ids(family: str):
    """Clients send items back without ids, status and outer white space."""
    agent = Played(family, request(user("Hello"), tools=(WEATHER,), retain="all"))
    agent.turn(text="Let me see.\n\n", calls=[("get_weather", {"city": "Paris"})])
    agent.items = [_bare(i) for i in agent.items]
    agent.add(output("call_0", "sun"))
    assert agent.after()[0] == len(agent.told)


def _bare(item: Item) -> Item:
    if isinstance(item, Message):
        return replace_struct(item, content=tuple(replace_struct(p, text=p.text.strip()) for p in item.content))
    return replace_struct(item, id=None, status=None) if isinstance(item, FunctionCall | Reasoning) else item


def replace_struct(value: Any, **changes: Any) -> Any:

    return msgspec.structs.replace(value, **changes)


@families
def test_a_late_system_message_stays_where_it_was_said(family: str):
    agent = Played(family, request(user("Hello"), instructions="Be brief.", retain="all"))
    agent.turn(text="Hi.")
    agent.add(system("The user is in Rome."), user("Where am I?"))
    shared, _ = agent.after()
    assert shared == len(agent.told)
    assert "The user is in Rome." in agent.text.tokenizer.decode(agent.rendered.ids[shared:])


@families
@pytest.mark.parametrize("cut", range(3, 60, 4))
def test_a_truncated_answer_keeps_what_was_sampled_of_each_block(family: str, cut: int):
    agent = Played(family, request(user("Hello"), tools=(WEATHER,), retain="all"))
    tok = agent.text.tokenizer
    sampled = agent.write(
        reasoning="Think twice.", text="Let me see.", split=lambda t: [i for c in t for i in tok.encode(c).tolist()], end=False
    )[:cut]
    prompt = agent.rendered.ids
    agent.take(sampled)
    agent.add(user("Go on."))
    told = np.concatenate([prompt, np.array(sampled, np.uint32)])
    ids = agent.render().ids
    n = min(len(ids), len(told))
    unequal = np.flatnonzero(ids[:n] != told[:n])
    shared = int(unequal[0]) if len(unequal) else n
    # What cannot be equal: a marker that was just opened with nothing behind it, and white space at the cut.
    assert agent.text.tokenizer.decode(told[shared:]).strip() in ("", "<think>", "</think>", "�")
