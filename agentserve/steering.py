"""Input for a response that is being written: it ends at its next item boundary and a successor goes on with the input.

One Steering per connection, since only responses of the same socket can be steered. It decides and makes frames; the lanes
and the sending are connection.py's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from agentserve.errors import ApiError
from agentserve.events import new_id
from agentserve.protocol.decode import decode_input
from agentserve.protocol.items import CustomToolCall, FunctionCall, Message
from agentserve.protocol.responses import ResponseBody, ResponseSteer
from agentserve.protocol.server_events import (
    RequiredInput,
    SteerAccepted,
    SteerEcho,
    SteerError,
    SteerFailed,
    SteerName,
    SteerPending,
)
from agentserve.request import TurnRequest
from agentserve.turn import Turn

MAX_PENDING = 16
KNOWN_ENDED = 256


@dataclass(frozen=True, slots=True)
class Steer:
    """One accepted submission. input: as the client sent it."""

    id: str
    target: str
    input: Raw
    items: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Submission:
    """A steer frame, read. said: what it adds, or why that cannot be added."""

    frame: ResponseSteer
    said: tuple[Message, ...] | str


def read_submission(frame: ResponseSteer, max_items: int) -> Submission:
    """Knows nothing of what runs, so that it may run anywhere."""
    try:
        items = decode_input(frame.input, max_items=max_items)
    except ApiError as error:
        return Submission(frame, f"{error.param}: {error.message}")
    said = tuple(item for item in items if isinstance(item, Message) and item.role == "user")
    if not said or len(said) != len(items):
        return Submission(frame, "input: accepted: a text, or at least one message and only messages of role user")
    return Submission(frame, said)


class _Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Steering:
    """What was accepted and is not committed yet. send: takes a frame."""

    def __init__(self, send: Callable[[Struct], None]) -> None:
        self._send = send
        self._queued: dict[str, list[Steer]] = {}
        """By the response that they steer, which runs, or has ended with calls whose results are awaited."""
        self._committing: dict[str, list[Steer]] = {}
        """By the response that begins with them, until it is created."""
        self._ended: deque[str] = deque(maxlen=KNOWN_ENDED)

    def submit(self, submission: Submission, turn: Turn | None) -> None:
        """Accept and pass it on, or say why not. turn: the running one that the frame names, if it is of this connection."""
        frame = submission.frame
        target = frame.previous_response_id or ""
        lane = UNSET if turn is None else turn.request.stream_id
        try:
            steer = self._accept(submission, target, turn)
        except _Refused as refused:
            self._fail(target, frame.input, refused.code, str(refused), lane)
            return
        assert turn is not None
        self._queued.setdefault(target, []).append(steer)
        self._send(SteerAccepted(steer=SteerName(id=steer.id, previous_response_id=target), stream_id=lane))
        turn.steer()

    def _accept(self, submission: Submission, target: str, turn: Turn | None) -> Steer:
        said = submission.said
        if isinstance(said, str):
            raise _Refused("invalid_input", said)
        if turn is None:
            ended = target in self._ended
            code, why = (
                ("response_already_completed", "has ended") if ended else ("response_not_found", "runs on this connection")
            )
            raise _Refused(code, f"response '{target[:128]}' {why}" if ended else f"no response '{target[:128]}' {why}")
        if turn.request.conversation is not None:
            raise _Refused("steering_not_supported", "a turn of a conversation cannot be steered")
        if turn.events.order.ended or turn.cancelled:
            raise _Refused("response_not_active", "the response takes no more input")
        if len(self._queued.get(target, ())) >= MAX_PENDING:
            raise _Refused("too_many_pending_steers", f"{MAX_PENDING} submissions wait for this response, no more are accepted")
        return Steer(new_id("steer"), target, submission.frame.input, said)

    def ended(self, request: TurnRequest, body: ResponseBody | None, *, closing: bool) -> TurnRequest | None:
        """A turn has ended, or was not created (body None). Returns its successor, if input waits for one."""
        for steer in self._committing.pop(request.id, ()) if body is None else ():
            message = "the response that this input was for could not be created"
            self._fail(steer.target, steer.input, "successor_creation_failed", message, request.stream_id, steer.id)
        self._committing.pop(request.id, None)
        self._ended.append(request.id)
        steers = self._queued.get(request.id)
        if not steers:
            return None
        usable = body is not None and body.status in ("completed", "incomplete") and not closing
        calls = () if body is None else tuple(i for i in body.output if isinstance(i, FunctionCall | CustomToolCall))
        if usable and calls:
            for steer in steers:
                self._send(
                    SteerPending(
                        steer=SteerName(id=steer.id, previous_response_id=steer.target),
                        required_input=tuple(map(_stub, calls)),
                        stream_id=request.stream_id,
                    )
                )
            return None
        del self._queued[request.id]
        if not usable:
            for steer in steers:
                message = "the response ended without taking this input"
                self._fail(steer.target, steer.input, "response_not_active", message, request.stream_id, steer.id)
            return None
        successor = _successor(request, steers)
        self._committing[successor.id] = steers
        return successor

    def merged(self, request: TurnRequest) -> TurnRequest:
        """A new turn, with the input that waited for the results that it brings in front of its own."""
        parent = request.create.previous_response_id
        if parent is None or parent not in self._ended or not (steers := self._queued.pop(parent, None)):
            return request
        self._committing[request.id] = steers
        return replace(request, items=(*(item for steer in steers for item in steer.items), *request.items))

    def _fail(
        self, target: str, given: Any, code: str, message: str, lane: str | UnsetType, steer_id: str | UnsetType = UNSET
    ) -> None:
        echo = SteerEcho(id=steer_id, previous_response_id=target, input=given)
        self._send(SteerFailed(error=SteerError(code=code, message=message), steer=echo, stream_id=lane))


def _successor(request: TurnRequest, steers: list[Steer]) -> TurnRequest:
    """A turn with the same settings that goes on from `request` with what was submitted."""
    create, now = request.create, time.time()
    metadata = {k: v for k, v in (create.metadata or {}).items() if k != "idempotency_key"}
    return replace(
        request,
        id=new_id("resp"),
        accepted_at=time.monotonic(),
        created_at=int(now),
        create=msgspec.structs.replace(create, previous_response_id=request.id, generate=None, metadata=metadata or None),
        items=tuple(item for steer in steers for item in steer.items),
        idempotency_key=None,
        digest=b"",
    )


def _stub(call: FunctionCall | CustomToolCall) -> RequiredInput:
    if isinstance(call, FunctionCall):
        return RequiredInput(type="function_call_output", call_id=call.call_id, name=call.name)
    return RequiredInput(type="custom_tool_call_output", call_id=call.call_id)
