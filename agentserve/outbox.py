"""Unsent events of one connection: bounded, in order, written at once where the socket takes them.

Holds payloads, not events; adjacent deltas are joined before they get here (see turn.py), once `pressed` says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Outbox:
    """Queue of payloads between turns and a socket.

    max_bytes, max_events: where it is full. slow_s: how long it may stay full, or not move at all, before `on_slow` is called.
    full: nothing more should be put before `room` returns.
    write: hands a payload to the socket and returns True, or returns False if it would have to wait.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_events: int,
        slow_s: float,
        on_slow: Callable[[], None],
        write: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_events = max_events
        self._slow_s = slow_s
        self._on_slow = on_slow
        self._write = write
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._timer: asyncio.TimerHandle | None = None
        self._moved_at = 0.0
        self._full_since: float | None = None
        self.full = False
        self.closed = False

    @property
    def pressed(self) -> bool:
        """An eighth full: time to join deltas."""
        return bool(self._queue) and (len(self._queue) * 8 >= self._max_events or self._bytes * 8 >= self._max_bytes)

    def put(self, payload: bytes) -> None:
        """Send or queue; after `close` it is dropped. Never blocks, so a few small events may overshoot the bound."""
        if self.closed or (not self._queue and self._write is not None and self._write(payload)):
            return
        self._queue.append(payload)
        self._bytes += len(payload)
        self._filled.set()
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._moved_at = loop.time()
            self._timer = loop.call_later(self._slow_s, self._look)
        if not self.full and (len(self._queue) >= self._max_events or self._bytes >= self._max_bytes):
            self.full = True
            self._has_room.clear()
            self._full_since = loop.time()

    async def room(self) -> None:
        """Wait until it is no longer full, or closed."""
        await self._has_room.wait()

    async def get(self) -> bytes | None:
        """The oldest payload; None once closed and empty. It stays counted until `sent`."""
        while not self._queue:
            if self.closed:
                return None
            self._filled.clear()
            await self._filled.wait()
        return self._queue[0]

    def sent(self) -> None:
        """The payload of the last `get` is out."""
        if not self._queue:
            return
        self._bytes -= len(self._queue.popleft())
        self._moved_at = asyncio.get_running_loop().time()
        if self.full and len(self._queue) * 2 <= self._max_events and self._bytes * 2 <= self._max_bytes:
            self.full = False
            self._has_room.set()
            self._full_since = None

    def close(self, *, drop: bool) -> None:
        """Take no more. drop: also forget what is queued."""
        self.closed = True
        if drop:
            self._queue.clear()
            self._bytes = 0
        self.full = False
        self._has_room.set()
        self._filled.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Is the reader too slow? Otherwise look again when it could be."""
        self._timer = None
        if not self._queue:
            return
        loop = asyncio.get_running_loop()
        since = self._moved_at if self._full_since is None else min(self._moved_at, self._full_since)
        left_s = since + self._slow_s - loop.time()
        if left_s <= 0:
            self._on_slow()
        else:
            self._timer = loop.call_later(left_s, self._look)
