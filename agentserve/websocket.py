"""uvicorn's WebSocket protocol with what ASGI cannot say: send without waiting, and close a socket that does not read.

The socket is found in `scope["extensions"]["agentserve.socket"]`; connection.py works without it too, one task hop slower.
"""

from __future__ import annotations

import struct
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request
from websockets.protocol import State

from agentserve.large import LARGE_BYTES
from agentserve.moment import moment

EXTENSION = "agentserve.socket"
LARGE_TEXT = "agentserve.text"
"""Key of a received text frame of LARGE_BYTES or more: its bytes, to be decoded where nobody waits."""
MOST_GATHERED = 32 << 10
"""Bytes; half of what a transport buffers before it asks for a pause, so that a reader that falls behind is seen as soon."""
NO_TEXT = 1007
_SHORT = struct.Struct("!BBH").pack
_LONG = struct.Struct("!BBQ").pack


class DirectSocket(WebSocketsSansIOProtocol):
    """One socket. Source of the base class's contract: uvicorn 0.34 to 0.54."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        scope: Any = getattr(self, "scope", None)
        if scope is not None:
            scope["extensions"][EXTENSION] = self

    def send_receive_event_to_app(self) -> None:
        """As the base class, which would decode large texts at once, and log a text that is not UTF-8 as an error of ours."""
        if self.curr_msg_data_type != "text" or self.close_sent:
            super().send_receive_event_to_app()
            return
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        try:
            large = len(data) >= LARGE_BYTES
            found = {LARGE_TEXT: bytes(data)} if large else {"text": data.decode()}
        except UnicodeDecodeError:
            self.conn.send_close(NO_TEXT)
            self.handle_parser_exception()
            return
        self.queue.put_nowait({"type": "websocket.receive", **found})  # type: ignore[typeddict-item]
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # a refusal completes it too; the base class would log an error for each

    def send_now(self, payload: bytes) -> bool:
        """Send one text frame (UTF-8). False if the transport's buffer is full; a closed socket swallows it."""
        if not self.writable.is_set():
            return False
        if self.close_sent or self.disconnected or self.conn.state is not State.OPEN or self.transport.is_closing():
            return True  # asyncio would log a warning for every event of a peer that has hung up and is not told of yet
        if self.conn.extensions:
            self.conn.send_text(payload)
            self.transport.write(b"".join(self.conn.data_to_send()))
        else:
            # A whole, unmasked text frame needs no state. Building it here takes a third off a token event's CPU.
            size = len(payload)
            if size < 126:
                head = bytes((0x81, size))
            elif size < 65536:
                head = _SHORT(0x81, 126, size)
            else:
                head = _LONG(0x81, 127, size)
            if moment.lasts:
                self._gather(head + payload)
            else:
                self.transport.write(head + payload)
        return True

    def _gather(self, frame: bytes) -> None:
        if not self._gathered:
            moment.add(self)
        self._gathered.append(frame)
        self._gathered_bytes += len(frame)
        if self._gathered_bytes >= MOST_GATHERED:
            self.write_gathered()

    def write_gathered(self) -> None:
        """What a moment brought, see moment.py."""
        if not self._gathered:
            return
        frames, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not (self.close_sent or self.disconnected or self.transport.is_closing()):
            self.transport.write(b"".join(frames))

    def close_now(self, code: int, reason: str) -> None:
        """Queue a close frame behind what is buffered; give up on a peer that does not answer within `close_timeout`."""
        if self.close_sent or self.disconnected or self.transport.is_closing():
            return
        self.write_gathered()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.conn.send_close(code, reason)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def keepalive_timeout(self) -> None:
        """A peer that answers no ping reads nothing either: do not wait for it to take what is buffered."""
        super().keepalive_timeout()
        self.transport.abort()
