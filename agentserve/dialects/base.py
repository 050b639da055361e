"""What a tool-call dialect is: its markers, how a call is written, and how the text of a call becomes deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import Schema
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
    """One family of models. name: as in the registry and the configuration. trims: outer white space is the template's.

    after_thinking: what templates of the family write behind a thinking block. between_blocks: and between two call blocks.
    many_in_block: a block may hold several calls; block_space is then what stands before, between and behind them.
    """

    name: str
    markers: Markers
    trims: bool
    after_thinking: str
    between_blocks: str
    many_in_block: bool
    block_space: tuple[str, str, str]

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The block between the call markers, as chat templates of this family write it."""
        ...

    def call_parser(self, tools: Sequence[Tool]) -> CallParser: ...

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        """Body of the grammar rule of one call with arguments of this schema, as write_call would write it.

        Raises UnsupportedValue if its syntax cannot hold arguments to the schema.
        """
        ...


def is_custom(name: str, tools: Sequence[Tool]) -> bool:
    """The tool takes free text."""
    return any(isinstance(t, CustomTool) and t.name == name for t in tools)
