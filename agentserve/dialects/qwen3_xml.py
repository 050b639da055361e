"""Qwen3-Coder, Qwen3.5, Qwen3.6: `<tool_call><function=N><parameter=K>value</parameter></function></tool_call>`.

Only the outer tag is a token. Values are bare text, so their types come from the tool's JSON schema. A value may contain
`</parameter>`: it ends only where another parameter or the end of the function follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.lark import LarkWriter, literal
from agentserve.constraints.output import Schema
from agentserve.dialects.base import CallParser, Markers, is_custom
from agentserve.dialects.parameters import parameter_rules
from agentserve.dialects.schema import Types, parameter_types, typed_value
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta
from agentserve.protocol.items import Tool

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_CLOSE = "</parameter>"
_FUNCTION_END = "</function>"
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_MAYBE_END = re.compile(r"\n?</parameter>\s*(?:<[^>]*)?\Z")


class Qwen3Xml:
    name = "qwen3_xml"
    markers = Markers()
    trims = True
    after_thinking = "\n\n"
    between_blocks = "\n"
    many_in_block = False
    block_space = ("", "", "")

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        lines = [f"\n<function={name}>\n"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
        lines.append("</function>\n")
        return "".join(lines)

    def call_parser(self, tools: Sequence[Tool]) -> CallParser:
        return XmlCall(tools)

    def call_rule(self, writer: LarkWriter, name: str, schema: Schema) -> str:
        parameters = parameter_rules(
            writer, name, schema, lambda key, string: literal(f"<parameter={key}>\n"), "\n</parameter>\n", (_CLOSE,)
        )
        head = literal(f"\n<function={name}>\n")
        return f"{head} {parameters} {literal('</function>' + chr(10))}"


class XmlCall:
    """Emits the arguments as JSON; string values stream while they are written, others when they are whole."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._held = ""
        self._name: str | None = None
        self._custom = False
        self._types: Mapping[str, Types] = {}
        self._key: str | None = None
        self._streaming = False
        self._count = 0
        self._done = False

    @property
    def inside_value(self) -> bool:
        return self._key is not None and not self._ends_here()

    def _ends_here(self) -> bool:
        return _MAYBE_END.search(self._held) is not None

    def push(self, text: str) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        while self._step(out):
            pass
        return out

    def _step(self, out: list[Delta]) -> bool:
        """Take one element off the held text; False if more text is needed."""
        if self._done:
            self._held = ""
            return False
        if self._key is not None:
            return self._value(out)
        if self._name is None:
            match = _FUNCTION.search(self._held)
            if match is None:
                return False
            name = match[1].strip()
            self._name = name
            self._custom = is_custom(name, self._tools)
            self._types = parameter_types(name, self._tools)
            out.append(CallOpen(name, self._custom))
            self._held = self._held[match.end() :]
            return True
        parameter = _PARAMETER.search(self._held)
        end = self._held.find(_FUNCTION_END)
        if end >= 0 and (parameter is None or end < parameter.start()):
            self._close(out)
            return False
        if parameter is None or (parameter.end() == len(self._held) and not parameter[0].endswith("\n")):
            return False  # the line break behind the tag may still come
        self._begin(parameter[1].strip(), out)
        self._held = self._held[parameter.end() :]
        return True

    def _begin(self, key: str, out: list[Delta]) -> None:
        self._key = key
        types = self._types.get(key)
        self._streaming = types is None or types == {"string"}
        lead = "{" if self._count == 0 else ", "
        self._count += 1
        if not self._custom:
            opening = '"' if self._streaming else ""
            out.append(CallDelta(f"{lead}{json.dumps(key, ensure_ascii=False)}: {opening}"))

    def _value(self, out: list[Delta]) -> bool:
        match = _VALUE_END.search(self._held) if _CLOSE in self._held else None
        if match is not None:
            self._end_value(self._held[: match.start()], out)
            self._held = self._held[match.end() :]
            return True
        if self._streaming:
            ready = self._held[: _safe_length(self._held)]
            self._held = self._held[len(ready) :]
            self._send(ready, out)
        return False

    def _send(self, text: str, out: list[Delta]) -> None:
        if text:
            out.append(CallDelta(text if self._custom else json.dumps(text, ensure_ascii=False)[1:-1]))

    def _end_value(self, rest: str, out: list[Delta]) -> None:
        assert self._key is not None
        if self._streaming:
            self._send(rest, out)
            if not self._custom:
                out.append(CallDelta('"'))
        else:
            value = typed_value(rest, self._types.get(self._key))
            out.append(CallDelta(json.dumps(value, ensure_ascii=False)))
        self._key = None

    def _close(self, out: list[Delta]) -> None:
        self._done = True
        self._held = ""
        if not self._custom:
            out.append(CallDelta("}" if self._count else "{}"))
        out.append(CallClose())

    def finish(self, closed: bool) -> list[Delta] | None:
        if self._name is None:
            return None
        out: list[Delta] = []
        if self._done:
            return out
        if self._key is not None:
            # The block ended in a value: a closing tag at its very end was meant, else the value was cut.
            match = _MAYBE_END.search(self._held)
            whole = match is not None and match[0].rstrip().endswith(_CLOSE)
            if whole or closed:
                self._end_value(self._held[: match.start()] if match is not None else self._held, out)
            else:
                if self._streaming:
                    self._send(self._held, out)
                return out
        if closed:
            self._close(out)
        return out


def _safe_length(text: str) -> int:
    """Characters that cannot belong to the end of the value, whatever follows."""
    match = _MAYBE_END.search(text)
    if match is not None:
        return match.start()
    closing = "\n" + _CLOSE
    for size in range(min(len(text), len(closing)), 0, -1):
        if text.endswith(closing[:size]):
            return len(text) - size
    for size in range(min(len(text), len(_CLOSE)), 0, -1):
        if text.endswith(_CLOSE[:size]):
            return len(text) - size
    return len(text)
