"""Wire Structs of Anthropic's Messages, and its content blocks → context items. Images and documents are refused by name.

Unknown keys (`cache_control`, `context_management`, …) are ignored; a known key with a wrong value is an error that names it.

Source of the shapes: the `anthropic` package, 2.14.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from agentserve.errors import InvalidValue, UnsupportedValue
from agentserve.protocol.decode import decode, kind_of
from agentserve.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputText,
    Item,
    Message,
    OutputText,
    PlainText,
    Reasoning,
    ReasoningText,
)
from agentserve.protocol.responses import Probability, TurnOptions

MESSAGES_PATH = "/v1/messages"

# ── what a client asks ───────────────────────────────────────────────────────────────────────────────────────────


class Thinking(Struct, frozen=True, kw_only=True):
    """type: enabled, adaptive or disabled."""

    type: str


class Choice(Struct, frozen=True, kw_only=True):
    """How tools are chosen."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesCreate(Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/messages` and of `/count_tokens`."""

    messages: list[Raw]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: Raw = Raw(b"null")
    tools: list[Raw] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: Any = None
    agentserve: TurnOptions | None = None


class _Head(Struct, frozen=True):
    type: Any = None
    role: Any = None


class _Message(Struct, frozen=True, kw_only=True):
    role: Any
    content: Raw


class _Text(Struct, frozen=True, kw_only=True):
    text: str


class _Thought(Struct, frozen=True, kw_only=True):
    thinking: str


class _Use(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    input: dict[str, Any] = {}


class _Result(Struct, frozen=True, kw_only=True):
    tool_use_id: str
    content: Raw = Raw(b"null")
    is_error: bool | None = None


class _Tool(Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


def decode_messages(raws: list[Raw], *, max_items: int) -> tuple[Item, ...]:
    """`messages` as context items, oldest first; a system message in between stays where it stood.

    Raises InvalidValue, UnsupportedValue.
    """
    if not raws:
        raise InvalidValue("no messages; accepted: at least one", "messages")
    items: list[Item] = []
    role = None
    for i, raw in enumerate(raws):
        where = f"messages[{i}]"
        message = decode(raw, _Message, where)
        role = message.role
        if role == "assistant":
            items += _assistant(message.content, f"{where}.content")
        elif role in ("user", "system"):
            items += _input(message.content, role, f"{where}.content")
        else:
            got = f"'{role[:64]}'" if isinstance(role, str) else f"`{kind_of(role)}`"
            raise InvalidValue(f"got {got}; accepted: user, assistant, system", f"{where}.role")
        if len(items) > max_items:
            raise InvalidValue(f"more than {max_items} content blocks; at most so many are accepted", "messages")
    if role == "assistant":
        raise UnsupportedValue(
            "an answer that is begun by the client is not supported; accepted: a last message of role user",
            f"messages[{len(raws) - 1}].role",
        )
    return tuple(items)


def decode_system(raw: Raw) -> str | None:
    """`system`: text, or text blocks, which become one text."""
    if bytes(memoryview(raw)[:1]) == b"n":
        return None
    return "\n\n".join(text for text in _texts(raw, "system") if text) or None


def decode_tools(raws: list[Raw] | None) -> list[Raw] | None:
    """Tools as a Responses body has them. Those of a type that only a hosted service runs are left as they are."""
    if raws is None:
        return None
    out: list[Raw] = []
    for i, raw in enumerate(raws):
        if decode(raw, _Head, f"tools[{i}]").type in (None, "custom"):
            tool = decode(raw, _Tool, f"tools[{i}]")
            function = FunctionTool(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
            raw = Raw(msgspec.json.encode(function))
        out.append(raw)
    return out


def _blocks(raw: Raw, where: str) -> list[tuple[Any, Raw, str]]:
    """(type, block, place) of each content block."""
    blocks = decode(raw, list[Raw], where)
    places = [f"{where}[{i}]" for i in range(len(blocks))]
    return [(decode(one, _Head, at).type, one, at) for one, at in zip(blocks, places, strict=True)]


def _is_text(raw: Raw, where: str) -> bool:
    """Raises InvalidValue if it is neither text nor a list."""
    head = bytes(memoryview(raw)[:1])
    if head not in (b'"', b"["):
        raise InvalidValue("Expected `str` or an array of content blocks", where)
    return head == b'"'


def _texts(raw: Raw, where: str) -> list[str]:
    if _is_text(raw, where):
        return [decode(raw, str, where)]
    texts: list[str] = []
    for kind, block, at in _blocks(raw, where):
        if kind != "text":
            raise _refusal(kind, at, "text")
        texts.append(decode(block, _Text, at).text)
    return texts


def _refusal(kind: Any, where: str, accepted: str) -> InvalidValue:
    if isinstance(kind, str):
        text = f"content of type '{kind[:64]}' is not supported by this model; accepted: {accepted}"
        return UnsupportedValue(text, where)
    return InvalidValue(f"unknown content type `{kind_of(kind)}`; accepted: {accepted}", f"{where}.type")


def _input(raw: Raw, role: Literal["user", "system"], where: str) -> list[Item]:
    """A message that is not the model's: results of calls, and runs of text."""
    if _is_text(raw, where):
        return [Message(role=role, content=(InputText(decode(raw, str, where)),))]
    items: list[Item] = []
    texts: list[str] = []

    def close() -> None:
        if texts:
            items.append(Message(role=role, content=(InputText("\n".join(texts)),)))
            texts.clear()

    for kind, block, at in _blocks(raw, where):
        if kind == "text":
            texts.append(decode(block, _Text, at).text)
        elif kind == "tool_result" and role == "user":
            close()
            items.append(_result(decode(block, _Result, at), at))
        else:
            raise _refusal(kind, at, "text, tool_result" if role == "user" else "text")
    close()
    return items or [Message(role=role, content=(InputText(""),))]


def _result(wire: _Result, where: str) -> FunctionCallOutput:
    at = f"{where}.content"
    empty = bytes(memoryview(wire.content)[:1]) == b"n"
    texts = [] if empty else _texts(wire.content, at)
    output = texts[0] if len(texts) == 1 else tuple(PlainText(text) for text in texts)
    return FunctionCallOutput(call_id=wire.tool_use_id, output=output, is_error=True if wire.is_error else UNSET)


def _assistant(raw: Raw, where: str) -> list[Item]:
    """What the model said, block by block. Thinking is recognised by its text; a signature needs no check here."""
    if _is_text(raw, where):
        return [Message(role="assistant", content=(OutputText(decode(raw, str, where)),))]
    items: list[Item] = []
    for kind, block, at in _blocks(raw, where):
        if kind == "text":
            items.append(Message(role="assistant", content=(OutputText(decode(block, _Text, at).text),)))
        elif kind == "thinking":
            items.append(Reasoning(content=(ReasoningText(decode(block, _Thought, at).thinking),)))
        elif kind == "tool_use":
            use = decode(block, _Use, at)
            arguments = msgspec.json.encode(use.input).decode()
            items.append(FunctionCall(call_id=use.id, name=use.name, arguments=arguments))
        elif kind != "redacted_thinking":  # another service's, which only it can read
            raise _refusal(kind, at, "text, thinking, tool_use")
    return items or [Message(role="assistant", content=())]


# ── what the server sends ────────────────────────────────────────────────────────────────────────────────────────


class TextBlock(Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """signature: the reasoning item's id; nothing is checked with it."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct, frozen=True, kw_only=True):
    """input_tokens: those that were prefilled; the prompt is they and cache_read_input_tokens, restored from a checkpoint."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class Answer(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[Block] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage = MessagesUsage()


class MessageStart(Struct, frozen=True, tag="message_start"):
    message: Answer


class Ping(Struct, frozen=True, tag="ping"):
    pass


class BlockStart(Struct, frozen=True, kw_only=True, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputDelta(Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, frozen=True, kw_only=True, tag="content_block_stop"):
    index: int


class Ending(Struct, frozen=True, kw_only=True):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, kw_only=True, tag="message_delta"):
    delta: Ending
    usage: MessagesUsage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    pass


class TokenCount(Struct, frozen=True):
    input_tokens: int


MESSAGES_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Type of an error by HTTP status; `api_error` from 500 on."""


class MessagesErrorDetail(Struct, frozen=True, kw_only=True):
    type: str
    message: str


class MessagesError(Struct, frozen=True, kw_only=True, tag="error"):
    error: MessagesErrorDetail
    request_id: str | UnsetType | None = UNSET
