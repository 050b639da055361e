"""MiniMax M2: `<minimax:tool_call><invoke name="N"><parameter name="K">V</parameter></invoke></minimax:tool_call>`.

Only the outer tags are tokens; a block may hold several invocations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter, literal
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Dialect, Markers, Piece, Spell
from agentserve.dialects.parameters import ParameterTags, parameter_rules, value_text
from agentserve.dialects.tagged import TaggedCalls, Tags
from agentserve.protocol.items import Tool

_TAGS = Tags(
    begin=r'<invoke name="(?P<name>[^"\n]+)">',
    begin_start='<invoke name="',
    end="</invoke>",
    parameter=r'<parameter name="(?P<key>[^"\n]+)">',
    parameter_start='<parameter name="',
    close="</parameter>",
)


class MiniMax(Dialect):
    name = "minimax"
    markers = Markers(call_open="<minimax:tool_call>", call_close="</minimax:tool_call>")
    many_in_block = True
    block_space = ("\n", "\n", "\n")
    turn_ends = ("[e~[",)

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        pieces = [Piece(f'<invoke name="{name}">\n')]
        for key, value in arguments.items():
            pieces.append(Piece(f'<parameter name="{key}">{value_text(value)}</parameter>\n'))
        return [*pieces, Piece("</invoke>")]

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        return TaggedCalls(_TAGS, tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        tags = ParameterTags(lambda key, string: f'<parameter name="{key}">', "</parameter>\n", "</parameter>")
        head = f'<invoke name="{name}">\n'
        return f"{literal(head)} {parameter_rules(writer, name, schema, tags)} {literal('</invoke>')}"
