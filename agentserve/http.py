"""The same turns over HTTP: one JSON answer, or server-sent events. A client that goes away stops its turn.

What the answer looks like is a Wire's business: Responses here, the other APIs in compat/.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from agentserve.audience import Nowhere, Sink
from agentserve.errors import (
    ApiError,
    BodyTooSlow,
    ContextTooLong,
    InvalidValue,
    MessageTooLarge,
    RateLimitExceeded,
    ServerError,
    TurnFailure,
    UnsupportedValue,
)
from agentserve.interfaces import Principal
from agentserve.large import read_beside
from agentserve.outbox import Outbox
from agentserve.prompt import count_tokens
from agentserve.protocol.codec import encode, error_body_for, sse
from agentserve.protocol.decode import decode
from agentserve.protocol.pieces import check_members
from agentserve.protocol.responses import ErrorDetail, InputTokens, ResponseBody, ResponseCreate
from agentserve.protocol.server_events import Created, Event
from agentserve.request import TurnRequest, accept
from agentserve.security import Receive, Scope, Send
from agentserve.services import Services
from agentserve.turn import run_turn

T = TypeVar("T")
R = TypeVar("R")

FAILED_STATUS = {"context_length_exceeded": 400, "invalid_value": 400, "invalid_prompt": 400, "deadline_exceeded": 408}
"""HTTP status of a failed turn that was not streamed; 500 for the rest."""
BODY_S = 30.0
"""Longest wait for the next piece of a body: a client that lost its network in the middle of one never ends it."""
BODY_WHOLE_S = 60.0
BODY_RATE = 4096
"""A body may take a minute, and a second more for each so many bytes: with a byte every 29 s it would last for years."""
HUNG_UP = 499
"""Status of what nobody waits for any more."""


def json_response(value: Any, status: int = 200) -> Response:
    body = value if isinstance(value, bytes) else encode(value)
    return Response(body, status_code=status, media_type="application/json")


def error_response(error: ApiError, path: str = "") -> Response:
    """path: of the request, which says whose error shape it wants."""
    headers = {}
    if isinstance(error, RateLimitExceeded):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, BodyTooSlow):
        headers["connection"] = "close"
    return Response(error_body_for(path, error), status_code=error.status, media_type="application/json", headers=headers)


class Wire(Protocol):
    """How one turn's answer is written in one API. It may keep what a following event needs to know."""

    def event(self, event: Event) -> bytes:
        """Server-sent events for one event of the turn; empty if this API has none for it."""
        ...

    def whole(self, body: ResponseBody) -> Response:
        """The answer that was not streamed, of a turn that did not fail."""
        ...

    def failed(self, error: ErrorDetail, status: int) -> Response:
        """A turn that was not streamed has failed."""
        ...


class ResponsesWire:
    """Events as they are."""

    def event(self, event: Event) -> bytes:
        return sse(event)

    def whole(self, body: ResponseBody) -> Response:
        return json_response(body)

    def failed(self, error: ErrorDetail, status: int) -> Response:
        return json_response({"error": error}, status)


def headers_of(request: Request) -> Mapping[str, str]:
    return {k.lower(): v for k, v in request.headers.items()}


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises MessageTooLarge without reading past the limit, BodyTooSlow, UnsupportedValue if it is packed."""
    packed = request.headers.get("content-encoding", "identity")
    if packed.lower() != "identity":
        raise UnsupportedValue(f"got '{packed[:64]}'; accepted: identity", "content-encoding")
    said = request.headers.get("content-length")
    if said is not None and int(said) > limit:  # before a client that asked (`Expect: 100-continue`) sends it
        raise MessageTooLarge(f"a body of {said} bytes, at most {limit} are accepted")
    parts: list[bytes] = []
    size = 0
    pieces, clock = request.stream(), asyncio.get_running_loop().time
    begun = clock()
    while True:
        left_s = begun + BODY_WHOLE_S + size / BODY_RATE - clock()
        try:
            async with asyncio.timeout(min(BODY_S, left_s)):
                part = await anext(pieces, None)
        except TimeoutError:
            came = f"{size} bytes {'without an end' if said is None else f'of {said}'}"
            if left_s > BODY_S:
                raise BodyTooSlow(f"no more of the body for {BODY_S:g} s, after {came}") from None
            allowed = f"{BODY_WHOLE_S:g} s and one more for each {BODY_RATE} bytes are allowed"
            raise BodyTooSlow(f"the body comes too slowly: {came} in {clock() - begun:.1f} s; {allowed}") from None
        if part is None:
            return b"".join(parts)
        size += len(part)
        if size > limit:
            raise MessageTooLarge(f"the body is over {limit} bytes")
        parts.append(part)


async def read_object(request: Request, services: Services, kind: type[T]) -> T:
    """The body, decoded; none at all is an object without members. Raises MessageTooLarge, InvalidValue."""
    return await read_as(request, services, kind, lambda body: body)


async def read_as(request: Request, services: Services, kind: type[T], make: Callable[[T], R]) -> R:
    """What `make` makes of the decoded body, both on another thread if the body is large. Raises as both do."""
    raw = await read_body(request, services.config.limits.frame_bytes)

    def read() -> R:
        whole = raw if raw.strip() else b"{}"
        if not whole.lstrip().startswith(b"{"):
            raise InvalidValue(f"the body must be one JSON object in UTF-8; its first byte is 0x{whole.lstrip()[0]:02x}")
        check_members(whole)
        return make(decode(whole, kind))

    return await read_beside(services.reader, len(raw), read)


async def create_response(request: Request, services: Services) -> Response:
    """`POST /v1/responses`."""
    return await answer_turn(request, await _accept(request, services), services, ResponsesWire())


async def count_input_tokens(request: Request, services: Services) -> Response:
    """`POST /v1/responses/input_tokens`: what a create body like this would have as input."""
    return json_response(InputTokens(input_tokens=await count(await _accept(request, services), services)))


async def _accept(request: Request, services: Services) -> TurnRequest:
    principal: Principal = request.state.principal
    headers = headers_of(request)

    def make(create: ResponseCreate) -> TurnRequest:
        return accept(create, principal, services.config, headers, websocket=False)

    return await read_as(request, services, ResponseCreate, make)


async def count(turn: TurnRequest, services: Services) -> int:
    """Tokens of the turn's context. Raises ApiError."""
    try:
        return await count_tokens(turn, services)
    except TurnFailure as failure:
        kind = ContextTooLong if failure.code == "context_length_exceeded" else InvalidValue
        raise kind(failure.message, failure.param) from None


async def answer_turn(request: Request, turn: TurnRequest, services: Services, wire: Wire) -> Response:
    """Run an accepted turn, streamed if it asked for that."""
    if turn.create.stream:
        stream = EventStream(lambda sink: run_turn(turn, services, sink), services, wire)
        stream.more_headers = lambda: services.quotas.headers(turn.principal.id)
        return stream
    response = wire.whole(await _begun(turn, services)) if turn.create.background else None
    response = response or await _whole(request, turn, services, wire)
    response.headers.update(services.quotas.headers(turn.principal.id))
    return response


class _First(Nowhere):
    """Knows the response object of the first event."""

    def __init__(self) -> None:
        self.body: asyncio.Future[ResponseBody] = asyncio.get_running_loop().create_future()

    def put(self, event: Event) -> None:
        if isinstance(event, Created) and not self.body.done():
            self.body.set_result(event.response)


async def _begun(turn: TurnRequest, services: Services) -> ResponseBody:
    """Start a turn that goes on by itself; the response object at its creation. Raises ApiError if it is not created."""
    first = _First()
    task = asyncio.create_task(run_turn(turn, services, first), name=f"background-{turn.id}")
    services.background.add(task)
    task.add_done_callback(services.background.discard)
    await asyncio.wait({task, first.body}, return_when=asyncio.FIRST_COMPLETED)
    return first.body.result() if first.body.done() else task.result()


async def _whole(request: Request, turn: TurnRequest, services: Services, wire: Wire) -> Response:
    task = asyncio.create_task(run_turn(turn, services, Nowhere()), name=f"http-{turn.id}")
    gone = asyncio.create_task(_disconnected(request.receive), name="http-disconnect")
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return Response(status_code=HUNG_UP)
        return _answer(task.result(), wire)
    finally:
        gone.cancel()
        task.cancel()


def _answer(body: ResponseBody, wire: Wire) -> Response:
    if body.error is None:
        return wire.whole(body)
    return wire.failed(body.error, FAILED_STATUS.get(body.error.code, 500))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of one turn, and a Sink for it. Errors before the first event get their own HTTP status.

    run: sends the turn's events into a sink; cancelled when the client leaves.
    """

    def __init__(self, run: Callable[[Sink], Coroutine[Any, Any, ResponseBody]], services: Services, wire: Wire) -> None:
        super().__init__()
        self.more_headers: Callable[[], dict[str, str]] = dict
        self._run = run
        self._wire = wire
        self._task: asyncio.Task[ResponseBody] | None = None
        limits = services.config.limits
        self._outbox = Outbox(
            max_bytes=limits.buffer_bytes,
            max_events=limits.buffer_events,
            slow_s=limits.slow_s,
            on_slow=self._stop,
        )

    @property
    def pressed(self) -> bool:
        return self._outbox.pressed

    @property
    def full(self) -> bool:
        return self._outbox.full

    def put(self, event: Event) -> None:
        if payload := self._wire.event(event):
            self._outbox.put(payload)

    async def room(self) -> None:
        await self._outbox.room()

    def _stop(self) -> None:
        self._outbox.close(drop=True)
        if self._task is not None:
            self._task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._task = asyncio.create_task(self._run(self), name="sse-turn")
        self._task.add_done_callback(lambda _: self._outbox.close(drop=False))
        sender = asyncio.create_task(self._send(scope, receive, send), name="sse-writer")
        gone = asyncio.create_task(_disconnected(receive), name="http-disconnect")
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._task.cancel()
            gone.cancel()
            if not sender.done():
                self._outbox.close(drop=True)
                sender.cancel()
            await asyncio.gather(sender, gone, self._task, return_exceptions=True)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._task is not None
        payload = await self._outbox.get()
        if payload is None and (self._task.cancelled() or self._task.exception() is not None):
            await _failed_to_start(self._task, scope["path"])(scope, receive, send)
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in self.more_headers().items()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while payload is not None:
            await send({"type": "http.response.body", "body": payload, "more_body": True})
            self._outbox.sent()
            payload = await self._outbox.get()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _failed_to_start(task: asyncio.Task[ResponseBody], path: str) -> Response:
    error = None if task.cancelled() else task.exception()
    return error_response(
        error if isinstance(error, ApiError) else ServerError("the server failed before this turn began; retry"), path
    )
