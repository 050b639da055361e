"""Length-prefixed msgspec-msgpack frames over a socket pair: splitting, the blocking worker end, the asyncio server end.

A frame is `u32le length ‖ msgpack`. Several frames travel in one write (a step's events leave together), yet each stays a
frame of its own but for neighbouring Tokens of one id, which take one together and are apart again at the other end: with
many turns that is most of what is said. Knows no other meaning of a frame; see messages.py and client.py.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterable
from typing import cast

import msgspec

from agentserve.moment import moment
from agentserve.worker.messages import FromWorker, StepTokens, Tokens, ToWorker

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
"""A prompt of 16 M tokens is 64 MiB; a longer length field means that the stream is out of step."""
READ_BYTES = 1 << 18


class PipeClosed(Exception):
    """The other process ended or closed its side."""


class FrameTooLong(Exception):
    """A length field beyond MAX_FRAME_BYTES; the stream cannot be trusted any more."""

    def __init__(self, length: int) -> None:
        super().__init__(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are accepted")


class FrameSplitter:
    """Cuts a byte stream into frames. Sans-I/O; keeps at most one incomplete frame."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[memoryview]:
        """Return the complete payloads, in order. The views are valid until the next call. Raises FrameTooLong."""
        if not self._rest and len(data) > HEADER.size and HEADER.unpack_from(data)[0] == len(data) - HEADER.size:
            return [memoryview(data)[HEADER.size :]]  # one whole frame, as a paced stream sends them
        if self._rest:
            self._rest += data
            data = self._rest
        view = memoryview(data)
        end, at = len(view), 0
        payloads: list[memoryview] = []
        while end - at >= HEADER.size:
            (length,) = HEADER.unpack_from(view, at)
            if length > MAX_FRAME_BYTES:
                raise FrameTooLong(length)
            if end - at - HEADER.size < length:
                break
            at += HEADER.size
            payloads.append(view[at : at + length])
            at += length
        if payloads or not self._rest:
            # A new bytearray, since one with views on it cannot be resized.
            self._rest = bytearray(view[at:])
        else:
            view.release()  # a long frame still grows in place, without a copy for each piece
        return payloads


def append_frame(buffer: bytearray, payload: bytes) -> None:
    """Add one frame to an output buffer."""
    buffer += HEADER.pack(len(payload))
    buffer += payload


class WorkerPipe:
    """The worker's end: blocking, one thread, output gathered until `flush`.

    wake: another socket that ends a wait when it becomes readable (a signal handler writes to its peer).
    """

    def __init__(self, sock: socket.socket, wake: socket.socket | None = None) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._awaited = [sock] if wake is None else [sock, wake]
        self._splitter = FrameSplitter()
        self._out = bytearray()
        self._step: list[Tokens] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode

    def send(self, frame: FromWorker) -> None:
        """Queue a frame for the next flush."""
        if type(frame) is Tokens and len(frame.ids) == 1 and not frame.logprobs:
            self._step.append(frame)
            return
        if self._step:
            self._join_step()
        append_frame(self._out, self._encode(frame))

    def _join_step(self) -> None:
        step, self._step = self._step, []
        one = step[0] if len(step) == 1 else StepTokens(tuple([f.turn_id for f in step]), tuple([f.ids[0] for f in step]))
        append_frame(self._out, self._encode(one))

    def flush(self) -> None:
        """Write everything queued; blocks while the server's buffer is full. Raises PipeClosed."""
        if self._step:
            self._join_step()
        if not self._out:
            return
        out, self._out = self._out, bytearray()
        try:
            self._sock.sendall(out)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PipeClosed from error

    def receive(self, timeout_s: float | None = 0.0) -> list[ToWorker]:
        """Frames that have arrived. timeout_s: 0 = only look, None = wait for the first byte. Raises PipeClosed at the end."""
        if timeout_s != 0.0:
            ready, _, _ = select.select(self._awaited, [], [], timeout_s)
            for wake in ready:
                if wake is not self._sock:
                    wake.recv(READ_BYTES)
        frames: list[ToWorker] = []
        while True:
            try:
                data = self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return frames
            except ConnectionResetError as error:
                raise PipeClosed from error
            if not data:
                raise PipeClosed
            frames.extend(self._decode(payload) for payload in self._splitter.feed(data))
            if len(data) < READ_BYTES:
                return frames

    def close(self) -> None:
        self._sock.close()


class ServerPipe(asyncio.Protocol):
    """The server's end: decodes what arrives and hands every frame to `on_frame`; `on_close` is called once at the end.

    on_frame(frame): called in the event loop, must not block. on_close(error): error None when the worker just ended.
    """

    def __init__(self, on_frame: Callable[[FromWorker], None], on_close: Callable[[Exception | None], None]) -> None:
        self._on_frame = on_frame
        self._on_close = on_close
        self._splitter = FrameSplitter()
        self._transport: asyncio.WriteTransport | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromWorker | StepTokens).decode

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        on_frame, decode = self._on_frame, self._decode
        try:
            payloads = self._splitter.feed(data)
            frames: Iterable[FromWorker | StepTokens] = map(decode, payloads)
            if len(payloads) == 1:
                frame = decode(payloads[0])
                if not isinstance(frame, StepTokens):
                    on_frame(frame)  # nothing to gather
                    return
                frames = (frame,)
            with moment:
                for frame in frames:
                    if isinstance(frame, StepTokens):
                        for turn_id, token_id in zip(frame.turn_ids, frame.ids, strict=True):
                            on_frame(Tokens(turn_id=turn_id, ids=(token_id,)))
                    else:
                        on_frame(frame)
        except (FrameTooLong, msgspec.MsgspecError) as error:
            assert self._transport is not None
            self._transport.abort()
            self._on_close_once(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_close_once(exc)

    def _on_close_once(self, error: Exception | None) -> None:
        self._transport = None
        on_close, self._on_close = self._on_close, lambda _: None
        on_close(error)

    def send(self, frame: ToWorker) -> None:
        """Queue a frame; raises PipeClosed when the worker is gone."""
        if self._transport is None or self._transport.is_closing():
            raise PipeClosed
        buffer = bytearray()
        append_frame(buffer, self._encode(frame))
        self._transport.write(buffer)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(
    sock: socket.socket, on_frame: Callable[[FromWorker], None], on_close: Callable[[Exception | None], None]
) -> ServerPipe:
    """Take over `sock` for the running event loop."""
    loop = asyncio.get_running_loop()
    _, pipe = await loop.create_unix_connection(lambda: ServerPipe(on_frame, on_close), sock=sock)
    return pipe
