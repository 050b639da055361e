"""What a tool-call dialect is: its markers, how a call is written, and how the text of calls becomes deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import OutputRule, Schema
from agentserve.dialects.grammar import Thinking, answer_grammar
from agentserve.interfaces import Delta
from agentserve.protocol.items import CustomTool, Tool

Spell = Callable[[str], str]
"""Text of a tag → how it looks in what parsers read: each marker in it that is a token is one character that no text has."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Marker texts; an empty one means that the dialect has no such block.

    call_close empty: a block of calls ends where the next begins, or where its parser says so. inner: markers in other places,
    which may be tokens of their own.
    """

    think_open: str = "<think>"
    think_close: str = "</think>"
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    inner: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        outer = (self.think_open, self.think_close, self.call_open, self.call_close)
        return tuple(text for text in (*outer, *self.inner) if text)


class Piece(NamedTuple):
    """Part of what a model writes. tag: written by the dialect, so that markers in it are control tokens; else it is text."""

    text: str
    tag: bool = False


class CallParser(Protocol):
    """Reads the text of one block of calls, from behind its opening marker. The result does not depend on how it is cut."""

    @property
    def inside_value(self) -> bool:
        """A closing marker spelled as text here would still be part of an argument."""
        ...

    @property
    def done(self) -> bool:
        """Nothing more can belong to the block; looked at only where blocks have no closing marker."""
        ...

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self, closed: bool) -> Sequence[Delta] | None:
        """The block ended (closed) or the stream did. None: it never became a call, and its text is still text.

        A call that was opened and cannot be completed ends without CallClose.
        """
        ...


class StreamState(Protocol):
    """Reads a whole answer: text in which markers that are tokens are single characters (see Spell)."""

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]: ...


class Dialect:
    """One family of models. Subclasses say what differs; what is here fits those that write calls between two markers.

    name: as in the registry and the configuration. trims: outer white space is the template's. after_thinking: what
    templates of the family write behind a thinking block. between_blocks: and between two blocks of calls.
    many_in_block: a block may hold several calls; block_space is then what stands before, between and behind them.
    turn_ends: markers that end an answer, None = found out from the template. one_call: an answer has at most one call.
    """

    name: str
    markers = Markers()
    trims = True
    after_thinking = "\n\n"
    between_blocks = "\n"
    many_in_block = False
    block_space = ("", "", "")
    turn_ends: tuple[str, ...] | None = None
    one_call = False

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        """The inside of a block with this one call, as templates of this family write it. index: of the call in its turn."""
        raise NotImplementedError("this dialect has no tool calls")

    def template_call_id(self, name: str, call_id: str, index: int) -> str:
        """What the chat template is given as a call's id. name: opaque. index: of the call in the whole context."""
        return call_id

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        raise NotImplementedError("this dialect has no tool calls")

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        """Body of the grammar rule of one call with arguments of this schema, as write_call would write it.

        Raises UnsupportedValue if its syntax cannot hold arguments to the schema.
        """
        raise NotImplementedError("this dialect has no tool calls")

    def stream_state(self, tools: Sequence[Tool], spell: Spell, *, literal: bool) -> StreamState | None:
        """A reader of whole answers, for dialects that are not made of blocks; None for the others."""
        return None

    def write_answer(self, reasoning: str, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Piece]:
        """What the model writes, without the end of the turn. reasoning and text may be empty."""
        m = self.markers
        out: list[Piece] = []
        if reasoning and m.think_open:
            out += [Piece(m.think_open, True), Piece(reasoning), Piece(m.think_close, True), Piece(self.after_thinking)]
        out.append(Piece(text))
        bodies = [self.write_call(name, arguments, i) for i, (name, arguments) in enumerate(calls)]
        if self.many_in_block and bodies:
            before, between, behind = (Piece(space, True) for space in self.block_space)
            inside = [piece for body in bodies for piece in (between, *body)][1:]
            bodies = [[before, *inside, behind]]
        for i, body in enumerate(bodies):
            glue = [Piece(self.between_blocks)] if i or text else []
            out += [*glue, Piece(m.call_open, True), *body, Piece(m.call_close, True)]
        return [piece for piece in out if piece.text]

    def answer_grammar(self, rule: OutputRule, writer: LarkWriter, thinking: Thinking) -> str:
        """Grammar of a whole answer. Raises UnsupportedValue."""
        return answer_grammar(self, rule, writer, thinking)


def is_custom(name: str, tools: Sequence[Tool]) -> bool:
    """The tool takes free text."""
    return any(isinstance(t, CustomTool) and t.name == name for t in tools)
