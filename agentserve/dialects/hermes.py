"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter, literal
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Dialect, Piece, Spell, is_custom
from agentserve.dialects.jsonscan import ObjectScan
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta
from agentserve.protocol.items import CUSTOM_INPUT, Tool

_ARGUMENTS = ("arguments", "parameters")


class Hermes(Dialect):
    name = "hermes"

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        call = {"name": name, "arguments": arguments}
        return [Piece("\n" + json.dumps(call, ensure_ascii=False) + "\n")]

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        return JsonCall(tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        head = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        return f"{literal(head)} {writer.json(schema)} {literal('}' + chr(10))}"


class JsonCall:
    """Streams the raw text of `arguments` as soon as the name is known, in whichever order the two come."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._scan = ObjectScan()
        self._name: list[str] = []
        self._arguments: list[str] = []
        self._open = False
        self._custom = False
        self._sent = False

    @property
    def done(self) -> bool:
        return self._scan.done

    @property
    def inside_value(self) -> bool:
        return self._scan.in_string

    def push(self, text: str) -> list[Delta]:
        out: list[Delta] = []
        fresh: list[str] = []
        for char in text:
            key = self._scan.key
            if not self._scan.step(char):
                continue
            key = key or self._scan.key
            if key == "name" and not self._open:
                self._name.append(char)
                if self._scan.key is None:
                    self._begin(out)
            elif key in _ARGUMENTS:
                self._arguments.append(char)
                fresh.append(char)
        if self._open and not self._buffered and self._arguments:
            ready = "".join(fresh) if self._sent else "".join(self._arguments)
            if ready:
                self._sent = True
                out.append(CallDelta(ready))
        return out

    @property
    def _buffered(self) -> bool:
        """Free text, and arguments that are JSON inside a string, can only be sent when whole."""
        return self._custom or self._arguments[:1] == ['"']

    def _begin(self, out: list[Delta]) -> None:
        try:
            name = json.loads("".join(self._name), strict=False)
        except (ValueError, RecursionError):
            return
        if isinstance(name, str) and name.strip():
            self._open = True
            self._custom = is_custom(name, self._tools)
            out.append(CallOpen(name, self._custom))

    def finish(self, closed: bool) -> list[Delta] | None:
        if not self._open:
            return None
        out: list[Delta] = []
        raw = "".join(self._arguments)
        if self._buffered:
            raw = _unwrap(raw)
            out.append(CallDelta(free_text(raw) if self._custom else raw))
        elif not raw and (closed or self._scan.done):
            out.append(CallDelta("{}"))
        if closed or self._scan.done:
            out.append(CallClose())
        return out


def _unwrap(raw: str) -> str:
    """Arguments that were written as a JSON string of JSON."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return raw
    return value if isinstance(value, str) else raw


def free_text(raw: str) -> str:
    """Text of a custom tool's call: its one argument, or everything if the model wrote something else."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, dict) and set(value) == {CUSTOM_INPUT} and isinstance(value[CUSTOM_INPUT], str):
        return value[CUSTOM_INPUT]
    return raw
