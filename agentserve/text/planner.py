"""A request → a plan: the template's output laid out in units, and for each assistant turn the key of what was sampled there.

No ids of text are made here; renderer.py does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from agentserve.dialects.base import Dialect
from agentserve.interfaces import RenderRequest
from agentserve.kept import Kept
from agentserve.protocol.items import CustomToolCall, FunctionCall, InputText, Item, Message, encode_items
from agentserve.text.aliases import call_claim, turn_key
from agentserve.text.errors import TemplateError
from agentserve.text.layout import Grammar, Layout, LayoutBuilder, Turn, Unit
from agentserve.text.messages import MessageBuilder, call_arguments, tool_documents
from agentserve.text.opaque import ContentTable, Document
from agentserve.text.probe import Traits
from agentserve.text.template import ChatTemplate
from agentserve.text.tokenizer import Tokenizer
from agentserve.text.tool_forms import ToolForms
from statecache.types import MarkerTable

OWN_TURN_BYTES = 32 << 20
"""Of assistant turns whose own layout is remembered."""
UNIT_BYTES = 300
"""What a unit takes beside its text, with its one content."""


@dataclass(slots=True)
class Plan:
    """A context laid out. turn_keys: alias key of each turn, parallel to layout.turns."""

    layout: Layout
    turn_keys: list[bytes] = field(default_factory=list)


class Planner:
    """Plans contexts of one model. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, traits: Traits, dialect: Dialect, markers: MarkerTable
    ) -> None:
        self.template = template
        self.traits = traits
        self._dialect = dialect
        ends = {tokenizer.marker_by_id[i].text for i in markers.turn_end if i in tokenizer.marker_by_id}
        closers = (ends | {dialect.markers.think_close, dialect.markers.call_close}) - {""}
        self._builder = LayoutBuilder(tokenizer, Grammar(traits.header, frozenset(ends), frozenset(closers)))
        self.whole_blocks = bool(dialect.markers.inner) or dialect.many_in_block
        """A block of calls is more than one stretch for each call, so that no stretch in it stands for a call."""
        self.many_in_block = dialect.many_in_block
        self._call_open = frozenset(markers.call_open)
        self._call_close = frozenset(markers.call_close)
        self._tool_forms = ToolForms()
        self._own: Kept[bytes, list[Unit]] = Kept(OWN_TURN_BYTES)
        self.caches: Mapping[str, Kept[Any, Any]] = {"tools": self._tool_forms.kept, "turns": self._own}

    def plan(self, request: RenderRequest, *, prompt: bool) -> Plan:
        """Lay a context out. prompt: with the generation prompt. Raises TemplateError."""
        layout = self._layout(request, prompt=prompt)
        if request.retain == "all":
            layout = self._with_own_turns(layout, request)
        keys = [self.key_of(layout.units[t.start : t.end], request.items, request.salt) for t in layout.turns]
        return Plan(layout, keys)

    def _layout(self, request: RenderRequest, *, prompt: bool) -> Layout:
        table = ContentTable()
        builder = MessageBuilder(
            table, self.traits.habits, place_all=request.retain == "all", call_id=self._dialect.template_call_id
        )
        messages = builder.build(request.instructions, request.items)
        if not messages:
            raise TemplateError("a context without instructions and input has nothing to render")
        if not self.traits.calls and (request.tools or any(m.calls or m.role == "tool" for m in messages)):
            raise TemplateError("the chat template of this model knows no tools")
        declared = tool_documents(self._tool_forms.first(request.tools, request.salt))
        tools = [Document(t, table, -1, "tools") for t in declared]
        arguments: dict[str, Any] = {}
        if self.traits.thinking_switch:
            arguments[self.traits.thinking_switch] = request.thinking
        rows = [m.to_template(self.traits.habits.thinking_key) for m in messages]
        output = self.template.run(rows, tools, table, prompt=prompt, arguments=arguments)
        return self._builder.build(output, messages, table, prompt=prompt)

    def own_turn(self, items: Sequence[Item], thinking: bool = True) -> list[Unit] | None:
        """Units of an assistant turn as the template writes the newest one, with all that was generated still in it.

        Item indices count from 0 in `items`. None if the template has no recognisable turn header.
        """
        key = xxhash.xxh3_128_digest(encode_items(tuple(items)) + bytes([thinking]))
        known = self._own.get(key)
        if known is not None:
            return known
        user = Message(role="user", content=(InputText("u"),))
        request = RenderRequest(instructions=None, tools=(), items=(user, *items), thinking=thinking)
        layout = self._layout(request, prompt=False)
        if len(layout.turns) != 1:
            return None
        turn = layout.turns[0]
        units = [_moved(u, [k - 1 for k in range(len(items) + 1)]) for u in layout.units[turn.start : turn.end]]
        self._own.put(key, units, sum(UNIT_BYTES + len(u.text) + sum(len(c.text) for c in u.contents) for u in units))
        return units

    def _with_own_turns(self, layout: Layout, request: RenderRequest) -> Layout:
        """Put the kept form of each assistant turn where the template wrote a shorter one."""
        units: list[Unit] = []
        turns: list[Turn] = []
        at = 0
        for turn in layout.turns:
            units += layout.units[at : turn.start]
            own = self.own_turn([request.items[i] for i in turn.items], request.thinking)
            body = layout.units[turn.start : turn.end] if own is None else [_moved(u, turn.items) for u in own]
            turns.append(Turn(len(units), len(units) + len(body), turn.items))
            units += body
            at = turn.end
        shift = len(units) - at
        units += layout.units[at:]
        return Layout(units, turns, None if layout.prompt is None else layout.prompt + shift)

    def key_of(self, units: Sequence[Unit], items: Sequence[Item], salt: bytes) -> bytes:
        """Alias key of a turn: its markers, and between them text without outer white space, or the call as JSON value."""
        parts: list[bytes] = []
        text: list[str] = []
        calls: list[int] = []
        inside = False

        def close_gap() -> None:
            stripped = "".join(text).strip()
            if inside and calls:
                parts.extend(b"call" + claim_of(items[i]) for i in dict.fromkeys(calls))
            elif stripped:
                parts.append(b"text" + stripped.encode("utf-8", "surrogatepass"))
            text.clear()
            calls.clear()

        for unit in units:
            if unit.marker is None:
                text.append(unit.text)
                calls.extend(c.item for c in unit.contents if c.field in ("name", "arguments"))
                continue
            if inside and self.whole_blocks and unit.marker.id not in self._call_close | self._call_open:
                continue
            close_gap()
            parts.append(b"mark%d" % unit.marker.id)
            inside = unit.marker.id in self._call_open or (inside and unit.marker.id not in self._call_close)
        close_gap()
        return turn_key(salt, parts)


def claim_of(item: Item) -> bytes:
    """Digest of a call item's name and arguments; empty for other items."""
    if isinstance(item, FunctionCall):
        return _claim(item.name, item.arguments)
    return call_claim(item.name, call_arguments(item)) if isinstance(item, CustomToolCall) else b""


CLAIMS: Kept[tuple[str, str], bytes] = Kept(16 << 20)


def _claim(name: str, arguments: str) -> bytes:
    known = CLAIMS.get((name, arguments))
    if known is None:
        known = call_claim(name, call_arguments(FunctionCall(call_id="", name=name, arguments=arguments)))
        CLAIMS.put((name, arguments), known, len(name) + len(arguments))
    return known


def _moved(unit: Unit, items: Sequence[int]) -> Unit:
    """A unit whose item indices are looked up in `items`."""

    def new(index: int) -> int:
        return items[index] if 0 <= index < len(items) else index

    contents = tuple(replace(c, item=new(c.item)) for c in unit.contents)
    return replace(unit, item=new(unit.item), contents=contents)
