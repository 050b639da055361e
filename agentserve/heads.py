"""How long the head of a request may be, in bytes and in time; and answers without chunks for who knows none.

uvicorn's faster parser keeps whatever comes before the empty line, from anybody, and waits for it for ever.
"""

from __future__ import annotations

import asyncio

MAX_HEAD_BYTES = 256 << 10
"""Of request line and headers that are not complete yet. h11, the other parser, stops at 64 KiB by itself."""
HEAD_S = 20.0
"""From the connection, or the first byte of a further request, to the empty line."""
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _UntilClosed(int):
    """The length of a body that ends with its connection. Of HTTP/1.0, which has no chunks; the base class would send some."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClosed:
        return self


def http_protocol() -> type[asyncio.Protocol] | str:
    """The protocol for uvicorn: httptools with a bound where it is installed, else h11."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHttp(HttpToolsProtocol):
        """Counts what has come of an unfinished head, and hangs up when it is too much or takes too long."""

        unfinished = True
        head_bytes = 0
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            self._head_came()
            self.unfinished, self.head_bytes = True, 0
            self.deadline = self.loop.call_later(HEAD_S, self.transport.close)

        def _head_came(self) -> None:
            self.unfinished = False
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.unfinished or self.transport.is_closing():
                return
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_REFUSAL)
                self.transport.close()

        def on_message_begin(self) -> None:
            self._expect_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head_came()
            super().on_headers_complete()
            if self.cycle is not None and self.scope["http_version"] == "1.0":
                self.cycle.chunked_encoding = False
                self.cycle.expected_content_length = _UntilClosed()

    return BoundedHttp
