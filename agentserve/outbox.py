"""Unsent events of one connection: bounded, in order, written at once where the socket takes them.

Holds payloads, not events; adjacent deltas are joined before they get here (see turn.py), once `pressed` says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Outbox:
    """Queue of payloads between turns and a socket.

    max_bytes, max_events: where it is full. slow_s: how long it may stay full before `on_slow` is called, once.
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
        self.closed = False

    @property
    def pressed(self) -> bool:
        """An eighth full: time to join deltas."""
        return bool(self._queue) and (len(self._queue) * 8 >= self._max_events or self._bytes * 8 >= self._max_bytes)

    @property
    def full(self) -> bool:
        return not self._has_room.is_set()

    def put(self, payload: bytes) -> None:
        """Send or queue; after `close` it is dropped. Never blocks, so a few small events may overshoot the bound."""
        if self.closed or (not self._queue and self._write is not None and self._write(payload)):
            return
        self._queue.append(payload)
        self._bytes += len(payload)
        self._filled.set()
        if self._has_room.is_set() and (len(self._queue) >= self._max_events or self._bytes >= self._max_bytes):
            self._has_room.clear()
            self._timer = asyncio.get_running_loop().call_later(self._slow_s, self._still_full)

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
        if not self._has_room.is_set() and len(self._queue) * 2 <= self._max_events and self._bytes * 2 <= self._max_bytes:
            self._make_room()

    def close(self, *, drop: bool) -> None:
        """Take no more. drop: also forget what is queued."""
        self.closed = True
        if drop:
            self._queue.clear()
            self._bytes = 0
        self._make_room()
        self._filled.set()

    def _make_room(self) -> None:
        self._has_room.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _still_full(self) -> None:
        self._timer = None
        self._on_slow()
