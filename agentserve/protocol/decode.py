"""JSON from a client → Structs, tolerant to what it does not know, strict on what it does; each error names its field.

Accepts the shorthand forms of the standard (input as text, messages without `type`, content as text) and MCP's shapes.
Nothing here keeps state or knows sockets.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from agentserve.errors import InvalidValue, UnknownEvent, UnsupportedValue
from agentserve.protocol.items import (
    MAX_DEPTH,
    Compaction,
    CustomTool,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    IgnoredTool,
    InputItem,
    InputText,
    Message,
    OutputText,
    Part,
    PlainText,
    Reasoning,
    ReasoningText,
    Refusal,
    Role,
    Status,
    SummaryText,
    Tool,
    nesting,
)
from agentserve.protocol.pieces import check_members, decode_large, is_large
from agentserve.protocol.responses import (
    ClientFrame,
    FollowFrame,
    ResponseCancel,
    ResponseCreate,
    ResponseSteer,
    TurnOptions,
)
from agentserve.schema_errors import explain

T = TypeVar("T")

MAX_TOOLS = 1024
MAX_PARTS = 4096

# A whole pair is one; group 1 is half of one.
_SURROGATE = re.compile(r"\\u[dD](?:[89abAB]..\\u[dD][c-fC-F]..|([89a-fA-F]..))", re.DOTALL)
MAX_SURROGATES = 1 << 15
"""Escapes of them, pairs too, in a message that has half of one. Looking at each takes a microsecond on the thread that serves
everybody; who cuts texts in the middle of a pair leaves a handful."""
_FRAMES: dict[str, type[ClientFrame]] = {
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
    "response.steer": ResponseSteer,
    "agentserve.follow": FollowFrame,
}
_TEXT_PARTS: dict[str, type[Part]] = {
    "input_text": InputText,
    "output_text": OutputText,
    "text": PlainText,
    "refusal": Refusal,
    "reasoning_text": ReasoningText,
    "summary_text": SummaryText,
}
_OTHER_PARTS = frozenset(
    {"input_image", "input_file", "input_audio", "image_url", "image", "audio", "file", "resource", "resource_link"}
)
_ACCEPTED_PARTS = "input_text, output_text, text, refusal"
_ACCEPTED_ITEMS = (
    "message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output, compaction"
)


class Envelope(Struct, frozen=True):
    """What is looked at before the rest of a frame."""

    type: Any = None
    stream_id: Any = None


class _ItemHead(Struct, frozen=True):
    type: Any = None
    role: Any = None


class _WireMessage(Struct, frozen=True, kw_only=True):
    id: str | None = None
    role: Role
    status: Status | None = None
    content: Raw
    phase: str | UnsetType | None = UNSET


class _WireOutput(Struct, frozen=True, kw_only=True):
    id: str | None = None
    call_id: str
    output: Raw
    status: Status | None = None


class _McpResult(Struct, frozen=True, kw_only=True):
    content: list[Raw]
    isError: bool = False


class _ToolHead(Struct, frozen=True, kw_only=True):
    type: Any = None
    name: Any = None
    function: Raw | UnsetType = UNSET
    custom: Raw | UnsetType = UNSET
    inputSchema: Raw | UnsetType = UNSET


class _McpTool(Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    inputSchema: dict[str, Any]


def decode(data: bytes | str | Raw, kind: type[T], where: str = "") -> T:
    """Decode JSON as `kind`. where: path of the value within the request. Raises InvalidValue with that path.

    A lone surrogate in an escape becomes U+FFFD: agents cut texts in the middle of a pair, and their JSON encoder lets it pass.
    """
    try:
        return _decode(data, kind, where)
    except (msgspec.ValidationError, RecursionError):
        pass
    except msgspec.DecodeError:
        mended = _without_lone_surrogates(data)
        if mended is not None:
            data = mended
    return _guard(lambda: _typed(data, kind, where), kind, where)


def _decode(data: bytes | str | Raw, kind: type[T], where: str) -> T:
    if is_large(data):
        return decode_large(data, kind, where)
    return msgspec.json.decode(data, type=kind)


def _typed(data: bytes | str | Raw, kind: type[T], where: str) -> T:
    """Text that is no JSON is told as that, also where something before its fault has a wrong type."""
    try:
        return _decode(data, kind, where)
    except msgspec.ValidationError:
        with contextlib.suppress(msgspec.ValidationError):  # a number that no float holds; it has a name in the other error
            msgspec.json.decode(data, type=Raw if is_large(data) else Any)
        raise


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """Decoded JSON as `kind`. Raises InvalidValue with the path."""
    return _guard(lambda: msgspec.convert(value, kind), kind, where)


def _without_lone_surrogates(data: bytes | str | Raw) -> str | None:
    """None if there are none, or more escapes than are looked at, or the text is not UTF-8."""
    try:
        text = data if isinstance(data, str) else bytes(data).decode()
    except UnicodeDecodeError:
        return None
    parts: list[str] = []
    taken = at = 0
    for _ in range(MAX_SURROGATES):
        found = _SURROGATE.search(text, at)
        if found is None:
            return "".join([*parts, text[taken:]]) if parts else None
        start, before = found.start(), text[at : found.start()]
        if (len(before) - len(before.rstrip("\\"))) % 2:
            at = start + 1  # this backslash is itself escaped
            continue
        at = found.end()
        if found[1]:
            parts += [text[taken:start], "\\ufffd"]
            taken = at
    return None


def _guard(work: Callable[[], T], kind: Any, where: str) -> T:
    try:
        return work()
    except msgspec.ValidationError as exc:
        message, path = explain(exc, kind)
        raise InvalidValue(message, _join(where, path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidValue(f"not valid JSON: {exc}", where or None) from None
    except RecursionError:
        raise InvalidValue("JSON is nested too deeply", where or None) from None


def _join(where: str, path: str) -> str | None:
    return (where + path).removeprefix(".") or None


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────


def peek(text: str | bytes) -> Envelope:
    """Type and lane of a frame, as text or in UTF-8. Raises InvalidValue if it is not a JSON object, MessageTooLarge."""
    check_members(text)
    opened = text.lstrip(" \t\r\n").startswith("{") if isinstance(text, str) else text.lstrip(b" \t\r\n").startswith(b"{")
    if not opened:
        raise InvalidValue("a frame must be one JSON object with a `type`")
    return decode(text, Envelope)


def decode_frame(envelope: Envelope, text: str | bytes) -> ClientFrame:
    """The whole frame. Raises UnknownEvent or InvalidValue."""
    if not isinstance(envelope.type, str):
        raise InvalidValue(f"Expected `str`, got `{kind_of(envelope.type)}`; accepted: {', '.join(_FRAMES)}", "type")
    kind = _FRAMES.get(envelope.type)
    if kind is None:
        raise UnknownEvent(f"unknown event type '{envelope.type[:64]}'; accepted: {', '.join(_FRAMES)}", "type")
    return decode(text, kind)


def options_of(create: ResponseCreate, *, events_header: bool = False) -> TurnOptions:
    """The `agentserve` object merged with its string equivalents in metadata; the object wins. Raises InvalidValue."""
    if create.agentserve is not None:
        chosen = create.agentserve
        return msgspec.structs.replace(chosen, events=True) if events_header else chosen
    named: dict[str, Any] = {
        k[len("agentserve.") :]: v for k, v in (create.metadata or {}).items() if k.startswith("agentserve.")
    }
    if "normalise" in named:
        named["normalise"] = [name for name in map(str.strip, named["normalise"].split(",")) if name]
    options = _guard(lambda: msgspec.convert(named, TurnOptions, strict=False), TurnOptions, "metadata.agentserve")
    return msgspec.structs.replace(options, events=True) if events_header else options


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_input(raw: Raw, *, max_items: int, where: str = "input") -> tuple[InputItem, ...]:
    """`input`: text (empty is no item), or a list of items. where: the field that it is.

    Raises InvalidValue, or UnsupportedValue for items this server cannot show a model.
    """
    head = bytes(memoryview(raw)[:1])
    if head == b"n":
        return ()
    if head == b'"':
        text = decode(raw, str, where)
        return (Message(role="user", content=(InputText(text),)),) if text else ()
    if head != b"[":
        raise InvalidValue("Expected `str` or an array of items", where)
    raws = decode(raw, list[Raw], where)
    if len(raws) > max_items:
        raise InvalidValue(f"{len(raws)} items, at most {max_items} are accepted", where)
    return tuple(_item(one, f"{where}[{i}]") for i, one in enumerate(raws))


def _item(raw: Raw, where: str) -> InputItem:
    head = decode(raw, _ItemHead, where)
    kind = head.type
    if kind is None and head.role is not None:
        kind = "message"
    if kind == "message":
        wire = decode(raw, _WireMessage, where)
        return Message(id=wire.id, role=wire.role, status=wire.status, content=_message_content(wire, where), phase=wire.phase)
    if kind == "function_call":
        return decode(raw, FunctionCall, where)
    if kind == "function_call_output":
        wire = decode(raw, _WireOutput, where)
        output, is_error = _tool_output(wire.output, f"{where}.output")
        return FunctionCallOutput(id=wire.id, call_id=wire.call_id, output=output, status=wire.status, is_error=is_error)
    if kind == "custom_tool_call":
        return decode(raw, CustomToolCall, where)
    if kind == "custom_tool_call_output":
        wire = decode(raw, _WireOutput, where)
        output, _ = _tool_output(wire.output, f"{where}.output")
        return CustomToolCallOutput(id=wire.id, call_id=wire.call_id, output=output, status=wire.status)
    if kind == "reasoning":
        return decode(raw, Reasoning, where)
    if kind == "compaction":
        return decode(raw, Compaction, where)
    if not isinstance(kind, str):
        raise InvalidValue(f"Expected `str`, got `{kind_of(kind)}`; accepted: {_ACCEPTED_ITEMS}", f"{where}.type")
    raise UnsupportedValue(f"item type '{kind[:64]}' is not supported; accepted: {_ACCEPTED_ITEMS}", f"{where}.type")


def _message_content(wire: _WireMessage, where: str) -> tuple[Part, ...]:
    head = bytes(memoryview(wire.content)[:1])
    if head == b'"':
        text = decode(wire.content, str, f"{where}.content")
        return (OutputText(text) if wire.role == "assistant" else InputText(text),)
    if head == b"n" and wire.role == "assistant":
        return ()
    if head != b"[":
        raise InvalidValue("Expected `str` or an array of content parts", f"{where}.content")
    return decode_parts(wire.content, f"{where}.content")


def decode_parts(raw: Raw, where: str) -> tuple[Part, ...]:
    raws = decode(raw, list[Raw], where)
    if len(raws) > MAX_PARTS:
        raise InvalidValue(f"{len(raws)} content parts, at most {MAX_PARTS} are accepted", where)
    return tuple(_part(one, f"{where}[{i}]") for i, one in enumerate(raws))


def _part(raw: Raw, where: str) -> Part:
    kind = decode(raw, _ItemHead, where).type
    known = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if known is not None:
        return decode(raw, known, where)
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        raise UnsupportedValue(f"content of type '{kind}' is not supported by this model; accepted: {_ACCEPTED_PARTS}", where)
    got = f"'{kind[:64]}'" if isinstance(kind, str) else f"`{kind_of(kind)}`"
    raise InvalidValue(f"unknown content type {got}; accepted: {_ACCEPTED_PARTS}", f"{where}.type")


def _tool_output(raw: Raw, where: str) -> tuple[str | tuple[Part, ...], bool | UnsetType]:
    head = bytes(memoryview(raw)[:1])
    if head == b'"':
        return decode(raw, str, where), UNSET
    if head == b"[":
        return decode_parts(raw, where), UNSET
    if head == b"{":
        result = decode(raw, _McpResult, where)
        parts = tuple(_part(one, f"{where}.content[{i}]") for i, one in enumerate(result.content))
        return parts, result.isError
    raise InvalidValue("Expected `str`, an array of content parts or an MCP result with `content`", where)


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_tools(raws: list[Raw] | None) -> tuple[tuple[Tool, ...], tuple[IgnoredTool, ...], tuple[Raw, ...]]:
    """Tools to show, tools that were left out, and all of them as they are echoed. Raises InvalidValue."""
    tools: list[Tool] = []
    ignored: list[IgnoredTool] = []
    echo: list[Raw] = []
    if raws is None:
        return (), (), ()
    if len(raws) > MAX_TOOLS:
        raise InvalidValue(f"{len(raws)} tools, at most {MAX_TOOLS} are accepted", "tools")
    names: set[str] = set()
    for i, raw in enumerate(raws):
        tool = _tool(raw, f"tools[{i}]")
        if isinstance(tool, IgnoredTool):
            ignored.append(tool)
        else:
            if tool.name in names:
                raise InvalidValue("a second tool of this name", f"tools[{i}].name")
            names.add(tool.name)
            tools.append(tool)
        echo.append(raw if isinstance(tool, IgnoredTool) else Raw(msgspec.json.encode(tool)))
    return tuple(tools), tuple(ignored), tuple(echo)


def _tool(raw: Raw, where: str) -> Tool | IgnoredTool:
    head = decode(raw, _ToolHead, where)
    if head.inputSchema is not UNSET and head.type in (None, "function"):
        mcp = decode(raw, _McpTool, where)
        _check_depth(mcp.inputSchema, f"{where}.inputSchema")
        return _named(FunctionTool(name=mcp.name, description=mcp.description, parameters=mcp.inputSchema), where)
    if head.type == "function":
        nested = head.name is None and isinstance(head.function, Raw)
        body, at = (head.function, f"{where}.function") if nested else (raw, where)
        assert isinstance(body, Raw)
        tool = decode(body, FunctionTool, at)
        _check_depth(tool.parameters, f"{at}.parameters")
        return _named(tool, at)
    if head.type == "custom":
        if head.name is None and isinstance(head.custom, Raw):
            return _named(decode(head.custom, CustomTool, f"{where}.custom"), f"{where}.custom")
        return _named(decode(raw, CustomTool, where), where)
    if isinstance(head.type, str):
        return IgnoredTool(head.type[:64], head.name[:128] if isinstance(head.name, str) else None)
    raise InvalidValue("Expected a `type`, or an MCP description with `name` and `inputSchema`", f"{where}.type")


def _named(tool: FunctionTool | CustomTool, where: str) -> Tool:
    if not 1 <= len(tool.name) <= 128 or not tool.name.isprintable():
        odd = next((f" with U+{ord(c):04X}" for c in tool.name if not c.isprintable()), "")
        raise InvalidValue(f"{len(tool.name)} characters{odd}; accepted: 1 to 128 printable ones", f"{where}.name")
    return tool


def _check_depth(value: Any, where: str) -> None:
    if nesting(value, MAX_DEPTH) > MAX_DEPTH:
        raise InvalidValue(f"nested more than {MAX_DEPTH} levels deep", where)


def kind_of(value: Any) -> str:
    """Name of a JSON value's type."""
    names = {type(None): "null", dict: "object", list: "array", str: "str", bool: "bool", int: "int", float: "float"}
    return names.get(type(value), type(value).__name__)
