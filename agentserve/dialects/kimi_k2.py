"""Kimi K2: a section of calls, each with an id that holds the name (`functions.NAME:INDEX`) and its arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Dialect, Markers, Piece, Spell
from agentserve.dialects.headed import Head, HeadedCalls
from agentserve.protocol.items import Tool

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"\s*(?:functions\.)?(?P<name>.+?)(?::\d+)?\s*", re.DOTALL)


class KimiK2(Dialect):
    name = "kimi_k2"
    markers = Markers(
        call_open="<|tool_calls_section_begin|>",
        call_close="<|tool_calls_section_end|>",
        inner=(_BEGIN, _ARGUMENTS, _END),
    )
    after_thinking = ""
    between_blocks = ""
    many_in_block = True
    turn_ends = ("<|im_end|>",)

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        text = json.dumps(arguments, ensure_ascii=False)
        head = Piece(f"functions.{name}:{index}")
        return [Piece(_BEGIN, True), head, Piece(_ARGUMENTS, True), Piece(text), Piece(_END, True)]

    def template_call_id(self, name: str, call_id: str, index: int) -> str:
        """Templates of this family write the id in the place of the name."""
        return f"functions.{name}:{index}"

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        return HeadedCalls(Head(spell(_BEGIN), spell(_ARGUMENTS), _name), tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        index = writer.terminal("/[0-9]{1,3}/")
        head = f"{writer.tag(_BEGIN + 'functions.' + name + ':')} {index} {writer.tag(_ARGUMENTS)}"
        return f"{head} {writer.json(schema)} {writer.tag(_END)}"


def _name(head: str) -> str:
    match = _ID.fullmatch(head)
    return match["name"] if match else ""
