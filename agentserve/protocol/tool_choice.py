"""`tool_choice` of a create body → what it means."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from agentserve.errors import InvalidValue, UnsupportedValue
from agentserve.protocol.decode import kind_of

ACCEPTED = "accepted: auto, none, required, a named function or custom tool, allowed_tools"


class ToolChoice(Struct, frozen=True):
    """names: the tools that may be called, None = all of them."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None


def tool_choice(value: Any) -> ToolChoice:
    """None means auto. Raises InvalidValue, UnsupportedValue."""
    if value is None:
        return ToolChoice()
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    if isinstance(value, str):
        raise InvalidValue(f"got '{value[:64]}'; {ACCEPTED}", "tool_choice")
    if not isinstance(value, dict):
        raise InvalidValue(f"Expected `str` or an object, got `{kind_of(value)}`; {ACCEPTED}", "tool_choice")
    if value.get("type") == "allowed_tools":
        return _allowed(value)
    return ToolChoice("required", (_name(value, "tool_choice"),))


def _allowed(value: dict[str, Any]) -> ToolChoice:
    """Chat Completions has the members one level deeper."""
    inner = value.get("allowed_tools")
    body = inner if isinstance(inner, dict) else value
    mode, tools = body.get("mode", "auto"), body.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidValue("accepted: auto, required", "tool_choice.mode")
    if not isinstance(tools, list) or not tools:
        raise InvalidValue("Expected a non-empty `array` of tools", "tool_choice.tools")
    names = tuple(_name(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools))
    return ToolChoice(mode, names)


def _name(tool: Any, where: str) -> str:
    if not isinstance(tool, dict):
        raise InvalidValue(f"Expected `object`, got `{kind_of(tool)}`", where)
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        shown = kind[:64] if isinstance(kind, str) else kind_of(kind)
        raise UnsupportedValue(f"'{shown}' is not supported; accepted: function, custom", f"{where}.type")
    inner = tool.get(kind)
    name = tool.get("name", inner.get("name") if isinstance(inner, dict) else None)
    if not isinstance(name, str):
        raise InvalidValue("Expected `str`", f"{where}.name")
    return name
