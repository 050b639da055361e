"""Contexts through real-style templates: layout, markers as text, exact ids put back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentserve.protocol.items import (
    FunctionCall,
    FunctionTool,
    Item,
)
from agentserve.text.tokenizer import Tokenizer
from statecache.types import BoundaryKind
from tests.agentserve.text.models import FAMILIES, model
from tests.agentserve.text.play import Agent, answer, call, output, request, thought, user
from tests.budget import examples

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = FunctionTool(name="get_weather", description="Weather of a city", parameters=CITY)
CALL = call("c1", "get_weather", '{"city":"Paris"}')

families = pytest.mark.parametrize("family", FAMILIES)
slow_ok = settings(
    max_examples=examples(15, 30),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@families
def test_text_is_what_the_template_would_write(family: str):
    """Without markers in contents, the decoded ids are the template's own output."""
    text = model(family)
    items = (
        user("Hello"),
        thought("Hm."),
        answer("Let me look."),
        CALL,
        output("c1", "sun"),
    )
    rendered = text.render(request(*items, tools=(WEATHER,), instructions="Be brief."))
    import transformers.utils.chat_template_utils as reference

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ]
    tools: list[Any] = [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": WEATHER.description, "parameters": WEATHER.parameters},
        }
    ]
    expected, _ = reference.render_jinja_template(
        conversations=[messages], tools=tools, chat_template=text.template.source, add_generation_prompt=True
    )
    assert text.tokenizer.decode(rendered.ids) == expected[0]


@families
@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "<think>"])
def test_markers_in_contents_stay_text(family: str, marker: str):
    text = model(family)
    forged = f"a{marker}b"

    def ids_with(word: str) -> list[int]:
        said = (user(word), answer(word), call("c1", "get_weather", json.dumps({"city": word})), output("c1", word), user("x"))
        tool = FunctionTool(name="t", description=word, parameters={"type": "object", "properties": {word: {"type": "string"}}})
        return text.render(request(*said, tools=(tool,), instructions=word)).ids.tolist()

    ids, reference = ids_with(forged), ids_with("ab")
    for known in text.tokenizer.marker_by_id:
        assert ids.count(known) == reference.count(known)
    assert text.tokenizer.decode(ids).count(forged) >= 6


@families
def test_cuts_lie_where_blocks_end(family: str):
    text = model(family)
    items = (
        user("Hello"),
        thought("Hm."),
        answer("Let me look."),
        CALL,
        output("c1", "sun"),
    )
    rendered = text.render(request(*items, tools=(WEATHER,), instructions="Be brief."))
    before = {c.kind: text.tokenizer.decode(rendered.ids[: c.position]) for c in rendered.cuts if c.item != -1}
    after = {c.kind: text.tokenizer.decode(rendered.ids[c.position :]) for c in rendered.cuts if c.item != -1}
    assert before[BoundaryKind.USER].endswith("Hello<|im_end|>")
    assert after[BoundaryKind.THINK_OPEN].startswith("<think>\nHm.")
    assert before[BoundaryKind.THINK_CLOSE].endswith("Hm.\n</think>")
    assert after[BoundaryKind.CALL_OPEN].startswith("<tool_call>")
    assert after[BoundaryKind.TURN].startswith("<|im_end|>")
    assert before[BoundaryKind.TOOL_RESULT].endswith("sun\n</tool_response><|im_end|>")
    system = next(c for c in rendered.cuts if c.kind is BoundaryKind.SYSTEM)
    assert text.tokenizer.decode(rendered.ids[: system.position]).endswith("<|im_end|>")
    assert text.tokenizer.decode(rendered.ids[system.position :]).lstrip().startswith("<|im_start|>user")
    positions = [c.position for c in rendered.cuts]
    assert positions == sorted(set(positions))
    assert positions[-1] <= len(rendered.ids)


@families
def test_every_token_finds_its_item(family: str):
    text = model(family)
    items: tuple[Item, ...] = (user("Hello"), answer("Fine."), user("And now?"))
    rendered = text.render(request(*items, instructions="Be brief."))
    where = {}
    for position in range(len(rendered.ids)):
        where.setdefault(rendered.item_of(position), []).append(int(rendered.ids[position]))
    spoken = {k: text.tokenizer.decode(v) for k, v in where.items()}
    assert "Be brief." in spoken[-1]
    assert "Hello" in spoken[0]
    assert "Fine." in spoken[1]
    assert "And now?" in spoken[2]
    assert spoken[3].strip().startswith("<|im_start|>assistant")
    assert list(rendered.item_starts) == sorted(rendered.item_starts)


@st.composite
def segmentations(draw: st.DrawFn, text: str, tok: Tokenizer) -> list[int]:
    """Ids that decode to `text`, cut at random places: what a model may sample instead of the tokenizer's choice."""
    ids: list[int] = []
    rest = text
    while rest:
        size = draw(st.integers(1, min(6, len(rest))))
        ids += tok.encode(rest[:size]).tolist()
        rest = rest[size:]
    return ids


words = (
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Co", "Cn")), min_size=1, max_size=30)
    .map(str.strip)
    .filter(bool)
)


@families
@slow_ok
@given(data=st.data(), reasoning=words, said=words, city=words)
def test_any_segmentation_of_an_answer_stays_as_sampled(family: str, data: st.DataObject, reasoning: str, said: str, city: str):
    agent = Agent(family, request(user("Hello"), tools=(WEATHER,), instructions="Be brief."))
    sampled = agent.write(
        reasoning=reasoning,
        text=said,
        calls=[("get_weather", {"city": city})],
        split=lambda t: data.draw(segmentations(t, agent.text.tokenizer)),
    )
    prompt = agent.rendered.ids
    agent.take(sampled)
    agent.add(output("call_0", "sun"))
    following = agent.render().ids
    expected = np.concatenate([prompt, np.array(sampled, np.uint32)])
    assert np.array_equal(following[: len(expected)], expected)


@families
@slow_ok
@given(data=st.data(), said=words)
def test_a_client_may_rewrite_the_json_of_a_call(family: str, data: st.DataObject, said: str):
    agent = Agent(family, request(user("Hello"), tools=(WEATHER,), instructions="Be brief."))
    sampled = agent.write(
        reasoning="r",
        calls=[("get_weather", {"city": said, "days": 3})],
        split=lambda t: data.draw(segmentations(t, agent.text.tokenizer)),
    )
    prompt = agent.rendered.ids
    agent.take(sampled)
    index = next(i for i, x in enumerate(agent.items) if isinstance(x, FunctionCall))
    item = agent.items[index]
    assert isinstance(item, FunctionCall)
    arguments = json.loads(item.arguments)
    rewritten = json.dumps(dict(reversed(arguments.items())), indent=2, ensure_ascii=True)
    agent.items[index] = call("call_0", "get_weather", rewritten)
    agent.add(output("call_0", "sun"))
    following = agent.render().ids
    expected = np.concatenate([prompt, np.array(sampled, np.uint32)])
    assert np.array_equal(following[: len(expected)], expected)


def test_a_changed_call_is_not_spliced():
    agent = Agent("qwen3", request(user("Hello"), tools=(WEATHER,)))
    agent.take(agent.write(reasoning="r", calls=[("get_weather", {"city": "Paris"})]))
    index = next(i for i, x in enumerate(agent.items) if isinstance(x, FunctionCall))
    agent.items[index] = call("call_0", "get_weather", '{"city": "Rome"}')
    agent.add(output("call_0", "sun"))
    assert "Rome" in agent.text.tokenizer.decode(agent.render().ids)
