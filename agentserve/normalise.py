"""What of a context is made the same in every turn, because clients let it change without meaning anything by it.

Off unless asked for, by setting or by turn. Only what stands before the first message of a conversation is touched, that is
instructions, tools and the system and developer messages that begin it; only for the model, and only what a pattern here names:
stored items and everything that is answered stay as they were sent. Pure functions of text; docs/protocol.md has examples.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from agentserve.interfaces import RenderRequest
from agentserve.protocol.items import InputItem, InputText, Message, OutputText, Part, PlainText, Tool
from agentserve.protocol.responses import Normaliser

AnyItem = TypeVar("AnyItem", bound=InputItem)

LONGEST_TEXT = 1 << 20
"""Characters. A longer text stays as it is: patterns are looked for on the thread that serves sockets."""


@dataclass(frozen=True, slots=True)
class Normalisers:
    """Which of them a turn wants. headers: names of the lines that `nonce_header` takes away."""

    names: tuple[Normaliser, ...] = ()
    headers: tuple[str, ...] = ()

    def head(self, instructions: str | None, items: Sequence[AnyItem]) -> tuple[str | None, tuple[AnyItem, ...]]:
        """Instructions and items, with the texts before the first message of a conversation made the same."""
        if "nonce_header" not in self.names and "dates" not in self.names:
            return instructions, tuple(items)
        end = head_length(items)
        shown = None if instructions is None else self._text(instructions)
        return shown, (*(self._shown(item) for item in items[:end]), *items[end:])

    def apply(self, request: RenderRequest) -> tuple[RenderRequest, tuple[Normaliser, ...]]:
        """The context as the model is to see it, and which of them changed something in it, in the order of their work."""
        changed: list[Normaliser] = []
        for name in ORDER:
            if name not in self.names:
                continue
            instructions, items = replace(self, names=(name,)).head(request.instructions, request.items)
            tools = in_order(request.tools) if name == "tool_order" else request.tools
            made = replace(request, instructions=instructions, items=items, tools=tools)
            if made != request:
                changed.append(name)
                request = made
        return request, tuple(changed)

    def _shown(self, item: AnyItem) -> AnyItem:
        assert isinstance(item, Message)
        return msgspec.structs.replace(item, content=tuple(map(self._part, item.content)))

    def _part(self, part: Part) -> Part:
        if not isinstance(part, InputText | OutputText | PlainText):
            return part
        text = self._text(part.text)
        return part if text == part.text else msgspec.structs.replace(part, text=text)

    def _text(self, text: str) -> str:
        if len(text) > LONGEST_TEXT:
            return text
        if "nonce_header" in self.names:
            text = without_headers(text, self.headers)
        return without_times(text) if "dates" in self.names else text


ORDER: tuple[Normaliser, ...] = ("nonce_header", "dates", "tool_order")


def head_length(items: Sequence[InputItem]) -> int:
    """How many system and developer messages begin a context."""
    other = (i for i, item in enumerate(items) if not (isinstance(item, Message) and item.role in ("system", "developer")))
    return next(other, len(items))


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_order(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """By name; what has the same name by everything else. What a tool says of itself stays as it is."""
    return tuple(sorted(tools, key=lambda tool: (tool.name, msgspec.json.encode(tool))))


# ── a header with a nonce ────────────────────────────────────────────────────────────────────────────────────────


def without_headers(text: str, names: tuple[str, ...]) -> str:
    """Without the lines `name: value` that a text begins with, and the empty lines behind them."""
    return _headers(names).sub("", text, count=1) if names else text


@functools.lru_cache(64)
def _headers(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\A(?:(?i:{'|'.join(map(re.escape, names))}):[^\n]*(?:(?:\r?\n)+|\Z))+")


# ── dates ────────────────────────────────────────────────────────────────────────────────────────────────────────

_CLOCK = (
    r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?(?: ?[+-]\d{2}:?\d{2})?)?"  # 9:30, 09:30:01, 09:30:01.123456+01:00
    r"(?: ?[AaPp][Mm]\b)?"
    r"(?: ?(?:Z|UTC|GMT)(?:[+-]\d{2}:?\d{2})?(?: \([A-Za-z ]{1,40}\))?)?"  # Z, UTC, GMT+0100 (Central European Time)
    r"(?![\w:])"
)
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_TIMES = [
    re.compile(rf"(?<![\w./-])({day})(?:{gap}{_CLOCK})")
    for day, gap in (
        (r"\d{4}-\d{2}-\d{2}", r"(?:T|,? )"),  # ISO 8601
        (r"\d{1,2}/\d{1,2}/\d{4}", r",? "),  # toLocaleString()
        (rf"{_MONTH} {{1,2}}\d{{1,2}},? \d{{4}}", r"(?:,| at)? "),  # Date.toString()
        (rf"\d{{1,2}} {_MONTH} \d{{4}}", r"(?:,| at)? "),  # RFC 9110
        (rf"{_MONTH} {{1,2}}\d{{1,2}}", r" (?=\S+(?: [A-Z]{3,5})? \d{4}\b)"),  # asctime(), date(1): the year comes last
    )
]


def without_times(text: str) -> str:
    """Without the time of day behind a date, so that a text is the same for a day.

    To the end: what is left may be a date with a time again, and a text that was folded must not fold further.
    """
    while True:
        folded = text
        for pattern in _TIMES:
            folded = pattern.sub(r"\1", folded)
        if folded == text:
            return text
        text = folded
