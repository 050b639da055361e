"""What a tool-call dialect is: its markers, how a call is written, and how the text of a call becomes deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentserve.interfaces import Delta
from agentserve.protocol.items import CustomTool, Tool


@dataclass(frozen=True, slots=True)
class Markers:
    """Marker texts; an empty one means that the dialect has no such block."""

    think_open: str = "<think>"
    think_close: str = "</think>"
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"


class CallParser(Protocol):
    """Reads the text of one call block, from behind its opening marker. The result does not depend on how it is cut."""

    @property
    def inside_value(self) -> bool:
        """A closing marker spelled as text here would still be part of an argument."""
        ...

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self, closed: bool) -> Sequence[Delta] | None:
        """The block ended (closed) or the stream did. None: it never became a call, and its text is still text.

        A call that was opened and cannot be completed ends without CallClose.
        """
        ...


class Dialect(Protocol):
    """One family of models. name: as in the registry and the configuration. trims: outer white space is the template's."""

    name: str
    markers: Markers
    trims: bool

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The block between the call markers, as chat templates of this family write it."""
        ...

    def call_parser(self, tools: Sequence[Tool]) -> CallParser: ...


def is_custom(name: str, tools: Sequence[Tool]) -> bool:
    """The tool takes free text."""
    return any(isinstance(t, CustomTool) and t.name == name for t in tools)
