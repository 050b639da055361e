"""Recorded text → prompts of a served model, through the real template, tokenizer, aliases and boundary code."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentserve.interfaces import RenderRequest
from agentserve.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputText,
    Item,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
)
from agentserve.session.aliases import Aliases
from agentserve.text.model_text import ModelText
from agentserve.worker.messages import Cut
from benchmarks.traces.data import AIRLINE, DATA, interleave, records
from statecache.types import Boundary, MarkerTable

DEMO_MODEL = Path(__file__).resolve().parents[2] / "agentserve" / "demo_model"
IDLE_S = 9.7
"""Between requests of a recording without times: the median of 48,658 recorded coding-agent requests."""
_ROLE = re.compile(r"(?:^|\n\n)(user|assistant|system): ")
_OBSERVATION = re.compile(r"\n\n(?=<returncode>|Please always provide EXACTLY)")


@dataclass(frozen=True)
class Exchange:
    """One request and its recorded answer. t: seconds since its session began."""

    t: float
    items: tuple[Item, ...]
    output: tuple[OutputItem, ...]
    instructions: str | None = None
    tools: tuple[FunctionTool, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """ids: uint32 [n]. generated: ids that the recorded answer is sampled as, the end of the turn included."""

    t: float
    ids: np.ndarray
    cuts: tuple[Cut, ...]
    markers: MarkerTable
    generated: tuple[int, ...]
    boundaries: tuple[Boundary, ...] = field(default=())


def exchanges(name: str, directory: Path = DATA, limit: int | None = None) -> list[list[Exchange]]:
    """Sessions of a text recording, at most `limit` of them, each request with its answer."""
    if name == AIRLINE:
        lines = records(name, directory)
        tools = _tools(lines)
        return [_dialogue(line["messages"], tools) for line in lines[:limit]]
    sessions: dict[str, list[dict[str, Any]]] = {}
    for line in records(name, directory):
        if line["input"].strip():
            sessions.setdefault(line["session"], []).append(line)
    found: list[list[Exchange]] = []
    for lines in list(sessions.values())[:limit]:
        lines.sort(key=lambda line: line["timestamp"])
        begin = lines[0]["timestamp"]
        found.append(
            [Exchange((line["timestamp"] - begin) / 1e6, split(line["input"]), (_said(line["output"]),)) for line in lines]
        )
    return found


def split(text: str) -> tuple[Item, ...]:
    """A whole prompt in text form → messages, cut at its role lines; without any, at the results of commands."""
    marks = list(_ROLE.finditer(text))
    if not marks:
        return tuple(_user(part) for part in _OBSERVATION.split(text))
    head = text[: marks[0].start()]
    items: list[Item] = [_user(head)] if head.strip() else []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        body = text[mark.end() : following.start() if following else len(text)]
        if mark[1] == "assistant":
            items.append(_said(body))
        else:
            items.append(Message(role="user" if mark[1] == "user" else "system", content=(InputText(body),)))
    return tuple(items)


def compose(sessions: Sequence[Sequence[Exchange]], model: Path = DEMO_MODEL, lanes: int = 1) -> list[list[Prompt]]:
    """Render every request and write its answer as the model would, in the order of time; answers teach aliases as served."""
    text = ModelText.load(model, book=Aliases())
    prompts: list[list[Prompt]] = [[] for _ in sessions]
    for _, number, exchange in interleave(sessions, lanes):
        request = RenderRequest(exchange.instructions, exchange.tools, exchange.items, thinking=False, salt=b"trace")
        rendered = text.render(request)
        generated = write(text, exchange.output)
        text.learn(request, rendered, exchange.output, np.array(generated, np.uint32))
        boundaries = tuple(Boundary(cut.position, cut.kind, cut.item) for cut in rendered.cuts)
        prompts[number].append(Prompt(exchange.t, rendered.ids, rendered.cuts, rendered.markers, tuple(generated), boundaries))
    return prompts


def write(text: ModelText, output: Sequence[OutputItem]) -> list[int]:
    """Ids that the model would sample for these items; without Reasoning, behind a prompt that switched thinking off."""
    tokenizer, markers = text.tokenizer, text.markers
    ids: list[int] = []
    said = False
    for item in output:
        if isinstance(item, Reasoning):
            ids += [*markers.think_open, *tokenizer.encode(f"\n{item.text}\n").tolist()]
            ids += [*markers.think_close, *tokenizer.encode("\n\n").tolist()]
            continue
        if isinstance(item, Message):
            ids += tokenizer.encode(item.text).tolist()
        elif isinstance(item, FunctionCall):
            ids += tokenizer.encode("\n").tolist() if said else []
            call = "".join(piece.text for piece in text.dialect.write_call(item.name, json.loads(item.arguments)))
            ids += [*markers.call_open, *tokenizer.encode(call).tolist(), *markers.call_close]
        said = True
    return [*ids, markers.turn_end[0]]


def _dialogue(messages: Sequence[dict[str, Any]], tools: tuple[FunctionTool, ...]) -> list[Exchange]:
    found: list[Exchange] = []
    items: list[Item] = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    for message in messages[1 if system else 0 :]:
        if message["role"] == "assistant":
            output: list[OutputItem] = [_said(message["content"])] if message["content"] else []
            for call in message.get("tool_calls") or ():
                function = call["function"]
                output.append(FunctionCall(call_id=call["id"], name=function["name"], arguments=function["arguments"]))
            found.append(Exchange(len(found) * IDLE_S, tuple(items), tuple(output), system, tools))
            items += output
        elif message["role"] == "tool":
            items.append(FunctionCallOutput(call_id=message["tool_call_id"], output=message["content"]))
        else:
            items.append(_user(message["content"]))
    return found


def _tools(lines: Sequence[dict[str, Any]]) -> tuple[FunctionTool, ...]:
    """The recording has no tool declarations; these have the names and arguments that its calls use."""
    seen: dict[str, set[str]] = {}
    for line in lines:
        for message in line["messages"]:
            for call in message.get("tool_calls") or ():
                seen.setdefault(call["function"]["name"], set()).update(json.loads(call["function"]["arguments"]))
    return tuple(
        FunctionTool(name=name, parameters={"type": "object", "properties": {key: {} for key in sorted(seen[name])}})
        for name in sorted(seen)
    )


def _user(text: str) -> Message:
    return Message(role="user", content=(InputText(text),))


def _said(text: str) -> Message:
    return Message(role="assistant", content=(OutputText(text),))
