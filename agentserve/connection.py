"""One WebSocket: reads frames, runs turns in lanes, writes events. The rules are protocol/machine.py's; this is the I/O.

A refused frame is answered with `error` and the socket stays open. When the client leaves, turns that nobody else follows stop
within one step, but for detached ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET, Struct, UnsetType

from agentserve.context import LocalResponses
from agentserve.errors import (
    ApiError,
    ConnectionLimitReached,
    InvalidStreamId,
    InvalidValue,
    NotFound,
    RateLimitExceeded,
    ServerError,
)
from agentserve.expectation import Expectation
from agentserve.follow import follow
from agentserve.interfaces import Principal
from agentserve.large import read_beside
from agentserve.outbox import Outbox
from agentserve.protocol.codec import encode, error_frame
from agentserve.protocol.decode import decode_frame, peek
from agentserve.protocol.machine import Lanes, stream_id_of
from agentserve.protocol.responses import FollowFrame, ResponseBody, ResponseCancel, ResponseCreate, ResponseSteer
from agentserve.protocol.server_events import Event
from agentserve.request import TurnRequest, accept
from agentserve.security import Receive, Scope, Send, refuse
from agentserve.services import Services
from agentserve.steering import Steering, Submission, read_submission
from agentserve.turn import run_turn
from agentserve.websocket import EXTENSION, LARGE_TEXT, DirectSocket

log = logging.getLogger(__name__)

CLOSE_NORMAL = 1000
CLOSE_RESTART = 1012
CLOSE_SLOW = 1013
CLOSE_INTERNAL = 1011


class Sockets:
    """All open connections: how many there may be, and how they are drained."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.draining = False
        self._open: set[Connection] = set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI handler of the route."""
        principal: Principal = scope["state"]["principal"]
        limits = self.services.config.limits
        mine = sum(1 for c in self._open if c.principal.id == principal.id)
        if self.draining:
            await refuse(scope, receive, send, RateLimitExceeded("the server restarts", 5))
            return
        if len(self._open) >= limits.connections or mine >= limits.connections_per_principal:
            await refuse(scope, receive, send, RateLimitExceeded(f"{mine} connections are open", 10))
            return
        connection = Connection(scope, receive, send, self.services, principal)
        self._open.add(connection)
        self.services.metrics.socket_opened()
        try:
            await connection.serve()
        finally:
            self._open.discard(connection)
            self.services.metrics.socket_closed()

    def drain(self) -> None:
        """Each socket is closed with 1012 after the turns that run on it; nothing that waits is started."""
        self.draining = True
        for connection in tuple(self._open):
            connection.drain()

    def __len__(self) -> int:
        return len(self._open)


@dataclass(frozen=True, slots=True)
class Followed:
    """A response that is told again on a lane. id: the response's. after: number of the last event that the client has."""

    id: str
    stream_id: str | UnsetType
    after: int


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a connection is closed. error: sent before."""

    code: int
    reason: str
    error: ApiError | None = None


Job = TurnRequest | Followed
"""What takes its turn in a lane."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One frame, read. what: an error if it is refused. size: in bytes, of what waits for its lane."""

    lane: str | UnsetType
    what: Job | ResponseCancel | Submission | ApiError
    size: int = 0


class Connection:
    """One accepted socket. It is also the Sink of its turns."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, services: Services, principal: Principal) -> None:
        self.services = services
        self.principal = principal
        self.local = LocalResponses()
        limits = services.config.limits
        self._receive = receive
        self._send = send
        self._headers: Mapping[str, str] = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        self._socket: DirectSocket | None = scope.get("extensions", {}).get(EXTENSION)
        self._lanes: Lanes[Job] = Lanes(limits.lanes, limits.waiting_turns, limits.waiting_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._expectation = Expectation(services.store, services.models, principal)
        self._steering = Steering(self._put_frame)
        self._ending: _Ending | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._outbox = Outbox(
            max_bytes=limits.buffer_bytes,
            max_events=limits.buffer_events,
            slow_s=limits.slow_s,
            on_slow=lambda: self._close(CLOSE_SLOW, "events are not read fast enough"),
            write=None if self._socket is None else self._socket.send_now,
        )

    # ── sink ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pressed(self) -> bool:
        return self._outbox.pressed

    @property
    def full(self) -> bool:
        return self._outbox.full

    def put(self, event: Event) -> None:
        self._outbox.put(encode(event))

    async def room(self) -> None:
        await self._outbox.room()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def serve(self) -> None:
        """From accept to the end of the socket."""
        await self._receive()
        await self._send({"type": "websocket.accept"})
        self._expectation.connected(self._headers)
        writer = self._writer = asyncio.create_task(self._write(), name="socket-writer")
        code = CLOSE_INTERNAL
        age_s = self.services.config.limits.connection_s
        expiry = asyncio.get_running_loop().call_later(age_s, self._expire) if age_s else None
        try:
            while True:
                message = await self._receive()
                if message["type"] == "websocket.disconnect":
                    code = message.get("code") or 1005
                    break
                text = message.get(LARGE_TEXT) or message.get("text")
                size = len(text) if isinstance(text, str | bytes) else 0
                frame = await read_beside(self.services.reader, size, partial(self._read, text))
                if self._act(frame) and self._outbox.full:
                    # Who sends nonsense without reading the answers must not fill the memory with them.
                    await self._outbox.room()
        finally:
            if expiry is not None:
                expiry.cancel()
            self._expectation.close()
            self._lanes.close()
            self._outbox.close(drop=True)
            writer.cancel()
            running = tuple(self._tasks)
            for task in running:
                task.cancel()  # leaves the turn: it stops unless it is detached or others follow it
            await asyncio.gather(writer, *running, return_exceptions=True)
            log.info("socket closed code=%d left_turns=%d", code, len(running))

    def drain(self) -> None:
        """Take no more turns; close once those that run have ended."""
        self._end_after_turns(_Ending(CLOSE_RESTART, "the server restarts"))

    def _expire(self) -> None:
        age_s = self.services.config.limits.connection_s
        error = ConnectionLimitReached(f"this connection is open for {age_s:g} s, its limit; open another")
        self._end_after_turns(_Ending(CLOSE_NORMAL, "the connection has reached its age limit", error))

    def _end_after_turns(self, ending: _Ending) -> None:
        if self._ending is None:
            self._ending = ending
        self._lanes.close()
        if not self._lanes.all_active():
            self._end(self._ending)

    def _end(self, ending: _Ending) -> None:
        if ending.error is not None and self._closing is None:
            self._refuse(ending.error, UNSET)
        self._close(ending.code, ending.reason)

    async def _write(self) -> None:
        """Send what could not be sent at once."""
        while (payload := await self._outbox.get()) is not None:
            await self._send({"type": "websocket.send", "text": payload.decode()})
            self._outbox.sent()

    def _close(self, code: int, reason: str) -> None:
        if self._closing is not None:
            return
        self._outbox.close(drop=code == CLOSE_SLOW)
        log.info("socket closing code=%d reason=%s", code, reason.replace(" ", "_"))
        self._closing = asyncio.create_task(self._close_later(code, reason), name="socket-close")

    async def _close_later(self, code: int, reason: str) -> None:
        if code != CLOSE_SLOW and self._writer is not None:
            await asyncio.wait({self._writer}, timeout=self.services.config.limits.slow_s)
        if self._socket is not None:
            self._socket.close_now(code, reason)
        else:
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    # ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, text: object) -> _Read:
        """What a frame says. Changes nothing: it may run beside everything else."""
        lane: str | UnsetType = UNSET
        try:
            if not isinstance(text, str | bytes):
                raise InvalidValue("binary frames are not accepted; send JSON text")
            envelope = peek(text)
            lane = stream_id_of(envelope.stream_id)
            frame = decode_frame(envelope, text)
            if isinstance(frame, ResponseCreate):
                size = len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode())
                request = accept(frame, self.principal, self.services.config, self._headers, websocket=True)
                return _Read(lane, request, size)
            if isinstance(frame, FollowFrame):
                return _Read(lane, Followed(frame.response_id, lane, frame.starting_after))
            if isinstance(frame, ResponseSteer):
                return _Read(lane, read_submission(frame, self.services.config.limits.items))
            return _Read(lane, frame)
        except ApiError as error:
            return _Read(lane, error)
        except Exception as exc:
            return _Read(lane, self._broke(exc))

    def _act(self, read: _Read) -> bool:
        """Do what a frame says. Returns whether it was answered at once."""
        what, lane = read.what, read.lane
        try:
            match what:
                case TurnRequest():
                    self._expectation.goes_on(what.create.previous_response_id)
                    self._submit(what, read.size)
                    return False
                case Followed():
                    self._submit(what)
                    return False
                case ResponseCancel():
                    self._cancel(what, lane)
                    return False
                case Submission():
                    self._steer(what)
                case _:
                    self._refuse(what, lane)
        except InvalidStreamId as error:
            self._refuse(error, UNSET)
        except ApiError as error:
            self._refuse(error, lane)
        except Exception as exc:
            self._refuse(self._broke(exc), lane)
        return True

    def _broke(self, exc: Exception) -> ServerError:
        log.exception("frame broke error=%s", type(exc).__name__)
        return ServerError("the server failed on this frame")

    def _submit(self, job: Job, size: int = 0) -> None:
        if self._lanes.submit(job.stream_id, job, size):
            self._begin(job)

    def _begin(self, job: Job) -> None:
        if isinstance(job, TurnRequest):
            job = self._steering.merged(job)
        task = asyncio.create_task(self._run(job), name=f"socket-{job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if isinstance(job, TurnRequest):
            self.services.beginning[job.id] = False
            task.add_done_callback(lambda _: self.services.beginning.pop(job.id, None))

    async def _run(self, job: Job) -> None:
        body: ResponseBody | None = None
        try:
            if isinstance(job, TurnRequest):
                body = await run_turn(job, self.services, self, self.local)
            else:
                await follow(self.services, self.principal.id, job.id, self, after=job.after, stream_id=job.stream_id)
        except ApiError as error:
            self._refuse(error, job.stream_id)
        except Exception as exc:
            log.exception("turn broke response=%s error=%s", job.id, type(exc).__name__)
            self._refuse(ServerError("the server failed before this turn began; retry"), job.stream_id)
        finally:
            self._next(job, body)

    def _next(self, job: Job, body: ResponseBody | None) -> None:
        """The lane goes on: with what was steered into the turn, with what waits, or not at all."""
        following: Job | None = None
        if isinstance(job, TurnRequest):
            following = self._steering.ended(job, body, closing=self._lanes.closed)
        if following is None or not self._lanes.succeed(job.stream_id, following):
            following = self._lanes.finished(job.stream_id)
        if following is not None:
            self._begin(following)
        elif self._ending is not None and not self._lanes.all_active():
            self._end(self._ending)

    def _cancel(self, frame: ResponseCancel, lane: str | UnsetType) -> None:
        response_id = frame.response_id
        if response_id is None:
            job = self._lanes.active(lane)
            response_id = None if job is None else job.id
            if response_id in self.services.beginning:  # its context is still looked up
                self.services.beginning[response_id] = True
                return
        turn = None if response_id is None else self.services.active.get(response_id)
        if turn is None or turn.request.principal.id != self.principal.id:
            raise NotFound("no such response is running", "response_id")
        turn.cancel()

    def _steer(self, submission: Submission) -> None:
        target = submission.frame.previous_response_id
        mine = any(job.id == target for job in self._lanes.all_active() if isinstance(job, TurnRequest))
        self._steering.submit(submission, self.services.active.get(target or "") if mine else None)

    def _refuse(self, error: ApiError, lane: str | UnsetType) -> None:
        self.services.metrics.error(error.code)
        self._put_frame(error_frame(error, lane))

    def _put_frame(self, frame: Struct) -> None:
        self._outbox.put(encode(frame))
