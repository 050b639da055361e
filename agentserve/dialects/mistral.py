"""Mistral (tokenizer v11 and later): `[TOOL_CALLS]NAME[ARGS]{…}`, one block for each call, thinking in `[THINK]`.

Some write `[CALL_ID]id` before the arguments; older ones `[TOOL_CALLS][{"name": …, "arguments": …}]`. Both are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Dialect, Markers, Piece, Spell
from agentserve.dialects.headed import Head, HeadedCalls
from agentserve.protocol.items import Tool

_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class Mistral(Dialect):
    name = "mistral"
    markers = Markers("[THINK]", "[/THINK]", "[TOOL_CALLS]", "", (_ARGS, _CALL_ID))
    after_thinking = ""
    between_blocks = ""
    turn_ends = ("</s>",)

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        return [Piece(name), Piece(_ARGS, True), Piece(json.dumps(arguments, ensure_ascii=False))]

    def template_call_id(self, name: str, call_id: str, index: int) -> str:
        """Templates of this family take ids of nine letters and digits only."""
        return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        head = Head("", spell(_ARGS), lambda text: text.split(spell(_CALL_ID))[0].strip(), single=True)
        return HeadedCalls(head, tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        return f"{writer.tag(name + _ARGS)} {writer.json(schema)}"
