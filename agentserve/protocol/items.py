"""Context items and tools: what a client may put before the model and what comes back.

Structs with the wire's own names. Unknown keys are ignored, known ones are checked strictly, and every error names its field.
Decoding (which also accepts shorthand forms) is in decode.py; this file holds only shapes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

Status = Literal["in_progress", "completed", "incomplete"]
Role = Literal["user", "assistant", "system", "developer"]

# ── content parts ────────────────────────────────────────────────────────────────────────────────────────────────


class InputText(Struct, frozen=True, tag="input_text"):
    text: str


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: tuple[Any, ...] = ()
    logprobs: tuple[Any, ...] = ()


class PlainText(Struct, frozen=True, tag="text"):
    """MCP content block and Chat Completions part."""

    text: str


class Refusal(Struct, frozen=True, tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(Struct, frozen=True, tag="summary_text"):
    text: str


Part = InputText | OutputText | PlainText | Refusal | ReasoningText | SummaryText

# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Message(Struct, frozen=True, kw_only=True, tag="message"):
    """role developer is rendered as system. phase is kept and sent back, never rendered."""

    id: str | None = None
    role: Role
    status: Status | None = None
    content: tuple[Part, ...]
    phase: str | UnsetType | None = UNSET

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.content)


class Reasoning(Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str | None = None
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.content or ())


class FunctionCall(Struct, frozen=True, kw_only=True, tag="function_call"):
    """arguments: JSON text, exactly as the model wrote it or the client resent it."""

    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: Status | None = None
    namespace: str | UnsetType | None = UNSET


class CustomToolCall(Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    """input: free text."""

    id: str | None = None
    call_id: str
    name: str
    input: str
    status: Status | None = None
    namespace: str | UnsetType | None = UNSET


class FunctionCallOutput(Struct, frozen=True, kw_only=True, tag="function_call_output"):
    """output: text, or content parts (an MCP result's `content`). is_error: an MCP result's `isError`."""

    id: str | None = None
    call_id: str
    output: str | tuple[Part, ...]
    status: Status | None = None
    is_error: bool | UnsetType = UNSET

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "\n".join(p.text for p in self.output)


class CustomToolCallOutput(Struct, frozen=True, kw_only=True, tag="custom_tool_call_output"):
    id: str | None = None
    call_id: str
    output: str | tuple[Part, ...]
    status: Status | None = None

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "\n".join(p.text for p in self.output)


class Compaction(Struct, frozen=True, kw_only=True, tag="compaction"):
    """A conversation summed up: by `POST /v1/responses/compact`, or within a turn, where it replaces what is before it.

    sealing.py opens both before they go to a model.
    """

    id: str | None = None
    encrypted_content: str = ""


Item = Message | Reasoning | FunctionCall | CustomToolCall | FunctionCallOutput | CustomToolCallOutput
InputItem = Item | Compaction
OutputItem = Message | Reasoning | FunctionCall | CustomToolCall
"""What a model says."""
ResponseItem = OutputItem | Compaction
"""What the output of a response holds."""

ID_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
"""How the ids of items begin, by type."""

# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────


class FunctionTool(Struct, frozen=True, kw_only=True, tag="function"):
    """parameters: JSON schema. An MCP description `{name, description, inputSchema}` is decoded to this too."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Struct, frozen=True, kw_only=True, tag="custom"):
    """A tool that takes free text. format: as sent; constraints/rules.py reads its grammar."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


Tool = FunctionTool | CustomTool


class IgnoredTool(Struct, frozen=True):
    """A tool of a type that this server does not run: kept out of the prompt, named in the cache report."""

    type: str
    name: str | None = None


CUSTOM_INPUT = "input"
"""Argument under which a custom tool's free text travels; the model sees a function with this one string parameter."""

MAX_DEPTH = 64
"""Nesting of a tool's schema and of a call's arguments: deeper ones are kept away from whatever walks them recursively."""


def nesting(value: Any, limit: int) -> int:
    """Levels of objects and arrays in decoded JSON, counted without recursion up to limit + 1."""
    level = [value] if isinstance(value, dict | list) else []
    depth = 0
    while level and depth <= limit:
        depth += 1
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
    return depth


_items_decoder = msgspec.json.Decoder(tuple[InputItem, ...])
_items_encoder = msgspec.json.Encoder()


def encode_items(items: tuple[InputItem, ...]) -> bytes:
    """Items as a JSON array, for storage and for the wire."""
    return _items_encoder.encode(items)


def decode_items(data: bytes) -> tuple[InputItem, ...]:
    """Inverse of encode_items; only for what this server wrote itself."""
    return _items_decoder.decode(data)
