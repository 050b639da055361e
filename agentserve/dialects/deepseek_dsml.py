"""DeepSeek V3.2 and V4: calls in DSML, whose tags all hold the token `｜DSML｜`.

`<｜DSML｜function_calls>`, in it `<｜DSML｜invoke name="N">`, in that
`<｜DSML｜parameter name="K" string="true">V</｜DSML｜parameter>`; V4 calls the block `tool_calls`. `string` says whether the
value is bare text or JSON.
"""

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

_D = "｜DSML｜"
_END = "<｜end▁of▁sentence｜>"


class DeepSeekDsml(Dialect):
    name = "deepseek_dsml"
    markers = Markers(call_open=f"<{_D}function_calls>", call_close=f"</{_D}function_calls>", inner=(_D,))
    after_thinking = ""
    between_blocks = "\n\n"
    many_in_block = True
    block_space = ("\n", "\n", "\n")
    turn_ends = (_END,)

    def write_call(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> list[Piece]:
        pieces = [Piece(f'<{_D}invoke name="{name}">\n', True)]
        for key, value in arguments.items():
            pieces += [Piece(_opening(key, isinstance(value, str)), True), Piece(value_text(value))]
            pieces.append(Piece(f"</{_D}parameter>\n", True))
        return [*pieces, Piece(f"</{_D}invoke>", True)]

    def call_parser(self, tools: Sequence[Tool], spell: Spell) -> CallParser:
        d = re.escape(spell(_D))
        tags = Tags(
            begin=rf'<{d}invoke name="(?P<name>[^"\n]+)">',
            begin_start=spell(f'<{_D}invoke name="'),
            end=spell(f"</{_D}invoke>"),
            parameter=rf'<{d}parameter name="(?P<key>[^"\n]+)"(?: string="(?P<string>true|false)")?>',
            parameter_start=spell(f'<{_D}parameter name="'),
            close=spell(f"</{_D}parameter>"),
        )
        return TaggedCalls(tags, tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        tags = ParameterTags(_opening, f"</{_D}parameter>\n", f"</{_D}parameter>", tells=True)
        head, end = writer.tag(f'<{_D}invoke name="{name}">\n'), writer.tag(f"</{_D}invoke>")
        return f"{head} {parameter_rules(writer, name, schema, tags)} {end}"


class DeepSeekDsmlV4(DeepSeekDsml):
    name = "deepseek_dsml_v4"
    markers = Markers(call_open=f"<{_D}tool_calls>", call_close=f"</{_D}tool_calls>", inner=(_D,))


def _opening(key: str, string: bool) -> str:
    return f'<{_D}parameter name="{key}" string="{"true" if string else "false"}">'
