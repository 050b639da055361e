"""Plays an agent and its model at token level: what is sampled, parsed, learned, and rendered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta, ReasoningDelta, RenderRequest, TextDelta
from agentserve.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningText,
    Tool,
)
from agentserve.text.aliases import Alias
from tests.agentserve.text.models import model


class MemoryBook:
    """AliasBook in a dict."""

    def __init__(self) -> None:
        self.entries: dict[bytes, list[Alias]] = {}

    def find(self, keys: Sequence[bytes]) -> dict[bytes, list[Alias]]:
        return {k: self.entries[k] for k in keys if k in self.entries}

    def add(self, entries: Any, source: bytes = b"") -> None:
        for key, alias in entries:
            self.entries.setdefault(key, []).append(alias)


def user(text: str) -> Message:
    return Message(role="user", content=(InputText(text),))


def system(text: str) -> Message:
    return Message(role="system", content=(InputText(text),))


def answer(text: str) -> Message:
    return Message(role="assistant", content=(OutputText(text),))


def thought(text: str) -> Reasoning:
    return Reasoning(content=(ReasoningText(text),))


def call(call_id: str, name: str, arguments: str) -> FunctionCall:
    return FunctionCall(call_id=call_id, name=name, arguments=arguments)


def output(call_id: str, text: str) -> FunctionCallOutput:
    return FunctionCallOutput(call_id=call_id, output=text)


def request(
    *items: Item,
    tools: tuple[Tool, ...] = (),
    instructions: str | None = None,
    retain: Literal["template", "all"] = "template",
    thinking: bool = True,
) -> RenderRequest:
    return RenderRequest(instructions=instructions, tools=tools, items=items, retain=retain, thinking=thinking)


def to_items(deltas: Sequence[Delta], first_call: int = 0) -> list[OutputItem]:
    """Deltas → output items, as events.py does."""
    items: list[OutputItem] = []
    kind = ""
    text = ""
    name = ""
    calls = first_call

    def close() -> None:
        nonlocal kind, text, calls
        if kind == "reasoning":
            items.append(thought(text))
        elif kind == "text":
            items.append(answer(text))
        elif kind == "call":
            items.append(call(f"call_{calls}", name, text))
            calls += 1
        kind, text = "", ""

    for delta in deltas:
        wanted = {ReasoningDelta: "reasoning", TextDelta: "text", CallOpen: "call", CallDelta: "call", CallClose: "call"}
        if wanted[type(delta)] != kind or isinstance(delta, CallOpen):
            close()
            kind = wanted[type(delta)]
        if isinstance(delta, CallOpen):
            name = delta.name
        elif isinstance(delta, CallClose):
            close()
        else:
            text += delta.text
    close()
    return items


class Agent:
    """One conversation. items: the context as the client holds it."""

    def __init__(self, family: str, first: RenderRequest, book: MemoryBook | None = None) -> None:
        self.text = model(family, book or MemoryBook())
        self.request = first
        self.items: list[Item] = list(first.items)
        self.calls = 0
        self.rendered = self.render()

    def render(self) -> Any:
        self.request = replace(self.request, items=tuple(self.items))
        self.rendered = self.text.render(self.request)
        return self.rendered

    def add(self, *items: Item) -> None:
        self.items += items

    def write(
        self,
        *,
        reasoning: str | None = None,
        text: str = "",
        calls: Sequence[tuple[str, dict[str, Any]]] = (),
        split: Callable[[str], list[int]] | None = None,
        end: bool = True,
    ) -> list[int]:
        """Ids that a model of this family would sample behind the rendered prompt."""
        tok = self.text.tokenizer
        split = split or (lambda t: tok.encode(t).tolist())
        markers = self.text.markers
        ids: list[int] = []
        if reasoning is not None:
            if self.rendered.opens_reasoning:
                ids += split(reasoning + "\n")
            else:
                ids += [*markers.think_open, *split("\n" + reasoning + "\n")]
            ids += [*markers.think_close, *split("\n\n")]
        elif self.rendered.opens_reasoning:
            ids += [*split("\n"), *markers.think_close, *split("\n\n")]
        if text:
            ids += split(text)
        for i, (name, arguments) in enumerate(calls):
            if text or i:
                ids += split("\n")
            ids += [
                *markers.call_open,
                *split("".join(piece.text for piece in self.text.dialect.write_call(name, arguments))),
                *markers.call_close,
            ]
        return ids + ([markers.turn_end[0]] if end else [])

    def take(self, sampled: Sequence[int]) -> list[OutputItem]:
        """Parse what was sampled, learn it, and put it into the context."""
        parser = self.text.parser(self.request, self.rendered)
        deltas = [*parser.push(sampled), *parser.finish()]
        items = to_items(deltas, self.calls)
        self.calls += sum(isinstance(i, FunctionCall) for i in items)
        self.text.learn(self.request, self.rendered, items, np.array(sampled, np.uint32))
        self.items += items
        return items
