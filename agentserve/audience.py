"""Who follows a turn: each listener gets every event once and in order, whenever it came, and none waits for a slower one.

A listener that comes late, or that fell behind while another did not, is told what it missed from the turn's history and is
live again after that. When the last one leaves, a turn that was not detached stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from agentserve.errors import LostEvents
from agentserve.protocol.responses import ResponseBody
from agentserve.protocol.server_events import Event


class Sink(Protocol):
    """Where a turn's events go. `put` never blocks; `room` waits while the reader is too far behind."""

    @property
    def pressed(self) -> bool:
        """The reader falls behind: adjacent deltas are worth joining."""
        ...

    @property
    def full(self) -> bool: ...

    def put(self, event: Event) -> None: ...

    async def room(self) -> None: ...


class Nowhere:
    """Sink of a turn whose events nobody reads."""

    pressed = False
    full = False

    def put(self, event: Event) -> None:
        pass

    async def room(self) -> None:
        pass


class Listener:
    """One reader. next_number: of the event that it gets next. live: it gets events as they come."""

    def __init__(self, sink: Sink, stream_id: str | UnsetType, next_number: int) -> None:
        self.sink = sink
        self.next_number = next_number
        self.live = False
        self.wake = asyncio.Event()
        self._lane = stream_id

    def put(self, event: Event) -> None:
        self.next_number = event.sequence_number + 1
        self.sink.put(on_lane(event, self._lane))


def on_lane(event: Event, stream_id: str | UnsetType) -> Event:
    """The event as a reader of this lane is to see it."""
    return event if event.stream_id == stream_id else msgspec.structs.replace(event, stream_id=stream_id)


class Audience:
    """All listeners of one turn; it is the turn's Sink.

    history: events from a number on, as they were sent. task: makes the task that runs the turn, started with the first
    listener. detached: the turn goes on without any.
    """

    def __init__(
        self,
        *,
        history: Callable[[int], Sequence[Event]],
        task: Callable[[], asyncio.Task[ResponseBody]],
        detached: bool,
    ) -> None:
        self.detached = detached
        self._history = history
        self._make_task = task
        self._task: asyncio.Task[ResponseBody] | None = None
        self._listeners: list[Listener] = []
        self._sent = 0
        self._changed = asyncio.Event()

    # ── sink ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def pressed(self) -> bool:
        for one in self._listeners:  # noqa: SIM110  asked for every token: a generator costs more than the answer
            if one.live and one.sink.pressed:
                return True
        return False

    @property
    def full(self) -> bool:
        """Only a single listener holds the turn back; of several, one that is behind catches up by itself."""
        return len(self._listeners) == 1 and self._listeners[0].live and self._listeners[0].sink.full

    def put(self, event: Event) -> None:
        self._sent = event.sequence_number + 1
        several = len(self._listeners) > 1
        for one in self._listeners:
            if not one.live:
                continue
            if several and one.sink.full:
                one.live = False
                one.wake.set()
            else:
                one.put(event)

    async def room(self) -> None:
        """Until the single listener has room, or is no longer the only one."""
        if not self.full:
            return
        self._changed.clear()
        waits = [asyncio.ensure_future(self._listeners[0].sink.room()), asyncio.ensure_future(self._changed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # ── listeners ────────────────────────────────────────────────────────────────────────────────────────────────

    async def attend(self, sink: Sink, stream_id: str | UnsetType = UNSET, *, next_number: int = 0) -> ResponseBody:
        """Send a listener every event from `next_number` on; returns the final body once it has the last one.

        Cancelling it means that the listener leaves.
        """
        one = Listener(sink, stream_id, next_number)
        self._listeners.append(one)
        self._changed.set()
        if self._task is None:
            one.live = next_number == 0
            self._task = self._make_task()
            self._task.add_done_callback(self._ended)
        task = self._task
        try:
            while True:
                await self._catch_up(one)
                if task.done():
                    return task.result()
                one.wake.clear()
                await one.wake.wait()
        finally:
            self._listeners.remove(one)
            self._changed.set()
            if not self._listeners and not self.detached and not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def ended(self, limit_s: float) -> None:
        """Until the turn has ended, for at most limit_s."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_s)

    async def _catch_up(self, one: Listener) -> None:
        while not one.live:
            first = one.next_number
            for event in self._history(first):
                one.put(event)
                if one.sink.full:
                    await one.sink.room()
            one.live = one.next_number >= self._sent  # nothing was sent while it waited for room
            if not one.live and one.next_number == first:
                raise LostEvents(first, self._sent)  # and not ask again for ever

    def _ended(self, _: asyncio.Task[ResponseBody]) -> None:
        for one in self._listeners:
            one.wake.set()
