"""Random conversations through every template: the text is the template's own, and edits cost no more than they must."""

from __future__ import annotations

import gzip
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentserve.protocol.items import FunctionCall, FunctionCallOutput, FunctionTool, Item, Message, Reasoning
from tests.agentserve.text.models import FAMILIES, model
from tests.agentserve.text.play import Agent, answer, call, output, request, thought, user
from tests.budget import examples

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces" / "airline_tool_calls.jsonl.gz"

families = pytest.mark.parametrize("family", FAMILIES)
quick = settings(
    max_examples=examples(20, 40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)

TOOLS = tuple(
    FunctionTool(
        name=n, description=f"{n} of <b>a</b> thing", parameters={"type": "object", "properties": {"a": {"type": "string"}}}
    )
    for n in ("look", "find-it", "x_9")
)


def composed(text: str) -> str:
    """Some tokenizers (Qwen's) encode the composed form of every text."""
    return unicodedata.normalize("NFC", text)


words = (
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Co", "Cn", "Cc")), min_size=1, max_size=12)
    .map(composed)
    .filter(str.strip)
)
texts = st.one_of(words, st.lists(st.sampled_from(["a", " ", "\n", "é", "{", '"', "</b>"]), max_size=8).map("".join))
arguments = st.dictionaries(st.sampled_from("abc"), st.one_of(texts, st.integers(-9, 99), st.booleans(), st.none()), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[Item]:
    """User turns, each followed by assistant turns with and without thinking, text and (parallel) calls with results."""
    items: list[Item] = []
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        items.append(user(draw(texts)))
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.booleans()):
                items.append(thought(draw(words)))
            said = draw(texts)
            made = draw(st.integers(0, 2))
            if said.strip() or not made:
                items.append(answer(said.strip() or "so"))  # whether outer lines are trimmed may depend on the place
            for i in range(made):
                items.append(
                    call(f"c{number + i}", draw(st.sampled_from([t.name for t in TOOLS])), json.dumps(draw(arguments)))
                )
            for i in range(made):
                items.append(output(f"c{number + i}", draw(texts)))
            number += made
            if not made:
                break
    return items


def as_messages(items: list[Item]) -> list[dict[str, Any]]:
    """The messages of a conversation, built without the code under test."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id})
            continue
        if isinstance(item, Message) and item.role == "user":
            messages.append({"role": "user", "content": item.text})
            continue
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        if isinstance(item, Reasoning):
            messages[-1]["reasoning_content"] = item.text
        elif isinstance(item, Message):
            messages[-1]["content"] = item.text
        elif isinstance(item, FunctionCall):
            function = {"name": item.name, "arguments": json.loads(item.arguments)}
            entry = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(entry)
    return messages


@families
@quick
@given(items=conversations(), instructions=st.one_of(st.none(), words), with_tools=st.booleans())
def test_the_text_is_the_templates_own(family: str, items: list[Item], instructions: str | None, with_tools: bool):
    import transformers.utils.chat_template_utils as reference

    text = model(family)
    system = [{"role": "system", "content": instructions}] if instructions else []
    tools: list[Any] = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in TOOLS
    ]
    expected, _ = reference.render_jinja_template(
        [[*system, *as_messages(items)]],
        tools=tools if with_tools else None,
        chat_template=text.template.source,
        add_generation_prompt=True,
    )
    rendered = text.render(request(*items, instructions=instructions, tools=TOOLS if with_tools else ()))
    assert text.tokenizer.decode(rendered.ids) == expected[0]
    assert list(rendered.item_starts) == sorted(rendered.item_starts)
    positions = [c.position for c in rendered.cuts]
    assert positions == sorted(set(positions))
    assert all(0 < p <= len(rendered.ids) for p in positions)


@families
@quick
@given(items=conversations(), more=texts)
def test_what_is_appended_changes_nothing_before_it(family: str, items: list[Item], more: str):
    """With all thinking kept, every item boundary is a stable prefix."""
    text = model(family)
    before = text.renderer.render(request(*items, retain="all"), prompt=False).ids
    result = text.renderer.render(request(*items, user(more), retain="all"), prompt=False).ids
    assert result[: len(before)].tolist() == before.tolist()


@families
@quick
@given(data=st.data())
def test_an_edit_costs_only_what_is_behind_it(family: str, data: st.DataObject):
    """A played session with unusual segmentation; then any one item is changed: what lies before it stays as it was told."""
    agent = Agent(family, request(user(data.draw(words)), tools=TOOLS, instructions="Be brief.", retain="all"))
    tok = agent.text.tokenizer
    told = agent.rendered.ids
    for _ in range(data.draw(st.integers(1, 3))):
        made = data.draw(st.integers(0, 2))
        agent.render()
        sampled = agent.write(
            reasoning=data.draw(st.one_of(st.none(), words)),
            text=data.draw(words),
            calls=[("look", {"a": data.draw(words)}) for _ in range(made)],
            split=lambda t: [i for c in t for i in tok.encode(c).tolist()],
        )
        first = agent.calls
        told = np.concatenate([agent.rendered.ids, np.array(sampled, np.uint32)])
        agent.take(sampled)
        agent.add(*(output(f"call_{first + i}", data.draw(words)) for i in range(made)))
        if not made:
            agent.add(user(data.draw(words)))
    whole = agent.render()
    assert whole.ids[: len(told)].tolist() == told.tolist()
    changed = [i for i, x in enumerate(agent.items) if isinstance(x, FunctionCallOutput) or getattr(x, "role", "") == "user"]
    index = data.draw(st.sampled_from(changed))
    old = agent.items[index]
    agent.items[index] = output(old.call_id, "[cleared]") if isinstance(old, FunctionCallOutput) else user("[cleared]")
    ids = agent.render().ids
    start = whole.item_starts[index]
    assert ids[:start].tolist() == whole.ids[:start].tolist()
    # Behind the edit every other item is as sampled too: the two contexts end alike, down to that item's own end.
    rest = whole.ids[whole.item_starts[index + 1] :] if index + 1 < len(agent.items) else whole.ids[len(whole.ids) : :]
    assert len(rest) == 0 or ids[-len(rest) :].tolist() == rest.tolist()


@pytest.mark.skipif(not TRACES.is_file(), reason="needs the recorded traces")
@families
def test_recorded_tool_dialogues_render_as_the_template_does(family: str):
    import transformers.utils.chat_template_utils as reference

    text = model(family)
    with gzip.open(TRACES, "rt") as file:
        dialogues = [json.loads(line)["messages"] for line in file][:40]
    for messages in dialogues:
        items: list[Item] = []
        system = None
        for number, message in enumerate(messages):
            content = message.get("content") or ""
            match message["role"]:
                case "system":
                    system = content
                case "user":
                    items.append(user(content))
                case "assistant":
                    if content:
                        items.append(answer(content))
                    for entry in message.get("tool_calls") or ():
                        items.append(call(entry["id"], entry["function"]["name"], entry["function"]["arguments"]))
                case "tool":
                    items.append(output(message.get("tool_call_id") or f"c{number}", content))
        chat = [{"role": "system", "content": system}] if system else []
        expected, _ = reference.render_jinja_template(
            [[*chat, *as_messages(items)]], chat_template=text.template.source, add_generation_prompt=True
        )
        rendered = text.render(request(*items, instructions=system))
        assert text.tokenizer.decode(rendered.ids) == expected[0]
        assert len(rendered.cuts) >= len(items) / 2
