"""DeepSeek V3.1: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>`.

V3 and R1 write `function` before the separator, and the name with the arguments in a fenced block behind it; that is read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Dialect, Markers, Piece, Spell
from agentserve.dialects.headed import Head, HeadedCalls
from agentserve.protocol.items import Tool

_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV3(Dialect):
    name = "deepseek_v3"
    markers = Markers(call_open="<｜tool▁calls▁begin｜>", call_close="<｜tool▁calls▁end｜>", inner=(_BEGIN, _SEP, _END))
    after_thinking = ""
    between_blocks = ""
    many_in_block = True
    turn_ends = ("<｜end▁of▁sentence｜>",)

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        text = json.dumps(arguments, ensure_ascii=False)
        return [Piece(_BEGIN, True), Piece(name), Piece(_SEP, True), Piece(text), Piece(_END, True)]

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        return HeadedCalls(Head(spell(_BEGIN), spell(_SEP), _name), tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        return f"{writer.tag(_BEGIN + name + _SEP)} {writer.json(schema)} {writer.tag(_END)}"


def _name(head: str) -> str:
    return "" if head.strip() == "function" else head.strip()
