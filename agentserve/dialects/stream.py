"""Generated ids → deltas, for any dialect.

A marker that is one token of the tokenizer is recognised by its id alone: the same characters spelled by other tokens are
text. While text is read, such a marker is one character that no text can have (a lone surrogate), so tags that are made of
markers and text are looked for in the same way whatever the tokenizer knows. A marker that is not one token is looked for in
the text, and any suffix that may become one is held back. So the result does not depend on how the stream was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from agentserve.dialects.base import CallParser, Dialect
from agentserve.dialects.spelling import Spelling, has_sign
from agentserve.interfaces import CallClose, CallOpen, Delta, ReasoningDelta, TextDelta
from agentserve.protocol.items import Tool
from agentserve.text.detokenizer import Detokenizer
from agentserve.text.tokenizer import Tokenizer
from statecache.types import MarkerTable


class _State(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class DialectParser:
    """Implements interfaces.StreamParser.

    opens_reasoning: the prompt ends inside an open thinking block. literal: the text has a form of its own, so that its white
    space is kept, and markers spelled in it are text.
    """

    def __init__(
        self,
        dialect: Dialect,
        tokenizer: Tokenizer,
        table: MarkerTable,
        tools: Sequence[Tool] = (),
        *,
        opens_reasoning: bool = False,
        literal: bool = False,
    ) -> None:
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._tools = tools
        self._detokenizer = Detokenizer(tokenizer)
        self._spelling = Spelling(dialect, tokenizer)
        self._ends = frozenset(table.turn_end)
        markers = dialect.markers
        outer = (markers.think_open, markers.think_close, markers.call_open, markers.call_close)
        self._by_text = {self._spelling.spell(text): text for text in outer if text}
        self._tokens_only = all(len(marker) == 1 for marker in self._by_text)
        """No marker is looked for in text, so text passes at once."""
        self._signed = False
        """A sign came where it may have meant nothing, so deltas must be looked through."""
        self._whole = dialect.stream_state(tools, self._spelling.spell, literal=literal)
        self._state = _State.REASONING if opens_reasoning else _State.TEXT
        self._held = ""
        self._blank = ""
        self._fresh = True
        self._literal = literal
        self._skip = ""
        self._call: CallParser | None = None
        self._raw_call: list[str] = []
        self._out: list[Delta] = []

    def push(self, ids: Sequence[int]) -> list[Delta]:
        if len(ids) == 1 and self._tokens_only and self._call is None and self._whole is None:
            # The way of nearly every token: text that is no marker, inside an answer or its thinking, and waits for nothing.
            token = ids[0]
            text = self._tokenizer.plain_text(token)
            waits = self._held or self._detokenizer.unfinished
            if text and not waits and not self._fresh and not self._literal and token not in self._ends:
                text = self._trimmed(text) if self._dialect.trims else text
                return [self._delta(text)] if text else []
        for token in ids:
            token = int(token)
            sign = self._spelling.sign_of(token)
            if sign is not None:
                self._signed = self._signed or self._call is not None or self._whole is not None
                self._text(self._detokenizer.flush() + sign)
                continue
            if token in self._ends:
                self._text(self._detokenizer.flush())
                continue
            known = self._tokenizer.marker_by_id.get(token)
            if known is not None and known.special:
                continue  # padding and the like: it carries no text
            self._text(self._detokenizer.push(token))
        return self._take()

    def finish(self) -> list[Delta]:
        """What was held back. An open call that cannot be completed gets no CallClose; one that never began is text."""
        self._text(self._detokenizer.flush())
        if self._whole is not None:
            self._out += self._whole.finish()
            return self._take()
        self._release()
        if self._call is not None:
            self._end_call(closed=False)
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return [self._plain(delta) for delta in out] if self._signed else out

    def _plain(self, delta: Delta) -> Delta:
        """A delta without signs: where they mean nothing, markers are text."""
        if isinstance(delta, CallClose):
            return delta
        if isinstance(delta, CallOpen):
            return CallOpen(self._spelling.plain(delta.name), delta.custom) if has_sign(delta.name) else delta
        return type(delta)(self._spelling.plain(delta.text)) if has_sign(delta.text) else delta

    # ── markers spelled as text ──────────────────────────────────────────────────────────────────────────────────

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._whole is not None:
            self._out += self._whole.push(text)
            return
        if self._tokens_only and not self._held and not has_sign(text):
            self._emit(text)
            return
        self._held += text
        while self._held:
            wanted = self._wanted()
            found = min(((at, m) for m in wanted if (at := self._held.find(m)) >= 0), default=None)
            if found is None:
                keep = max((_overlap(self._held, m) for m in wanted), default=0)
                ready = self._held[: len(self._held) - keep]
                self._held = self._held[len(ready) :]
                self._emit(ready)
                return
            at, marker = found
            ready, rest = self._held[:at], self._held[at:]
            self._held = ""
            self._emit(ready)
            if self._call is not None and self._call.inside_value and not has_sign(marker):
                self._emit(rest[0])
                self._held = rest[1:]
            else:
                self._held = rest[len(marker) :]
                self._mark(self._by_text[marker])

    def _wanted(self) -> list[str]:
        if self._state is _State.CALL:
            close = self._dialect.markers.call_close
            return [m for m, text in self._by_text.items() if text == (close or self._dialect.markers.call_open)]
        if self._literal and self._state is _State.TEXT and not self._fresh:
            return [m for m in self._by_text if has_sign(m)]
        return list(self._by_text)

    def _release(self) -> None:
        held, self._held = self._held, ""
        self._emit(held)

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _mark(self, marker: str) -> None:
        markers = self._dialect.markers
        if self._call is not None:
            self._end_call(closed=True)
            if marker == markers.call_open:
                self._mark(marker)
        elif marker == markers.call_open:
            self._enter(_State.CALL)
            self._call = self._dialect.call_parser(self._tools, self._spelling.spell)
            self._literal = False
            self._raw_call = []
        elif marker == markers.think_open:
            self._enter(_State.REASONING)
        elif marker == markers.think_close:
            self._enter(_State.TEXT)
            self._skip = self._dialect.after_thinking
        # A closing call marker outside of a call closes nothing.

    def _enter(self, state: _State) -> None:
        self._state = state
        self._blank = ""
        self._fresh = True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._call is not None:
            self._emit_call(self._call, self._spelling.inside(text))
            return
        if has_sign(text):
            text = self._spelling.plain(text)
        if self._literal and self._state is _State.TEXT:
            text = self._behind_thinking(text)
            self._fresh = self._fresh and not text
        elif self._dialect.trims:
            # Outer white space belongs to the template; what is inside must wait until something follows it.
            if self._fresh:
                text = text.lstrip()
                if not text:
                    return
                self._fresh = False
            text = self._trimmed(text)
        if text:
            self._out.append(self._delta(text))

    def _trimmed(self, text: str) -> str:
        """What may be shown of it: white space at its end waits until something follows."""
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        return kept

    def _delta(self, text: str) -> Delta:
        return ReasoningDelta(text) if self._state is _State.REASONING else TextDelta(text)

    def _emit_call(self, call: CallParser, text: str) -> None:
        if self._dialect.markers.call_close:
            self._raw_call.append(text)
            self._out += call.push(text)
            return
        for at, char in enumerate(text):
            self._raw_call.append(char)
            self._out += call.push(char)
            if call.done:
                self._end_call(closed=True)
                self._emit(text[at + 1 :])
                return

    def _behind_thinking(self, text: str) -> str:
        """Text without what the dialect writes between thinking and answer."""
        while self._skip and text:
            if text[0] != self._skip[0]:
                self._skip = ""
            else:
                text, self._skip = text[1:], self._skip[1:]
        return text

    def _end_call(self, *, closed: bool) -> None:
        call, self._call = self._call, None
        assert call is not None
        deltas = call.finish(closed)
        self._enter(_State.TEXT)
        if deltas is not None:
            self._out += deltas
            return
        markers = self._dialect.markers
        raw = self._spelling.plain("".join(self._raw_call))
        self._out.append(TextDelta(markers.call_open + raw + (markers.call_close if closed else "")))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
