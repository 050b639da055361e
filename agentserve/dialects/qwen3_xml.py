"""Qwen3-Coder, Qwen3.5, Qwen3.6: `<tool_call><function=N><parameter=K>value</parameter></function></tool_call>`.

Only the outer tag is a token. Values are bare text, so their types come from the tool's JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter, literal
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Dialect, Piece, Spell
from agentserve.dialects.parameters import ParameterTags, parameter_rules, value_text
from agentserve.dialects.tagged import TaggedCalls, Tags
from agentserve.protocol.items import Tool

_TAGS = Tags(
    begin=r"<function=(?P<name>[^>\n]+)>",
    begin_start="<function=",
    end="</function>",
    parameter=r"<parameter=(?P<key>[^>\n]+)>",
    parameter_start="<parameter=",
    close="</parameter>",
    padded=True,
)


class Qwen3Xml(Dialect):
    name = "qwen3_xml"

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        pieces = [Piece(f"\n<function={name}>\n")]
        for key, value in arguments.items():
            pieces.append(Piece(f"<parameter={key}>\n{value_text(value)}\n</parameter>\n"))
        return [*pieces, Piece("</function>\n")]

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        return TaggedCalls(_TAGS, tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        tags = ParameterTags(lambda key, string: f"<parameter={key}>\n", "\n</parameter>\n", "</parameter>")
        parameters = parameter_rules(writer, name, schema, tags)
        head, end = f"\n<function={name}>\n", "</function>\n"
        return f"{literal(head)} {parameters} {literal(end)}"
