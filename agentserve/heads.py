"""How long the head of a request may be. uvicorn's faster parser keeps whatever comes before the empty line, from anybody."""

from __future__ import annotations

import asyncio

MAX_HEAD_BYTES = 256 << 10
"""Of request line and headers that are not complete yet. h11, the other parser, stops at 64 KiB by itself."""
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def http_protocol() -> type[asyncio.Protocol] | str:
    """The protocol for uvicorn: httptools with a bound where it is installed, else h11."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHttp(HttpToolsProtocol):
        """Counts what has come of an unfinished head, and hangs up when it is too much."""

        unfinished = True
        head_bytes = 0

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.unfinished or self.transport.is_closing():
                return
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_REFUSAL)
                self.transport.close()

        def on_message_begin(self) -> None:
            self.unfinished, self.head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.unfinished = False
            super().on_headers_complete()

    return BoundedHttp
