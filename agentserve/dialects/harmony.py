"""Harmony (gpt-oss): an answer is messages with a channel; thinking, text and calls are told apart by it.

`<|channel|>analysis<|message|>…<|end|>`, then `<|start|>assistant` and
`<|channel|>final<|message|>…<|return|>` or `<|channel|>commentary to=functions.N <|constrain|>json<|message|>{…}<|call|>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter, choice
from agentserve.constraints.output import OutputRule, Schema
from agentserve.dialects.base import Dialect, Markers, Piece, Spell, StreamState, is_custom
from agentserve.dialects.grammar import Thinking, call_rule, text_form
from agentserve.dialects.hermes import free_text
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta, ReasoningDelta, TextDelta
from agentserve.protocol.items import Tool

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_NEXT = f"{_END}{_START}assistant"


class Harmony(Dialect):
    name = "harmony"
    markers = Markers("", "", "", "", (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN))
    trims = False
    after_thinking = ""
    turn_ends = (_RETURN, _CALL)
    one_call = True

    def write_answer(self, reasoning: str, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Piece]:
        out: list[Piece] = []
        if reasoning:
            out += [Piece(f"{_CHANNEL}analysis{_MESSAGE}", True), Piece(reasoning), Piece(_NEXT, True)]
        for name, arguments in calls[:1]:
            if text:
                out += [Piece(f"{_CHANNEL}commentary{_MESSAGE}", True), Piece(text), Piece(_NEXT, True)]
            head = f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}"
            return [*out, Piece(head, True), Piece(json.dumps(arguments, ensure_ascii=False)), Piece(_CALL, True)]
        return [*out, Piece(f"{_CHANNEL}final{_MESSAGE}", True), Piece(text), Piece(_RETURN, True)]

    def stream_state(self, tools: Sequence[Tool], spell: Spell, *, literal: bool) -> StreamState:
        return HarmonyState(tools, spell)

    def answer_grammar(self, rule: OutputRule, writer: LarkWriter, thinking: Thinking) -> str:
        analysis = f"({writer.tag(f'{_CHANNEL}analysis{_MESSAGE}')} {writer.upto(_END)} {writer.tag(f'{_START}assistant')})?"
        final = writer.rule(f"{writer.tag(f'{_CHANNEL}final{_MESSAGE}')} {text_form(rule.form, writer)}")
        if rule.calls == "none" or not rule.schemas:
            return writer.grammar(f"{analysis} {final}")
        call = choice([call_rule(self, rule, writer, name) for name in rule.schemas])
        if rule.calls == "required":
            return writer.grammar(f"{analysis} {call}")
        preamble = f"({writer.tag(f'{_CHANNEL}commentary{_MESSAGE}')} {writer.upto(_END)} {writer.tag(f'{_START}assistant')})?"
        return writer.grammar(f"{analysis} ({preamble} {call} | {final})")

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        return f"{writer.tag(f'{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}')} {writer.json(schema)}"


class HarmonyState:
    """Reads the messages of one answer; its text begins behind `<|start|>assistant`."""

    def __init__(self, tools: Sequence[Tool], spell: Spell) -> None:
        self._tools = tools
        self._channel, self._constrain, self._message = spell(_CHANNEL), spell(_CONSTRAIN), spell(_MESSAGE)
        self._start = spell(_START)
        self._ends = (spell(_END), spell(_CALL), spell(_RETURN), self._start)
        self._longest = max(map(len, (*self._ends, self._message)))
        self._held = ""
        self._kind: str | None = None
        self._custom = False
        self._whole: list[str] = []

    def push(self, text: str) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        while self._step(out):
            pass
        return out

    def finish(self) -> list[Delta]:
        out: list[Delta] = []
        if self._kind is None:
            # Not one message: what a model writes that forgets the format is text.
            head = self._held.strip()
            if head and self._channel not in head and not head.startswith(self._start):
                out.append(TextDelta(self._held))
        else:
            self._write(self._held, out)
            if self._kind == "call" and _is_object("".join(self._whole)):
                self._end(out)
        self._held = ""
        return out

    def _step(self, out: list[Delta]) -> bool:
        if self._kind is None:
            at = self._held.find(self._message)
            if at < 0:
                return False
            self._begin(self._held[:at], out)
            self._held = self._held[at + len(self._message) :]
            return True
        found = min(((at, end) for end in self._ends if (at := self._held.find(end)) >= 0), default=None)
        if found is None:
            keep = max(_overlap(self._held, end) for end in self._ends)
            ready = self._held[: len(self._held) - keep]
            self._held = self._held[len(ready) :]
            self._write(ready, out)
            return False
        at, end = found
        self._write(self._held[:at], out)
        self._held = self._held[at + len(end) :]
        self._end(out)
        return True

    def _begin(self, head: str, out: list[Delta]) -> None:
        head = head.rpartition(self._start)[2]
        plain = head.replace(self._constrain, " ").replace(self._channel, f" {_CHANNEL}")
        recipient = re.search(r"\bto=(\S+)", plain)
        channel = re.search(re.escape(_CHANNEL) + r"\s*(\w+)", plain)
        if recipient is not None and recipient[1] != "assistant":
            name = recipient[1].removeprefix("functions.")
            self._kind = "call"
            self._custom = is_custom(name, self._tools)
            self._whole = []
            out.append(CallOpen(name, self._custom))
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"

    def _write(self, text: str, out: list[Delta]) -> None:
        if not text:
            return
        if self._kind == "call":
            self._whole.append(text)
            if not self._custom:
                out.append(CallDelta(text))
        else:
            out.append(ReasoningDelta(text) if self._kind == "reasoning" else TextDelta(text))

    def _end(self, out: list[Delta]) -> None:
        if self._kind == "call":
            raw = "".join(self._whole)
            if self._custom:
                out.append(CallDelta(free_text(raw)))
            elif not raw.strip():
                out.append(CallDelta("{}"))
            out.append(CallClose())
        self._kind = None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)
