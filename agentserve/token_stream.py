"""Generated ids of one turn → events: dialect, log-probabilities, and joining deltas while the reader is slow.

Deltas are joined before they become events, so that sequence numbers have no gaps. Knows no worker and no storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentserve.audience import Sink
from agentserve.events import PIECES, ResponseEvents
from agentserve.interfaces import CallClose, CallOpen, Delta, ReasoningDelta, StreamParser, TextDelta
from agentserve.stops import StopText
from agentserve.worker.messages import Tokens
from statecache.types import MarkerTable

MAX_HELD = 16_384
"""Characters that wait to be joined to one delta while the reader is slow; then they take their place in its queue."""


class TokenStream:
    """One turn's output.

    one_call: the output ends with its first tool call. stops: it ends before the first of these in its visible text. `enough`
    is True from then on and further ids are dropped.
    token_text: bytes of a token, for log-probabilities.
    generated: every id that was taken. reasoning_tokens: how many of them were thinking.
    """

    def __init__(
        self,
        events: ResponseEvents,
        sink: Sink,
        parser: StreamParser,
        markers: MarkerTable,
        token_text: Callable[[int], bytes],
        *,
        one_call: bool = False,
        stops: Sequence[str] = (),
    ) -> None:
        self.generated: list[int] = []
        self.reasoning_tokens = 0
        self.enough = False
        self._events = events
        self._sink = sink
        self._parser = parser
        self._markers = markers.all()
        self._token_text = token_text
        self._one_call = one_call
        self._stops = StopText(stops)
        self._held: Delta | None = None
        self._yields = False
        self._direct = not (one_call or stops)
        """Nothing that was asked for can hold a delta back, or end the output behind it."""
        self.steered = False
        self._logprobs: list[Any] = []

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the output."""
        return self._stops.found

    def stop_at_boundary(self) -> None:
        """End the output before its next item, unless it has a call: that wants its result first."""
        self._yields = True
        self._direct = False

    def push(self, frame: Tokens) -> None:
        if self.enough:
            return
        if frame.logprobs:
            self._direct = False  # a delta may have to take the marks of several tokens with it
            for token_id, mark in zip(frame.ids, frame.logprobs, strict=True):
                self.generated.append(token_id)
                if token_id not in self._markers:
                    self._logprobs.append(self._logprob(token_id, mark.logprob, mark.top))
                self._write(self._parser.push((token_id,)))
        else:
            self.generated.extend(frame.ids)
            deltas = self._parser.push(frame.ids)
            if self._direct and self._held is None and len(deltas) == 1 and not self._sink.pressed:
                self._events.write(deltas[0])
            else:
                self._write(deltas)
        if self._events.open_kind == "reasoning":
            self.reasoning_tokens += len(frame.ids)

    def finish(self) -> None:
        """The worker has sent its last id."""
        self._write(self._parser.finish())
        if not self.enough and (rest := self._stops.flush()):
            self._join(TextDelta(rest))
        self.flush()

    def flush(self) -> None:
        """Send what waits to be joined."""
        held, self._held = self._held, None
        if held is not None:
            self._emit(held)

    def drop(self) -> None:
        """Forget what waits; the turn failed."""
        self._held = None

    def _write(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if self.enough:
                return
            if type(delta) is TextDelta:
                shown = self._stops.push(delta.text)
                if shown:
                    self._join(delta if shown == delta.text else TextDelta(shown))
                self.enough = self._stops.found is not None
                continue
            if rest := self._stops.flush():
                self._join(TextDelta(rest))
            self._join(delta)
            if self._one_call and type(delta) is CallClose:
                self.enough = True

    def _join(self, delta: Delta) -> None:
        """Send it, or join it to what waits."""
        held = self._held
        if held is not None:
            if type(delta) is type(held) and isinstance(held, PIECES) and isinstance(delta, PIECES):
                self._held = type(held)(held.text + delta.text)
                if len(held.text) >= MAX_HELD or not self._sink.pressed:
                    self.flush()
                return
            self.flush()
        if isinstance(delta, PIECES) and self._sink.pressed:
            self._held = delta
            return
        self._emit(delta)

    def _emit(self, delta: Delta) -> None:
        if self._yields and self._begins_item(delta) and not self._events.has_call:
            self._events.close_item()
            self.steered = self.enough = True
        if self.steered:
            return
        marks = self._logprobs
        if marks:
            self._logprobs = []
        self._events.write(delta, marks if type(delta) is TextDelta else ())

    def _begins_item(self, delta: Delta) -> bool:
        kind = self._events.open_kind
        if isinstance(delta, TextDelta):
            return kind != "message"
        if isinstance(delta, ReasoningDelta):
            return kind != "reasoning"
        return isinstance(delta, CallOpen)

    def _logprob(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, Any]:
        def entry(one: int, value: float) -> dict[str, Any]:
            raw = self._token_text(one)
            return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": value}

        return {**entry(token_id, logprob), "top_logprobs": [entry(i, p) for i, p in top]}
