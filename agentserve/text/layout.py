"""Template output → units: control tokens and stretches of text between them, each with the item that it belongs to.

No token ids of text here; renderer.py encodes the stretches or replaces them by what was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentserve.text.messages import ChatMessage
from agentserve.text.opaque import BREAK, SENTINEL, Content, ContentTable
from agentserve.text.tokenizer import Marker, Tokenizer

NO_ITEM = -1
"""Owner of instructions and tools."""
AFTER_ITEMS = 1 << 40
"""Owner of the generation prompt."""

MessageOf = Callable[[Content], int]


@dataclass(slots=True)
class Unit:
    """marker: a control token, or None for a stretch of text. item: owner, NO_ITEM for instructions and tools.

    message: index of the template message, −1 before the first content. contents: what came from outside in this stretch.
    assistant: inside an assistant message. ends_header: its header ends here. ends: role of the message that ends here.
    """

    marker: Marker | None
    text: str
    contents: tuple[Content, ...] = ()
    item: int = NO_ITEM
    message: int = -1
    assistant: bool = False
    ends_header: bool = False
    ends: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant turn in history: units [start, end) from behind its header to before its end marker. items: of the turn."""

    start: int
    end: int
    items: tuple[int, ...]


@dataclass(slots=True)
class Layout:
    """units in order; turns in order; prompt: first unit after the header of the generation prompt, None without one."""

    units: list[Unit]
    turns: list[Turn] = field(default_factory=list)
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the layout must know of model and template. header: see probe.Traits.

    turn_end: texts of markers that end a turn. closers: those and the closing markers of blocks.
    """

    header: str
    turn_end: frozenset[str]
    closers: frozenset[str]


class LayoutBuilder:
    """Reads template outputs of one model."""

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar) -> None:
        self._markers = tokenizer.markers
        self._grammar = grammar
        texts = sorted(tokenizer.markers, key=len, reverse=True)
        self._pattern = re.compile("|".join([SENTINEL.pattern, *map(re.escape, texts)]))

    def build(self, output: str, messages: Sequence[ChatMessage], table: ContentTable, *, prompt: bool) -> Layout:
        """output: what the template wrote. prompt: it ends with a generation prompt."""
        owner = {item: i for i, message in enumerate(messages) for item in message.items}
        system = 0 if messages and messages[0].role == "system" else -1

        def message_of(content: Content) -> int:
            return owner.get(content.item, system)

        output, answer = self._break_after_headers(output, messages, table, message_of, prompt)
        layout = Layout(self._split(output, table, message_of))
        units = layout.units
        end = self._assign(units, [m.role for m in messages])
        if prompt:
            for unit in units[end:]:
                unit.item, unit.message, unit.assistant = AFTER_ITEMS, len(messages), True
        if answer:
            layout.prompt = next(i + 1 for i in range(len(units) - 1, -1, -1) if units[i].ends_header)
        self._find_turns(layout, messages)
        return layout

    def _break_after_headers(
        self, output: str, messages: Sequence[ChatMessage], table: ContentTable, message_of: MessageOf, prompt: bool
    ) -> tuple[str, bool]:
        """Put a BREAK behind the header of each assistant turn. Also says whether the generation prompt has one."""
        header = self._grammar.header
        if not header:
            return output, False
        places: list[int] = []
        last_end, last_message = 0, -2
        for match in SENTINEL.finditer(output):
            message = message_of(table[match[0]])
            if message != last_message and message >= 0 and messages[message].role == "assistant":
                at = output.rfind(header, last_end, match.start())
                if at >= 0:
                    places.append(at + len(header))
            last_end, last_message = match.end(), message
        at = output.rfind(header, last_end) if prompt else -1
        if at >= 0:
            places.append(at + len(header))
        answer = at >= 0
        pieces: list[str] = []
        at = 0
        for place in places:
            pieces += [output[at:place], BREAK]
            at = place
        pieces.append(output[at:])
        return "".join(pieces), answer

    def _split(self, output: str, table: ContentTable, message_of: MessageOf) -> list[Unit]:
        units: list[Unit] = []
        parts: list[str] = []
        contents: list[Content] = []
        after_content = 0
        at = 0
        swallow = False

        def literal(text: str) -> None:
            nonlocal swallow
            if swallow:
                text = text.lstrip()
                swallow = not text
            if text:
                parts.append(text)

        def flush(keep_from: int | None = None) -> None:
            nonlocal after_content
            cut = len(parts) if keep_from is None else keep_from
            text = "".join(parts[:cut])
            message = message_of(contents[0]) if contents else -1
            item = contents[0].item if contents else NO_ITEM
            units.append(Unit(None, text, tuple(contents), item, message))
            del parts[:cut]
            contents.clear()
            after_content = 0

        for match in self._pattern.finditer(output):
            literal(output[at : match.start()])
            at = match.end()
            token = match[0]
            if token == BREAK:
                flush()
                units[-1].ends_header = True
                continue
            marker = self._markers.get(token)
            if marker is None:
                content = table[token]
                if contents and contents[-1].item != content.item:
                    flush(after_content)
                swallow = False
                parts.append(content.text)
                contents.append(content)
                after_content = len(parts)
                continue
            if marker.lstrip and parts and len(parts) > after_content:
                parts[-1] = parts[-1].rstrip()
            flush()
            units.append(Unit(marker, marker.text))
            swallow = marker.rstrip
        literal(output[at:])
        flush()
        return units

    def _closes(self, unit: Unit) -> bool:
        return unit.marker is not None and (unit.text in self._grammar.closers or unit.text.startswith("</"))

    def _assign(self, units: list[Unit], roles: Sequence[str]) -> int:
        """Give units without contents to the item before them as long as they close it, else to the item after them.

        Returns the unit index behind the last item.
        """
        filled = [i for i, u in enumerate(units) if u.contents]
        if not filled:
            return 0

        def give(run: range, source: Unit) -> None:
            for i in run:
                units[i].item, units[i].message = source.item, source.message
                units[i].assistant = source.message >= 0 and roles[source.message] == "assistant"

        def end_message(border: int, source: Unit) -> None:
            units[border - 1].ends = roles[source.message] if source.message >= 0 else "system"

        first = filled[0]
        start = next((i + 1 for i in range(first - 1, -1, -1) if self._ends_turn(units[i])), 0)
        give(range(start, first + 1), units[first])
        if start:
            units[start - 1].ends = "system"
        border = len(units)
        for a, b in zip(filled, [*filled[1:], len(units)], strict=True):
            here = units[a]
            last = b == len(units)
            border = b if not last and units[b].item == here.item else self._border(units, a, b)
            give(range(a, border), here)
            if not last:
                give(range(border, b), units[b])
            if last or units[b].message != here.message:
                end_message(border, here)
        return border

    def _border(self, units: list[Unit], a: int, stop: int) -> int:
        """First unit in (a, stop] that opens something new: behind the end of the turn, else behind what closes a block."""
        for i in range(a + 1, stop):
            if self._ends_turn(units[i]):
                return i + 1
        border = a + 1
        for i in range(a + 1, stop):
            if units[i].marker is None:
                if units[i].text.strip():
                    break
                continue
            if not self._closes(units[i]):
                break
            border = i + 1
        return border

    def _ends_turn(self, unit: Unit) -> bool:
        return unit.marker is not None and unit.text in self._grammar.turn_end

    def _find_turns(self, layout: Layout, messages: Sequence[ChatMessage]) -> None:
        units = layout.units
        if not self._grammar.header:
            return
        i = 0
        while i < len(units):
            message = units[i].message
            if not 0 <= message < len(messages) or messages[message].role != "assistant":
                i += 1
                continue
            last = message
            while last + 1 < len(messages) and messages[last + 1].role == "assistant":
                last += 1
            stop = i
            while stop < len(units) and message <= units[stop].message <= last:
                stop += 1
            start = self._behind_header(units, i, stop)
            end = next((k for k in range(stop - 1, i - 1, -1) if self._ends_turn(units[k])), stop)
            if start is not None and start <= end:
                items = tuple(k for m in messages[message : last + 1] for k in m.items)
                layout.turns.append(Turn(start, end, items))
            i = stop

    def _behind_header(self, units: list[Unit], start: int, stop: int) -> int | None:
        for i in range(start, stop):
            if units[i].contents:
                return None
            if units[i].ends_header:
                return i + 1
        return None
