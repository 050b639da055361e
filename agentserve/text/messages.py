"""Context items → the messages that chat templates read, with every content made opaque.

A run of reasoning, text and calls becomes one assistant message; what a message cannot hold in its own order (text after a
call, reasoning after text) starts the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from agentserve.kept import PER_JSON_BYTE, Kept
from agentserve.protocol.items import (
    CUSTOM_INPUT,
    MAX_DEPTH,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Item,
    Message,
    Reasoning,
    Tool,
    nesting,
)
from agentserve.text.opaque import SENTINEL, ContentTable, Document

Role = Literal["system", "user", "assistant", "tool"]
Trim = Literal["none", "space", "lines"]

ERROR_PREFIX = "Error: "
"""Put before a failed MCP result, which has no other place in a chat template."""


@dataclass(frozen=True, slots=True)
class Trims:
    """White space that the template takes off a content, per side, by field (see probe.py). We take it off before."""

    sides: dict[str, tuple[Trim, Trim]] = field(default_factory=dict)

    def apply(self, text: str, field_name: str) -> str:
        left, right = self.sides.get(field_name, ("none", "none"))
        if left != "none":
            text = text.lstrip() if left == "space" else text.lstrip("\n")
        if right != "none":
            text = text.rstrip() if right == "space" else text.rstrip("\n")
        return text


@dataclass(frozen=True, slots=True)
class Habits:
    """What a template accepts (see probe.py).

    late_system: takes a system message in mid-conversation, in place. repeats: takes two user messages in a row.
    system: takes a system message at all. thinking_key: member of a message that its thinking is read from. apart: refuses
    thinking, text and calls in one message. more_system: takes several system messages at the start, each in its place.
    """

    trims: Trims = field(default_factory=Trims)
    late_system: bool = True
    repeats: bool = True
    system: bool = True
    thinking_key: str = "reasoning_content"
    apart: bool = False
    more_system: bool = True


CallId = Callable[[str, str, int], str]
"""(name, id that the client knows, number of the call in the context) → the id that the template is given."""
_SAFE_ID = re.compile(r"[A-Za-z0-9_.:-]*")


@dataclass(slots=True)
class ChatMessage:
    """One template message under construction. items: indices of the context items in it."""

    role: Role
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    call_id: str | None = None

    def to_template(self, thinking_key: str = "reasoning_content") -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": "".join(self.content)}
        if self.reasoning:
            message[thinking_key] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        return message


def call_arguments(item: FunctionCall | CustomToolCall) -> dict[str, Any]:
    """Arguments as an object; text that is not one (a broken call that the client kept) goes under `input`.

    So does one that is nested too deeply for those who walk it.
    """
    return {CUSTOM_INPUT: item.input} if isinstance(item, CustomToolCall) else _parsed(item.arguments)


PARSED: Kept[str, dict[str, Any]] = Kept(32 << 20)
"""Arguments of calls, because a context brings all its calls again in every turn. Nobody writes to them."""


def _parsed(arguments: str) -> dict[str, Any]:
    known = PARSED.get(arguments)
    if known is None:
        known = _parse(arguments)
        PARSED.put(arguments, known, (PER_JSON_BYTE + 1) * len(arguments))
    return known


def _parse(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = arguments
    if nesting(value, MAX_DEPTH) > MAX_DEPTH:
        value = arguments
    return value if isinstance(value, dict) else {CUSTOM_INPUT: value}


def tool_documents(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Tools in the form that chat templates expect."""
    out: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            parameters = tool.parameters or {"type": "object", "properties": {}}
        else:
            text = {"type": "string", "description": "Free text for the tool."}
            parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
        out.append({"type": "function", "function": function})
    return out


class MessageBuilder:
    """Builds the messages of one rendering; contents go to `table`.

    place_all: also a message that holds nothing but thinking shows where it is, if the template drops the thinking.
    """

    def __init__(
        self,
        table: ContentTable,
        habits: Habits,
        *,
        place_all: bool = False,
        call_id: CallId = lambda name, call_id, index: call_id,
    ) -> None:
        self.table = table
        self._call_id = call_id
        self._ids: dict[str, str] = {}
        self.habits = habits
        self.place_all = place_all

    def build(self, instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
        messages = self._opening(instructions, items)
        start = next((i for i, item in enumerate(items) if not _instructs(item)), len(items))
        for index in range(start, len(items)):
            self._add(messages, items[index], index)
        if self.place_all:
            for message in messages:
                if message.role == "assistant" and not any(message.content) and not message.calls:
                    message.content.append(self.table.mark(message.items[0], "text"))
        if not self.habits.system:
            self._fold_system(messages)
        return messages if self.habits.repeats else list(_merge_repeats(messages))

    def _opening(self, instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
        """What instructs the model before anybody speaks.

        One message each where the template allows it: templates put the tools behind the first, so that text which a client
        adds to it later would move them all (Codex prewarms with one developer message, and sends another with its first turn).
        """
        messages = [ChatMessage("system")]
        if instructions:
            self._append(messages[-1].content, instructions, -1, "system")
        for index, item in enumerate(items):
            if not _instructs(item):
                break
            if messages[-1].content and self.habits.more_system:
                messages.append(ChatMessage("system"))
            self._append(messages[-1].content, item.text, index, "system")
            messages[-1].items.append(index)
        return [m for m in messages if m.content]

    def _opaque(self, text: str, item: int, name: str) -> str:
        return self.table.add(self.habits.trims.apply(text, name), item, name)

    def _safe_id(self, call_id: str, item: int) -> str:
        """An id is the client's too, and some templates write it."""
        safe = _SAFE_ID.fullmatch(SENTINEL.sub("", call_id)) is not None
        return call_id if safe else self.table.add(call_id, item, "other")

    def _append(self, parts: list[str], text: str, item: int, name: str) -> None:
        if sentinel := self._opaque(text, item, name):
            parts += ["\n\n", sentinel] if parts else [sentinel]

    def _add(self, messages: list[ChatMessage], item: Item, index: int) -> None:
        match item:
            case Message(role="assistant"):
                message = self._assistant(messages, closed_by=lambda m: bool(m.calls))
                self._append(message.content, item.text, index, "text")
                message.items.append(index)
            case Reasoning():
                message = self._assistant(messages, closed_by=lambda m: bool(m.calls or m.content))
                self._append(message.reasoning, item.text, index, "reasoning")
                message.items.append(index)
            case FunctionCall() | CustomToolCall():
                message = self._assistant(messages, closed_by=lambda m: self.habits.apart and m.content and m.reasoning)
                name = self._opaque(item.name, index, "name")
                self._ids[item.call_id] = self._safe_id(self._call_id(name, item.call_id, len(self._ids)), index)
                function = {
                    "name": name,
                    "arguments": Document(call_arguments(item), self.table, index, "arguments"),
                }
                message.calls.append({"id": self._ids[item.call_id], "type": "function", "function": function})
                message.items.append(index)
            case FunctionCallOutput() | CustomToolCallOutput():
                failed = isinstance(item, FunctionCallOutput) and item.is_error is True
                text = ERROR_PREFIX + item.text if failed else item.text
                call_id = self._ids.get(item.call_id) or self._safe_id(item.call_id, index)
                message = ChatMessage("tool", [self._opaque(text, index, "output")], items=[index], call_id=call_id)
                messages.append(message)
            case Message(role="user"):
                messages.append(ChatMessage("user", [self._opaque(item.text, index, "user")], items=[index]))
            case Message():
                messages.append(self._late_system(item, index))

    def _late_system(self, item: Message, index: int) -> ChatMessage:
        if self.habits.late_system:
            return ChatMessage("system", [self._opaque(item.text, index, "system")], items=[index])
        # Where it was said matters more than its role: moved to the front it would change every later position.
        content = ["<system-reminder>\n", self._opaque(item.text, index, "user"), "\n</system-reminder>"]
        return ChatMessage("user", content, items=[index])

    def _assistant(self, messages: list[ChatMessage], closed_by: Any) -> ChatMessage:
        if messages and messages[-1].role == "assistant" and not closed_by(messages[-1]):
            return messages[-1]
        messages.append(ChatMessage("assistant"))
        return messages[-1]

    def _fold_system(self, messages: list[ChatMessage]) -> None:
        """A template without a system role gets its text at the head of the first user message."""
        if not messages or messages[0].role != "system":
            return
        system = messages.pop(0)
        if messages and messages[0].role == "user":
            messages[0].content = [*system.content, "\n\n", *messages[0].content]
            messages[0].items = system.items + messages[0].items
        else:
            messages.insert(0, ChatMessage("user", system.content, items=system.items))


def _instructs(item: Item) -> TypeGuard[Message]:
    return isinstance(item, Message) and item.role in ("system", "developer")


def _merge_repeats(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    held: ChatMessage | None = None
    for message in messages:
        if held is not None and held.role == message.role == "user":
            held.content += ["\n\n", *message.content]
            held.items += message.items
            continue
        if held is not None:
            yield held
        held = message
    if held is not None:
        yield held
