"""Deltas of a dialect → wire events in canonical order.

One ResponseEvents per response: it owns the growing `output` and the order of events, and hands each event to `put`. It knows
no sockets, tokens or storage.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from agentserve.errors import TurnFailure
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta, ReasoningDelta, TextDelta
from agentserve.protocol import server_events as ev
from agentserve.protocol.items import (
    Compaction,
    CustomToolCall,
    FunctionCall,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    ResponseItem,
)
from agentserve.protocol.machine import ResponseOrder
from agentserve.protocol.responses import ErrorDetail, IncompleteDetails, ResponseBody, Usage

IN_PROGRESS, QUEUED, OPENED, CLOSED = 0, -1, -2, -3
Cut = int | ev.PrefillProgress | ev.CacheReport | ev.DeadlineReport
"""What was sent after `created`: one of the four above, a delta of so many characters, or one of our own events."""

PIECES = (TextDelta, ReasoningDelta, CallDelta)
"""Deltas that add text to an item."""


def new_id(prefix: str) -> str:
    """A fresh id like `msg_…`, unique over all sessions (120 random bits)."""
    return f"{prefix}_{secrets.token_hex(15)}"


class ResponseEvents:
    """Events of one response.

    body: the response object as it stands; `output` grows as items close. begun: as it was at first.
    cuts: what was sent so far, from which replay.py tells it again.
    put: takes every event, in order; must not block.
    stream_id: echoed in each event unless UNSET. seal: of thinking, for clients that carry it sealed.
    """

    def __init__(
        self,
        body: ResponseBody,
        put: Callable[[ev.Event], None],
        stream_id: str | UnsetType = UNSET,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        self.body = self.begun = body
        self.cuts: list[Cut] = []
        self.order = ResponseOrder()
        self._put = put
        self._lane = stream_id
        self._seal = seal
        self._output: list[ResponseItem] = []
        self._open: str | None = None
        self._item_id = ""
        self._name = ""
        self._call_id = ""
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        self._carried = ""

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────────────────────

    def created(self) -> None:
        self._life(ev.Created, "response.created")

    def in_progress(self) -> None:
        self.body = msgspec.structs.replace(self.body, status="in_progress", output=self.output)
        self._life(ev.InProgress, "response.in_progress")
        self.cuts.append(IN_PROGRESS)

    def queued(self) -> None:
        self.body = msgspec.structs.replace(self.body, status="queued", output=self.output)
        self._life(ev.Queued, "response.queued")
        self.cuts.append(QUEUED)

    @property
    def waiting(self) -> bool:
        """Created, and nothing of the answer yet: the time in which clients need a sign of life."""
        return self.order.state == "open"

    @property
    def open_kind(self) -> str | None:
        """Type of the item that is being written, None between items."""
        return self._open

    @property
    def output(self) -> tuple[ResponseItem, ...]:
        return tuple(self._output)

    @property
    def has_call(self) -> bool:
        """A call was written or is being written."""
        return any(isinstance(i, FunctionCall | CustomToolCall) for i in self._output) or (self._open or "").endswith("_call")

    @property
    def written(self) -> tuple[ResponseItem, ...]:
        """The output with what there is of the item that is being written."""
        return self.output if self._open is None else (*self._output, self._item("in_progress"))

    def finished(
        self,
        *,
        usage: Usage,
        incomplete: str | None,
        now: int,
        cancelled: bool = False,
        stop_sequence: str | None = None,
    ) -> ResponseBody:
        """Close what is open and return the final body. The terminal event is sent later, by `end`, once the body is stored."""
        self.close_item("completed" if incomplete is None else "incomplete")
        status = "cancelled" if cancelled else "completed" if incomplete is None else "incomplete"
        self.body = msgspec.structs.replace(
            self.body,
            status=status,
            output=self.output,
            usage=usage,
            completed_at=now if status == "completed" else None,
            incomplete_details=None if incomplete is None else IncompleteDetails(incomplete),
            stop_sequence=UNSET if stop_sequence is None else stop_sequence,
        )
        return self.body

    def end(self) -> None:
        """Terminal event of a finished response."""
        if self.body.status == "completed":
            self._life(ev.Completed, "response.completed")
        elif self.body.status == "failed":
            self._life(ev.Failed, "response.failed")
        else:
            self._life(ev.Incomplete, "response.incomplete")

    def failed(self, failure: TurnFailure, usage: Usage | None = None) -> None:
        """Close what is open and end as failed."""
        self.close_item("incomplete")
        detail = ErrorDetail(code=failure.code, message=failure.message, type=_failure_type(failure), param=failure.param)
        self.body = msgspec.structs.replace(
            self.body, status="failed", output=self.output, error=detail, usage=usage, incomplete_details=None
        )
        self.end()

    def _life(
        self, kind: type[ev.Created | ev.InProgress | ev.Queued | ev.Completed | ev.Incomplete | ev.Failed], name: str
    ) -> None:
        self._put(kind(sequence_number=self.order.advance(name), stream_id=self._lane, response=self.body))

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, delta: Delta, logprobs: Sequence[Any] = ()) -> None:
        """One delta; an empty one is none. A change of kind closes the open item. logprobs: of the text in this delta."""
        if isinstance(delta, PIECES) and not delta.text:
            return
        if type(delta) is TextDelta:
            if self._open != "message":
                self._open_message()
            self._add(delta.text)
            marks = tuple(logprobs) if logprobs else ()
            if marks:
                self._logprobs.extend(marks)
            self._put(
                ev.OutputTextDelta(
                    sequence_number=self.order.advance("response.output_text.delta"),
                    stream_id=self._lane,
                    item_id=self._item_id,
                    output_index=len(self._output),
                    content_index=0,
                    delta=delta.text,
                    logprobs=marks,
                )
            )
        elif type(delta) is ReasoningDelta:
            if self._open != "reasoning":
                self._open_item("reasoning", "rs")
            self._add(delta.text)
            self._put(
                ev.ReasoningTextDelta(
                    sequence_number=self.order.advance("response.reasoning_text.delta"),
                    stream_id=self._lane,
                    item_id=self._item_id,
                    output_index=len(self._output),
                    content_index=0,
                    delta=delta.text,
                )
            )
        elif type(delta) is CallDelta:
            self._add(delta.text)
            custom = self._open == "custom_tool_call"
            kind = ev.CustomToolCallInputDelta if custom else ev.FunctionCallArgumentsDelta
            name = "response.custom_tool_call_input.delta" if custom else "response.function_call_arguments.delta"
            self._put(
                kind(
                    sequence_number=self.order.advance(name),
                    stream_id=self._lane,
                    item_id=self._item_id,
                    output_index=len(self._output),
                    delta=delta.text,
                )
            )
        elif type(delta) is CallOpen:
            self.close_item()
            self._name = delta.name
            self._call_id = new_id("call")
            self._open_item(*(("custom_tool_call", "ctc") if delta.custom else ("function_call", "fc")))
        elif type(delta) is CallClose:
            self.close_item()

    def _add(self, text: str) -> None:
        self._text.append(text)
        self.cuts.append(len(text))

    def compacted(self, item: Compaction) -> None:
        """The context was summed up; the answer goes on from this."""
        self.begin(item)
        self.close_as(item)

    def begin(self, item: ResponseItem) -> None:
        """Open an item that exists already, under its own ids."""
        self.close_item()
        self._item_id = item.id or new_id("item")
        if isinstance(item, FunctionCall | CustomToolCall):
            self._name, self._call_id = item.name, item.call_id
            self._open_item("function_call" if isinstance(item, FunctionCall) else "custom_tool_call", None)
        elif isinstance(item, Reasoning | Compaction):
            self._open_item("reasoning" if isinstance(item, Reasoning) else "compaction", None)
        else:
            self._open_message(None)

    def write_text(self, text: str) -> None:
        """More of the open item."""
        kind = {"message": TextDelta, "reasoning": ReasoningDelta}.get(self._open or "", CallDelta)
        self.write(kind(text))

    def close_as(self, item: ResponseItem) -> None:
        """Close it as it was closed before."""
        if isinstance(item, Message):
            self._logprobs = [mark for part in item.content if isinstance(part, OutputText) for mark in part.logprobs]
        elif isinstance(item, Reasoning):
            sealed = item.encrypted_content
            self._seal = None if sealed is None else lambda _: sealed
        elif isinstance(item, Compaction):
            self._carried = item.encrypted_content
        self.close_item("completed" if isinstance(item, Compaction) else item.status or "completed")

    def again(self, event: ev.PrefillProgress | ev.CacheReport | ev.DeadlineReport) -> None:
        """One of our own events that was sent before."""
        number = self.order.advance(ev.type_of(event))
        self._own(msgspec.structs.replace(event, sequence_number=number, stream_id=self._lane))

    def _own(self, event: ev.PrefillProgress | ev.CacheReport | ev.DeadlineReport) -> None:
        self.cuts.append(event)
        self._put(event)

    def _open_item(self, kind: str, prefix: str | None) -> None:
        self.close_item()
        if prefix is not None:
            self._item_id = new_id(prefix)
        number = self.order.advance(f"added:{kind}")
        self._open = kind
        self.cuts.append(OPENED)
        self._put(
            ev.OutputItemAdded(
                sequence_number=number,
                stream_id=self._lane,
                output_index=len(self._output),
                item=self._item("in_progress", begun=True),
            )
        )

    def _open_message(self, prefix: str | None = "msg") -> None:
        self._open_item("message", prefix)
        self._put(
            ev.ContentPartAdded(
                sequence_number=self.order.advance("response.content_part.added"),
                stream_id=self._lane,
                item_id=self._item_id,
                output_index=len(self._output),
                content_index=0,
                part=OutputText(""),
            )
        )

    def close_item(self, status: Any = "completed") -> None:
        """Send the `done` events of the open item, if one is open, and add it to the output."""
        kind = self._open
        if kind is None:
            return
        common: dict[str, Any] = {
            "stream_id": self._lane,
            "item_id": self._item_id,
            "output_index": len(self._output),
        }
        text = "".join(self._text)
        number = self.order.advance
        if kind == "reasoning":
            self._put(
                ev.ReasoningTextDone(
                    sequence_number=number("response.reasoning_text.done"), content_index=0, text=text, **common
                )
            )
        elif kind == "message":
            marks = tuple(self._logprobs)
            self._put(
                ev.OutputTextDone(
                    sequence_number=number("response.output_text.done"),
                    content_index=0,
                    text=text,
                    logprobs=marks,
                    **common,
                )
            )
            self._put(
                ev.ContentPartDone(
                    sequence_number=number("response.content_part.done"),
                    content_index=0,
                    part=OutputText(text, (), marks),
                    **common,
                )
            )
        elif kind == "function_call":
            self._put(
                ev.FunctionCallArgumentsDone(
                    sequence_number=number("response.function_call_arguments.done"),
                    name=self._name,
                    arguments=text,
                    **common,
                )
            )
        elif kind == "custom_tool_call":
            self._put(
                ev.CustomToolCallInputDone(sequence_number=number("response.custom_tool_call_input.done"), input=text, **common)
            )
        item = self._item(status)
        if self._seal is not None and isinstance(item, Reasoning):
            item = msgspec.structs.replace(item, encrypted_content=self._seal(item.text))
        self._put(
            ev.OutputItemDone(
                sequence_number=number("response.output_item.done"),
                stream_id=self._lane,
                output_index=len(self._output),
                item=item,
            )
        )
        self._output.append(item)
        self.cuts.append(CLOSED)
        self._open = None
        self._text = []
        self._logprobs = []

    def _item(self, status: Any, *, begun: bool = False) -> ResponseItem:
        text = "".join(self._text)
        if self._open == "compaction":
            return Compaction(id=self._item_id, encrypted_content=self._carried)
        if self._open == "reasoning":
            # Reasoning has no content_part.added, so the part is there from the beginning: the accumulator of openai needs it.
            return Reasoning(id=self._item_id, status=status, content=(ReasoningText(text),))
        if self._open == "message":
            content = () if begun else (OutputText(text, (), tuple(self._logprobs)),)
            return Message(id=self._item_id, role="assistant", status=status, content=content)
        if self._open == "function_call":
            return FunctionCall(id=self._item_id, call_id=self._call_id, name=self._name, arguments=text, status=status)
        return CustomToolCall(id=self._item_id, call_id=self._call_id, name=self._name, input=text, status=status)

    # ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def progress(self, *, processed: int, total: int, cached: int, queued: int, eta_ms: int) -> None:
        self._own(
            ev.PrefillProgress(
                sequence_number=self.order.advance("agentserve.prefill.progress"),
                stream_id=self._lane,
                response_id=self.body.id,
                processed=processed,
                total=total,
                cached=cached,
                queued=queued,
                eta_ms=eta_ms,
            )
        )

    def cache_report(self, **fields: Any) -> None:
        """fields: those of server_events.CacheReport but the common ones."""
        self._own(
            ev.CacheReport(
                sequence_number=self.order.advance("agentserve.cache.report"),
                stream_id=self._lane,
                response_id=self.body.id,
                **fields,
            )
        )

    def deadline(self, *, deadline_ms: int, predicted_ttft_ms: int | None, elapsed_ms: int, status: str) -> None:
        self._own(
            ev.DeadlineReport(
                sequence_number=self.order.advance("agentserve.deadline"),
                stream_id=self._lane,
                response_id=self.body.id,
                deadline_ms=deadline_ms,
                predicted_ttft_ms=predicted_ttft_ms,
                elapsed_ms=elapsed_ms,
                status=status,
            )
        )


def text_of(item: ResponseItem) -> str:
    """What an item's deltas carry."""
    if isinstance(item, Compaction):
        return ""
    if isinstance(item, FunctionCall):
        return item.arguments
    return item.input if isinstance(item, CustomToolCall) else item.text


def _failure_type(failure: TurnFailure) -> str:
    return "server_error" if failure.code == "server_error" else "invalid_request_error"
