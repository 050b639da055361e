"""Each edit of an agent is named, with the item where it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentserve.interfaces import DivergenceReport, RenderRequest
from agentserve.protocol.items import FunctionCallOutput, FunctionTool, Reasoning
from agentserve.session.divergence import Contexts
from tests.agentserve.text.models import FAMILIES
from tests.agentserve.text.play import Agent, answer, call, output, request, system, thought, user

families = pytest.mark.parametrize("family", FAMILIES)
PROPERTIES = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = FunctionTool(name="get_weather", description="Weather of a city", parameters=PROPERTIES)
CLOCK = FunctionTool(name="get_time", description="Time in a city", parameters=PROPERTIES)


class Watched(Agent):
    """An agent whose turns are remembered and whose next context is explained."""

    contexts: Contexts

    def turn(self, **written: Any) -> None:
        self.render()
        sampled = self.write(**written)
        self.contexts.remember(self.request, self.rendered, sampled)
        self.told = np.concatenate([self.rendered.ids, np.array(sampled, np.uint32)])
        self.take(sampled)

    def why(self, cause: str = "tokens") -> DivergenceReport:
        rendered = self.render()
        n = min(len(rendered.ids), len(self.told))
        unequal = np.flatnonzero(rendered.ids[:n] != self.told[:n])
        place = int(unequal[0]) if len(unequal) else n
        return self.contexts.explain(self.request, rendered, place, cause, self.text.token_text)


def watched(family: str, first: RenderRequest) -> Watched:
    agent = Watched(family, first)
    agent.contexts = Contexts()
    return agent


def session(family: str, **options: Any) -> Watched:
    first = replace(request(user("Weather in Paris?"), tools=(WEATHER, CLOCK), instructions="Be brief."), **options)
    agent = watched(family, first)
    agent.turn(reasoning="Hm, so.", calls=[("get_weather", {"city": "Paris"})])
    agent.add(output("call_0", "sunny, 21 degrees"))
    agent.turn(reasoning="Now I know.", text="It is sunny.")
    return agent


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "keeping"])
def test_dropped_thinking(family: str):
    agent = session(family)
    agent.add(user("And tomorrow?"))
    report = agent.why()
    assert report.cause == "thinking_dropped"
    assert report.item == next(i for i, x in enumerate(agent.items) if isinstance(x, Reasoning))
    assert report.before is not None
    assert report.before.startswith("<think>")


@families
def test_cleared_tool_output(family: str):
    agent = session(family, retain="all")
    index = next(i for i, x in enumerate(agent.items) if isinstance(x, FunctionCallOutput))
    agent.items[index] = output("call_0", "[cleared]")
    report = agent.why()
    assert (report.cause, report.item) == ("tool_output_changed", index)
    assert report.before is not None
    assert report.after is not None
    assert report.before.startswith("sunny")
    assert report.after.startswith("[cleared]")


@families
def test_moved_reminder(family: str):
    reminder = "\n<system-reminder>Tests first.</system-reminder>"
    agent = watched(family, request(user("Hello" + reminder), retain="all"))
    agent.turn(reasoning="r", text="Hi.")
    agent.items[0] = user("Hello")
    agent.add(user("More" + reminder))
    report = agent.why()
    assert (report.cause, report.item) == ("reminder_moved", 0)


@families
def test_changed_head(family: str):
    agent = session(family, retain="all")
    agent.request = replace(agent.request, instructions="Be long.")
    assert (agent.why().cause, agent.why().item) == ("system_changed", -1)
    agent.request = replace(agent.request, instructions="Be brief.", tools=(CLOCK, WEATHER))
    assert (agent.why().cause, agent.why().item) == ("tools_reordered", -1)
    agent.request = replace(agent.request, tools=(WEATHER,))
    assert agent.why().cause == "tools_changed"


@families
def test_changed_developer_message(family: str):
    agent = watched(family, request(system("Be brief."), user("Hello"), retain="all"))
    agent.turn(reasoning="r", text="Hi.")
    agent.items[0] = system("Be long.")
    assert (agent.why().cause, agent.why().item) == ("system_changed", 0)


@families
def test_a_further_developer_message_behind_a_prewarmed_one(family: str):
    agent = watched(family, request(system("You write code."), tools=(WEATHER, CLOCK)))
    agent.render()
    agent.contexts.remember(agent.request, agent.rendered, [])
    agent.told = np.asarray(agent.rendered.ids)
    agent.add(system("The disk is read-only."))
    agent.add(user("Weather in Paris?"))
    assert agent.why().cause in ("system_changed", "appended")


@families
def test_compaction(family: str):
    agent = session(family, retain="all")
    agent.items = [user("Summary: it was sunny.")]
    assert (agent.why().cause, agent.why().item) == ("history_replaced", 0)
    agent.items = [answer("Earlier I looked."), user("Go on.")]
    assert agent.why().cause == "history_replaced"


@families
def test_an_edited_message_is_not_a_replaced_history(family: str):
    agent = session(family, retain="all")
    agent.items[0] = user("Weather in Rome?")
    assert (agent.why().cause, agent.why().item) == ("message_changed", 0)


@families
def test_a_window_that_slides_replaces_history(family: str):
    agent = session(family, retain="all")
    agent.add(user("And tomorrow?"))
    agent.turn(reasoning="r", text="Rain.")
    agent.items = agent.items[next(i for i, x in enumerate(agent.items) if x == user("And tomorrow?")) :]
    agent.add(user("Thanks."))
    assert (agent.why().cause, agent.why().item) == ("history_replaced", 0)


@families
def test_another_conversation_with_other_instructions_is_a_new_context(family: str):
    agent = session(family, retain="all")
    agent.request = replace(agent.request, instructions="Be long.")
    agent.items = [user("What time is it?")]
    assert (agent.why().cause, agent.why().item) == ("new_context", -1)
    # Another one in between, which begins like this one: what changed is told by comparing with the own conversation.
    own = session(family, retain="all")
    other = watched(family, replace(request(user("What time is it?"), tools=(CLOCK,), instructions="Be kind."), retain="all"))
    other.contexts = own.contexts
    other.turn(reasoning="r", text="Noon.")
    own.request = replace(own.request, instructions="Be kinder.")
    assert (own.why().cause, own.why().item) == ("system_changed", -1)


@families
def test_emptied_thinking_is_dropped_thinking(family: str):
    agent = watched(family, request(user("Weather in Paris?"), tools=(WEATHER,)))
    agent.turn(reasoning="Hm, so.", calls=[("get_weather", {"city": "Paris"})])
    agent.items = [i for i in agent.items if not isinstance(i, Reasoning)]
    agent.add(output("call_0", "sunny"))
    assert agent.why().cause == "thinking_dropped"


@families
def test_foreign_tokens_of_the_same_text(family: str):
    """Without aliases an answer that was sampled in another segmentation comes back as other tokens."""
    agent = watched(family, request(user("Hello"), retain="all"))
    tok = agent.text.tokenizer
    agent.turn(reasoning="r", text="It is sunny.", split=lambda t: [i for c in t for i in tok.encode(c).tolist()])
    agent.text.renderer._book.entries.clear()  # type: ignore[attr-defined]
    agent.add(user("More."))
    report = agent.why()
    assert report.cause == "retokenized"


@families
def test_a_changed_call(family: str):
    agent = session(family, retain="all")
    index = next(i for i, x in enumerate(agent.items) if getattr(x, "name", "") == "get_weather")
    agent.items[index] = call("call_0", "get_weather", '{"city": "Rome"}')
    agent.turn(reasoning="r", text="So.")
    agent.items[index] = call("call_0", "get_weather", '{"city": "Oslo"}')
    assert (agent.why().cause, agent.why().item) == ("call_changed", index)


@families
def test_what_the_worker_knows_better_is_passed_on(family: str):
    agent = session(family, retain="all")
    for cause in ("evicted", "salt", "cold", "none"):
        assert agent.why(cause).cause == cause
    agent.add(user("More."))
    assert agent.why().cause == "appended"


def test_other_principals_contexts_are_not_looked_at():
    agent = session("qwen3", retain="all")
    agent.request = replace(agent.request, salt=b"other", instructions="Be long.")
    report = agent.why()
    assert (report.cause, report.before) == ("tokens", None)


def test_memory_is_bounded():
    contexts = Contexts(contexts=3, kept_bytes=1000)
    agent = session("qwen3")
    for _ in range(5):
        contexts.remember(agent.request, agent.rendered, np.zeros(200, np.uint32))
    assert len(contexts._told) == 1
    assert contexts.size_bytes == next(iter(contexts._told.values())).nbytes > 2 * 4 * 200, "texts count as well as ids"


@pytest.mark.parametrize("family", ["qwen3", "qwen35", "demo"])
def test_thinking_that_comes_back(family: str):
    """`retain` was switched on in mid-session."""
    agent = session(family)
    agent.add(user("And tomorrow?"))
    agent.contexts = Contexts()  # the contexts that had the thinking are gone
    agent.turn(reasoning="r", text="Rain.")
    agent.request = replace(agent.request, retain="all")
    assert agent.why().cause == "thinking_added"


def test_changed_thinking_is_not_called_dropped():
    agent = watched("keeping", request(user("Hello")))
    agent.turn(reasoning="First.", text="Hi.")
    agent.items[1] = thought("Second.")
    assert agent.why().cause == "thinking_changed"
