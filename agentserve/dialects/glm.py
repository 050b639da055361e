"""GLM-4.5 and later: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`; each of the tags is a token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Dialect, Markers, Piece, Spell
from agentserve.dialects.parameters import ParameterTags, parameter_rules, value_text
from agentserve.dialects.tagged import TaggedCalls, Tags
from agentserve.protocol.items import Tool

_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm(Dialect):
    name = "glm"
    markers = Markers(inner=(_KEY, _END_KEY, _VALUE, _END_VALUE))
    after_thinking = "\n"
    turn_ends = ("<|user|>", "<|observation|>", "<|endoftext|>")

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        pieces = [Piece(f"{name}\n")]
        for key, value in arguments.items():
            pieces += [Piece(_KEY, True), Piece(key), Piece(f"{_END_KEY}\n{_VALUE}", True), Piece(value_text(value))]
            pieces.append(Piece(f"{_END_VALUE}\n", True))
        return pieces

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        key, end_key, value = (re.escape(spell(text)) for text in (_KEY, _END_KEY, _VALUE))
        tags = Tags(
            begin=rf"\A\s*(?P<name>[^\n<{key[:1]}]+?)\s*(?={key})",
            begin_start="",
            end="",
            parameter=rf"{key}(?P<key>.*?){end_key}\s*{value}",
            parameter_start=spell(_KEY),
            partial=rf"{key}(?:(?!{end_key}).)*(?:{end_key}\s*[^>\n]*)?",
            close=spell(_END_VALUE),
            bare_name=True,
        )
        return TaggedCalls(tags, tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        tags = ParameterTags(lambda key, string: f"{_KEY}{key}{_END_KEY}\n{_VALUE}", f"{_END_VALUE}\n", _END_VALUE)
        return f"{writer.tag(name + chr(10))} {parameter_rules(writer, name, schema, tags)}"
