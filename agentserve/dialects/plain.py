"""Models without tools: thinking and text only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Markers
from agentserve.protocol.items import Tool


class Plain:
    name = "plain"
    markers = Markers(call_open="", call_close="")
    trims = False
    after_thinking = ""
    between_blocks = ""
    many_in_block = False
    block_space = ("", "", "")

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise NotImplementedError("this dialect has no tool calls")

    def call_parser(self, tools: Sequence[Tool]) -> CallParser:
        raise NotImplementedError("this dialect has no tool calls")

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        raise NotImplementedError("this dialect has no tool calls")
