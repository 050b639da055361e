"""A WebSocket client that costs as little as it can: one server is measured by hundreds of these in one process.

Reads whole, unfragmented frames without extensions, as this server sends them, and answers pings.
"""

from __future__ import annotations

import asyncio
import base64
import os
import struct
from collections import deque
from collections.abc import Callable

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10


class Closed(Exception):
    """The socket is closed; code: as the server gave it, 1006 if it gave none."""

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with code {code}")
        self.code = code


class Socket(asyncio.Protocol):
    """on_frame(payload): called for each text frame; without it they are queued for `receive`."""

    def __init__(self, on_frame: Callable[[memoryview], None] | None = None) -> None:
        self._on_frame = on_frame
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self.code: int | None = None

    @classmethod
    async def connect(cls, port: int, on_frame: Callable[[memoryview], None] | None = None) -> Socket:
        """Raises Closed if the server refuses, OSError if there is none."""
        loop = asyncio.get_running_loop()
        _, socket = await loop.create_connection(lambda: cls(on_frame), "127.0.0.1", port)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ["GET /v1/responses HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        assert socket._transport is not None
        socket._transport.write("\r\n".join(lines).encode())
        await socket._open
        return socket

    def send(self, text: str) -> None:
        self._write(TEXT, text.encode())

    def raw(self, data: bytes) -> None:
        """Bytes as they are, also what is no frame."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def stop_reading(self) -> None:
        """Take nothing more from the server."""
        if self._transport is not None:
            self._transport.pause_reading()

    async def receive(self) -> bytes:
        """The next text frame. Raises Closed."""
        while not self._frames:
            if self.code is not None:
                raise Closed(self.code)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._frames.popleft()

    def close(self) -> None:
        """Say goodbye and hang up."""
        if self.code is None:
            self._write(CLOSE, struct.pack("!H", 1000))
            self.abort()

    def abort(self) -> None:
        """Vanish."""
        if self._transport is not None:
            self._transport.abort()

    # ── protocol ─────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.code = self.code or 1006
        if not self._open.done():
            self._open.set_exception(Closed(self.code))
        self._wake()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        if not self._open.done():
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            if not buffer.startswith(b"HTTP/1.1 101"):
                self.code = 1006
                self._open.set_exception(Closed(int(buffer[9:12])))
                return
            del buffer[: end + 4]
            self._open.set_result(None)
        at, size = 0, len(buffer)
        view = memoryview(buffer)
        while size - at >= 2:
            length, start = buffer[at + 1] & 0x7F, at + 2
            if length == 126:
                if size - start < 2:
                    break
                (length,) = struct.unpack_from("!H", buffer, start)
                start += 2
            elif length == 127:
                if size - start < 8:
                    break
                (length,) = struct.unpack_from("!Q", buffer, start)
                start += 8
            if size - start < length:
                break
            with view[start : start + length] as payload:
                self._take(buffer[at] & 0x0F, payload)
            at = start + length
        view.release()
        if at:
            del buffer[:at]

    def _take(self, kind: int, payload: memoryview) -> None:
        if kind == TEXT:
            if self._on_frame is not None:
                self._on_frame(payload)
            else:
                self._frames.append(bytes(payload))
                self._wake()
        elif kind == PING:
            self._write(PONG, bytes(payload))
        elif kind == CLOSE:
            self.code = struct.unpack("!H", payload[:2])[0] if len(payload) >= 2 else 1005
            self._write(CLOSE, bytes(payload[:2]))
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _write(self, kind: int, payload: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        size = len(payload)
        head = bytes((0x80 | kind,))
        if size < 126:
            head += bytes((0x80 | size,))
        elif size < 1 << 16:
            head += struct.pack("!BH", 0x80 | 126, size)
        else:
            head += struct.pack("!BQ", 0x80 | 127, size)
        # A mask of zeros is a mask; nothing between here and the server could be confused by it.
        self._transport.write(head + bytes(4) + payload)
