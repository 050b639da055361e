"""Events that one read from the worker brings leave in one system call per socket: all, in order, and none held back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from agentserve.moment import moment
from agentserve.websocket import EXTENSION, MOST_GATHERED, DirectSocket
from agentserve.worker.messages import FromWorker, StepTokens, Tokens, TurnFailed
from agentserve.worker.pipe import ServerPipe, append_frame

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closing = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closing = True


@asynccontextmanager
async def open_socket() -> AsyncIterator[tuple[DirectSocket, Transport]]:
    opened: asyncio.Future[DirectSocket] = asyncio.get_running_loop().create_future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        opened.set_result(scope["extensions"][EXTENSION])
        await receive()

    config = uvicorn.Config(app, log_config=None, ws_ping_interval=None, lifespan="off")
    config.load()
    protocol, transport = DirectSocket(config, ServerState(), {}, asyncio.get_running_loop()), Transport()
    protocol.connection_made(transport)
    protocol.data_received(HANDSHAKE)
    socket = await opened
    transport.written.clear()
    try:
        yield socket, transport
    finally:
        protocol.connection_lost(None)
        await asyncio.gather(*protocol.tasks)


def frame(payload: bytes) -> bytes:
    return bytes((0x81, len(payload))) + payload


async def test_what_a_moment_brings_is_written_at_its_end_at_once_and_in_order() -> None:
    async with open_socket() as (socket, transport):
        socket.send_now(b"before")
        with moment:
            assert socket.send_now(b"one")
            assert socket.send_now(b"two")
            assert transport.written == [frame(b"before")]
        assert transport.written == [frame(b"before"), frame(b"one") + frame(b"two")]
        socket.send_now(b"after")
        assert transport.written[2:] == [frame(b"after")]


async def test_each_socket_of_a_moment_gets_its_own() -> None:
    async with open_socket() as (first, to_first), open_socket() as (second, to_second):
        with moment:
            first.send_now(b"1")
            second.send_now(b"2")
            first.send_now(b"3")
        assert (to_first.written, to_second.written) == ([frame(b"1") + frame(b"3")], [frame(b"2")])


async def test_a_reader_that_falls_behind_is_seen_within_a_moment() -> None:
    async with open_socket() as (socket, transport):
        with moment:
            while not transport.written:
                assert socket.send_now(b"x" * 100)
            assert MOST_GATHERED <= len(transport.written[0]) < MOST_GATHERED + 200
            socket.pause_writing()
            assert not socket.send_now(b"y")
        assert len(transport.written) == 1


async def test_a_close_goes_behind_what_was_gathered_and_nothing_behind_it() -> None:
    async with open_socket() as (socket, transport):
        with moment:
            socket.send_now(b"one")
            socket.close_now(1000, "")
            socket.send_now(b"two")
        assert [written[:2] for written in transport.written] == [b"\x81\x03", b"\x88\x02"]


async def test_a_peer_that_hung_up_is_written_nothing() -> None:
    async with open_socket() as (socket, transport):
        with moment:
            socket.send_now(b"one")
            transport.closing = True
        assert transport.written == []


async def test_a_moment_that_breaks_is_over_all_the_same() -> None:
    async with open_socket() as (socket, transport):

        def breaks() -> None:
            with moment:
                socket.send_now(b"one")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            breaks()
        assert not moment.lasts
        assert transport.written == [frame(b"one")]


TOKENS = [Tokens(turn_id=f"t{n}", ids=(n,)) for n in range(2)]


@pytest.mark.parametrize(
    ("sent", "gathers"),
    [
        ([TOKENS[0]], False),
        ([StepTokens(("t0", "t1"), (0, 1))], True),
        (TOKENS, True),
        ([TOKENS[0], TurnFailed("t0", "server_error", "why")], True),
    ],
)
async def test_one_read_is_a_moment_unless_it_is_one_event(sent: list[FromWorker | StepTokens], gathers: bool) -> None:
    seen: list[bool] = []
    pipe = ServerPipe(lambda _: seen.append(moment.lasts), lambda _: None)
    data = bytearray()
    for one in sent:
        append_frame(data, pipe._encode(one))
    pipe.data_received(bytes(data))
    assert set(seen) == {gathers}
    assert not moment.lasts
