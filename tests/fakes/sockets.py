"""A WebSocket client that reads only when told to: sockets, handshake and frames by hand."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

from tests.fakes.server import TOKEN, FakeServer


def raw_socket(
    server: FakeServer, *, receive_buffer: int, headers: str = f"Authorization: Bearer {TOKEN}\r\n"
) -> socket.socket:
    """A connected and upgraded socket with a small receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.port))
    key = base64.b64encode(os.urandom(16)).decode()
    sock.sendall(
        f"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n{headers}\r\n".encode()
    )
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += sock.recv(1)
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return sock


def posted(server: FakeServer, path: str, body: Any) -> socket.socket:
    """A connection on which a request was sent and nothing is read; its client leaves when it is closed."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


def client_frame(text: str, opcode: int = 1) -> bytes:
    """One masked frame (mask 0, so that the payload stays readable)."""
    data = text.encode()
    if len(data) < 126:
        head = struct.pack("!BB", 0x80 | opcode, 0x80 | len(data))
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 0xFF, len(data))
    return head + b"\0\0\0\0" + data


def frames(sock: socket.socket) -> Iterator[tuple[int, bytes]]:
    """(opcode, payload) of every frame, up to the end of the connection."""
    with sock.makefile("rb") as stream:
        while len(head := stream.read(2)) == 2:
            opcode, length = head
            if length == 126:
                (length,) = struct.unpack("!H", stream.read(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", stream.read(8))
            yield opcode & 15, stream.read(length)


def read_frames(sock: socket.socket) -> Iterator[str]:
    """Text frames up to and with the first terminal event."""
    ends = tuple(f'{{"type":"response.{word}"'.encode() for word in ("completed", "failed", "incomplete"))
    for opcode, data in frames(sock):
        if opcode == 1:
            yield data.decode()
            if data.startswith(ends):
                return


def close_code(sock: socket.socket) -> int | None:
    """Code of the close frame behind everything that is still unread; None if there is none."""
    return next((struct.unpack("!H", data[:2])[0] for opcode, data in frames(sock) if opcode == 8), None)
