"""Why a context left the ones before it: a token position → item and cause, in the words of an agent's edits.

The worker says where (it matches tokens); here is known what the tokens were. Looks only at contexts that this process has
rendered; after a restart it can name the item but not always the cause.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentserve.interfaces import DivergenceReport, Rendered, RenderRequest
from agentserve.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)

KEPT_CONTEXTS = 64
KEPT_BYTES = 64 << 20
TEXT_BYTES, ITEM_BYTES = 4, 400
"""Of a token's characters, and of an item beside its text."""
WINDOW_TOKENS = 8
REMINDER = "<system-reminder>"


@dataclass(frozen=True, slots=True)
class _Told:
    request: RenderRequest
    rendered: Rendered
    ids: np.ndarray
    as_sent: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        ids = self.ids.nbytes + (0 if self.as_sent is None else self.as_sent.nbytes)
        return ids + TEXT_BYTES * len(self.ids) + ITEM_BYTES * len(self.request.items)


class Contexts:
    """The newest contexts, to compare the next ones with. Thread-safe; bounded in number and bytes."""

    def __init__(self, contexts: int = KEPT_CONTEXTS, kept_bytes: int = KEPT_BYTES) -> None:
        self._contexts = contexts
        self._limit = kept_bytes
        self._told: OrderedDict[int, _Told] = OrderedDict()
        self._bytes = 0
        self._next = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def remember(
        self,
        request: RenderRequest,
        rendered: Rendered,
        generated: Sequence[int] | np.ndarray,
        as_sent: np.ndarray | None = None,
    ) -> None:
        """A turn has ended: its prompt and what was generated. as_sent: how the client began it, if otherwise (Prompt)."""
        ids = np.concatenate([rendered.ids, np.asarray(generated, np.uint32)])
        with self._lock:
            self._told[self._next] = _Told(request, rendered, ids, as_sent)
            self._next += 1
            self._bytes += self._told[self._next - 1].nbytes
            while len(self._told) > self._contexts or (self._bytes > self._limit and len(self._told) > 1):
                self._bytes -= self._told.popitem(last=False)[1].nbytes

    def saved(self, salt: bytes, ids: np.ndarray, as_sent: np.ndarray, reused: int) -> int | None:
        """Of `reused` tokens of a context, those that could not have been reused as the client sent it.

        ids: of the context. as_sent: how it began as it was sent. None if no context in memory reaches as far as what was
        reused, so that it is not known how that one had been sent.
        """
        if not reused:
            return 0
        with self._lock:
            told = [t for t in self._told.values() if t.request.salt == salt]
        if not any(_shared(t.ids, ids) >= reused for t in told):
            return None
        best = max(_shared(t.ids if t.as_sent is None else t.as_sent, as_sent) for t in told)
        return 0 if best == len(as_sent) else max(0, reused - best)

    def explain(
        self,
        request: RenderRequest,
        rendered: Rendered,
        position: int,
        cause: str,
        token_text: Callable[[int], bytes] | None = None,
    ) -> DivergenceReport:
        """position: tokens that agree with the best saved context. cause: what the worker found (statecache.Divergence).

        With token_text the report has a few tokens of text from both sides: for the client who owns the context, never for
        a log.
        """
        here = _item_at(rendered, position)
        told = self._compared(request, rendered, position)
        if cause != "tokens" or told is None:
            return DivergenceReport(position, here, cause)
        place = _shared(told.ids, rendered.ids)
        reason = _cause(told, request, rendered, place, token_text)
        if reason == "thinking_dropped":
            here = _dropped(request.items, rendered, here)
        if token_text is None:
            return DivergenceReport(position, here, reason)
        before, after = (
            b"".join(token_text(int(i)) for i in ids[place : place + WINDOW_TOKENS]).decode("utf-8", "replace")
            for ids in (told.ids, rendered.ids)
        )
        return DivergenceReport(position, here, reason, before, after)

    def _compared(self, request: RenderRequest, rendered: Rendered, position: int) -> _Told | None:
        """The context that shares most tokens with this one, of those that reach `position`; one that does not is not what the
        worker compared.

        Before the first item all that begin alike share as much, so there one of the same conversation is preferred.
        """
        with self._lock:
            told = [t for t in reversed(self._told.values()) if t.request.salt == request.salt]
        ranked = sorted(((_shared(t.ids, rendered.ids), t) for t in told), key=lambda r: -r[0])
        if position < _first(rendered):
            same = next((t for _, t in ranked if _same_conversation(t.request, request)), None)
            if same is not None:
                return same
        return ranked[0][1] if ranked and ranked[0][0] >= position else None


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    unequal = np.flatnonzero(a[:n] != b[:n])
    return int(unequal[0]) if len(unequal) else n


def _item_at(rendered: Rendered, position: int) -> int:
    """Item of a token; −1 for instructions and tools, and for what comes behind the last item."""
    finder = getattr(rendered, "item_of", None)
    if finder is not None:
        item = int(finder(position))
        return item if item < len(rendered.item_starts) else -1
    return int(np.searchsorted(np.asarray(rendered.item_starts), position, side="right")) - 1


def _dropped(items: Sequence[Item], rendered: Rendered, here: int) -> int:
    """The reasoning item that stood where item `here` stands now: it has no tokens, so it begins where the next one does."""
    starts = rendered.item_starts
    same = [i for i in range(max(here, 0)) if starts[i] == starts[here] and isinstance(items[i], Reasoning)]
    return same[0] if same else here


def _same_conversation(old: RenderRequest, new: RenderRequest) -> bool:
    """They have an item in common."""
    return any(map({_plain(i) for i in new.items}.__contains__, map(_plain, old.items)))


def _plain(item: Item) -> tuple[str, ...]:
    """An item without the ids and states that differ between what was sent and what comes back."""
    names = ("role", "call_id", "name", "text")
    return (type(item).__name__, *(str(getattr(item, name, "")) for name in names))


def _cause(
    told: _Told,
    request: RenderRequest,
    rendered: Rendered,
    place: int,
    token_text: Callable[[int], bytes] | None = None,
) -> str:
    """One of the causes that docs/protocol.md explains."""
    if place >= len(told.ids):
        return "appended"
    old = told.request
    if _item_at(rendered, place) < 0 and place < _first(rendered):
        return _head_cause(old, request) if _same_conversation(old, request) else "new_context"
    if _in_thinking(told, place):
        return "thinking_changed" if _opens_thinking(rendered, place, token_text) else "thinking_dropped"
    if place < len(rendered.ids) and int(rendered.ids[place]) in rendered.markers.think_open:
        return "thinking_added"
    index = _item_at(rendered, place)
    if index < 0:
        return "history_replaced"
    now = request.items[index]
    was = _counterpart(now, index, old.items)
    if was is None:
        if index < len(old.items):
            return "history_replaced"
        if isinstance(now, Message) and now.role in ("system", "developer"):
            return "system_changed"  # templates move it up to the first one, in front of what stood there
        # Behind the old prompt: the answer's own items came back otherwise than they were sampled.
        answered = (
            now.role == "assistant" if isinstance(now, Message) else isinstance(now, Reasoning | FunctionCall | CustomToolCall)
        )
        return "retokenized" if answered else "history_replaced"
    reason = _item_cause(was, now)
    if reason == "system_changed" and not _same_conversation(old, request):
        return "new_context"
    behind = {_plain(i) for i in old.items[index + 1 :]}
    # All that came behind it is gone (a summary took its place), or it is one of those (what was before it was left out).
    gone = bool(behind) and behind.isdisjoint(map(_plain, request.items))
    if reason == "message_changed" and (gone or _plain(now) in behind):
        return "history_replaced"
    return reason


def _first(rendered: Rendered) -> int:
    return rendered.item_starts[0] if rendered.item_starts else len(rendered.ids)


def _head_cause(old: RenderRequest, new: RenderRequest) -> str:
    if old.instructions != new.instructions or old.tools == new.tools:
        return "system_changed"
    names = sorted(t.name for t in new.tools)
    same = sorted(t.name for t in old.tools) == names and all(t in old.tools for t in new.tools)
    return "tools_reordered" if same else "tools_changed"


def _in_thinking(told: _Told, place: int) -> bool:
    """The old context has a thinking block there, or just begins one."""
    markers = told.rendered.markers
    opens, closes = np.array(markers.think_open, np.uint32), np.array(markers.think_close, np.uint32)
    if not len(opens):
        return False
    head = told.ids[: place + 1]
    last_open = np.flatnonzero(np.isin(head, opens))
    last_close = np.flatnonzero(np.isin(head[:place], closes))
    return bool(len(last_open)) and (not len(last_close) or last_open[-1] > last_close[-1])


def _opens_thinking(rendered: Rendered, place: int, token_text: Callable[[int], bytes] | None) -> bool:
    """The new context has a thinking block there too, with something in it."""
    markers, ids = rendered.markers, rendered.ids
    head = ids[: place + 1]
    opens = np.flatnonzero(np.isin(head, np.array(markers.think_open, np.uint32)))
    if not len(opens):
        return False
    is_close = np.isin(ids, np.array(markers.think_close, np.uint32))
    closes = np.flatnonzero(is_close[: place + 1])
    if len(closes) and closes[-1] > opens[-1] and closes[-1] < place:
        return False
    if token_text is None:
        return True
    start = int(opens[-1]) + 1
    after = np.flatnonzero(is_close[start:])
    end = start + int(after[0]) if len(after) else len(ids)
    return any(token_text(int(i)).strip() for i in ids[start:end])


def _counterpart(now: Item, index: int, old: Sequence[Item]) -> Item | None:
    """The old item in the new one's place: by call id, else by index if of the same kind."""
    call_id = getattr(now, "call_id", None)
    if call_id is not None:
        return next((o for o in old if type(o) is type(now) and getattr(o, "call_id", None) == call_id), None)
    was = old[index] if index < len(old) else None
    return was if was is not None and type(was) is type(now) and getattr(was, "role", "") == getattr(now, "role", "") else None


def _item_cause(was: Item, now: Item) -> str:
    if isinstance(now, FunctionCallOutput | CustomToolCallOutput):
        return "tool_output_changed" if getattr(was, "text", "") != now.text else "retokenized"
    if isinstance(now, FunctionCall | CustomToolCall):
        return "retokenized" if was == now else "call_changed"
    before, after = getattr(was, "text", ""), now.text
    if before == after:
        return "retokenized"
    if isinstance(now, Message) and now.role in ("system", "developer"):
        return "system_changed"
    if isinstance(now, Message) and (REMINDER in before) != (REMINDER in after):
        return "reminder_moved"
    return "message_changed"
