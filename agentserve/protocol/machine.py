"""Which frame is legal when, without any I/O: the order of a response's events, and a connection's lanes.

ResponseOrder guards what the server sends: canonical order, sequence numbers without gaps, exactly one terminal event.
Lanes decides what a client frame starts, queues or is refused with. Both are driven by real sockets and by tests alike.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec import UNSET, UnsetType

from agentserve.errors import IllegalEvent, InvalidStreamId, RateLimitExceeded, StreamLimitReached

T = TypeVar("T")

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}\Z", re.ASCII)

RETRY_S = 5
"""After which a turn that found no room is worth another try: those before it end sooner or later."""

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})

# State → event → next state. An item's states are named after its type; `closing` waits for output_item.done.
_ORDER: dict[str, dict[str, str]] = {
    "new": {"response.created": "open"},
    "open": {
        "response.queued": "open",
        "response.in_progress": "open",
        "added:compaction": "compaction",
        "added:reasoning": "reasoning",
        "added:message": "message",
        "added:function_call": "function_call",
        "added:custom_tool_call": "custom_tool_call",
        **dict.fromkeys(TERMINAL, "ended"),
    },
    "reasoning": {
        "response.reasoning_text.delta": "reasoning",
        "response.reasoning_text.done": "closing",
    },
    "message": {"response.content_part.added": "part"},
    "part": {
        "response.output_text.delta": "part",
        "response.output_text.done": "part_done",
    },
    "part_done": {"response.content_part.done": "closing"},
    "function_call": {
        "response.function_call_arguments.delta": "function_call",
        "response.function_call_arguments.done": "closing",
    },
    "custom_tool_call": {
        "response.custom_tool_call_input.delta": "custom_tool_call",
        "response.custom_tool_call_input.done": "closing",
    },
    # Behind it the turn waits again, for the first token of its answer.
    "compaction": {"response.output_item.done": "open"},
    "closing": {"response.output_item.done": "between"},
    "ended": {},
}
_ORDER["between"] = {
    k: v for k, v in _ORDER["open"].items() if (k.startswith("added:") and k != "added:compaction") or k in TERMINAL
}
for _state, _legal in _ORDER.items():
    if _state not in ("new", "ended"):
        for _own in ("agentserve.prefill.progress", "agentserve.cache.report", "agentserve.deadline"):
            _legal[_own] = _state


class ResponseOrder:
    """Canonical order of one response's events. `advance` gives each event its sequence number."""

    __slots__ = ("_legal", "next_number", "state")

    def __init__(self) -> None:
        self.state = "new"
        self.next_number = 0
        self._legal = _ORDER["new"]

    def advance(self, event: str) -> int:
        """Sequence number of `event` (an item's begin is `added:<item type>`). Raises IllegalEvent and changes nothing."""
        state = self._legal.get(event)
        if state is None:
            raise IllegalEvent(self.state, event)
        if state != self.state:
            self.state = state
            self._legal = _ORDER[state]
        number = self.next_number
        self.next_number = number + 1
        return number

    @property
    def started(self) -> bool:
        return self.state != "new"

    @property
    def ended(self) -> bool:
        return self.state == "ended"


@dataclass(slots=True)
class Lane(Generic[T]):
    """One FIFO of turns. active: the turn that runs now. waiting: those behind it, with their bytes."""

    name: str | None
    active: T | None = None
    waiting: deque[tuple[T, int]] = field(default_factory=deque)


def stream_id_of(value: Any) -> str | UnsetType:
    """A valid `stream_id`, or UNSET for the default lane. Raises InvalidStreamId."""
    if value is None:
        return UNSET
    if not isinstance(value, str) or _STREAM_ID.match(value) is None:
        raise InvalidStreamId("stream_id has 1 to 256 of the characters A-Z a-z 0-9 _ - .", "stream_id")
    return value


class Lanes(Generic[T]):
    """Lanes of one connection: FIFO per lane, one active turn per lane, lanes interleave.

    A lane keeps its name for the life of the connection. max_lanes counts named ones; max_waiting counts queued turns of all,
    max_waiting_bytes their bytes.
    """

    def __init__(self, max_lanes: int = 32, max_waiting: int = 64, max_waiting_bytes: int = 64 << 20) -> None:
        self.max_lanes = max_lanes
        self.max_waiting = max_waiting
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0
        self.closed = False
        self._lanes: dict[str | None, Lane[T]] = {None: Lane(None)}

    def submit(self, stream_id: str | UnsetType, turn: T, size: int = 0) -> bool:
        """True: start it now. False: it waits its turn; after `close` it is dropped. size: bytes that it takes while it waits.

        Raises StreamLimitReached, RateLimitExceeded.
        """
        if self.closed:
            return False
        lane = self._open(stream_id)
        if lane.active is None:
            lane.active = turn
            return True
        if self.waiting >= self.max_waiting:
            raise RateLimitExceeded(f"{self.waiting} turns wait on this connection, at most {self.max_waiting}", RETRY_S)
        if self.waiting_bytes + size > self.max_waiting_bytes:
            held = f"turns of {self.waiting_bytes} bytes wait on this connection, at most {self.max_waiting_bytes} may"
            raise RateLimitExceeded(f"{held}; this one has {size}", RETRY_S)
        self.waiting_bytes += size
        lane.waiting.append((turn, size))
        return False

    def finished(self, stream_id: str | UnsetType) -> T | None:
        """The lane's active turn ended; returns the next one to start. After `close` nothing starts."""
        lane = self._lanes[None if stream_id is UNSET else stream_id]
        lane.active = None
        if lane.waiting:
            lane.active, size = lane.waiting.popleft()
            self.waiting_bytes -= size
        return lane.active

    def succeed(self, stream_id: str | UnsetType, turn: T) -> bool:
        """The lane's active turn ended and this one goes on from it, before what waits. False after `close`: nothing starts."""
        if self.closed:
            return False
        self._lanes[None if stream_id is UNSET else stream_id].active = turn
        return True

    def active(self, stream_id: str | UnsetType) -> T | None:
        lane = self._lanes.get(None if stream_id is UNSET else stream_id)
        return None if lane is None else lane.active

    def all_active(self) -> tuple[T, ...]:
        return tuple(lane.active for lane in self._lanes.values() if lane.active is not None)

    @property
    def waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def close(self) -> None:
        """Drop what waits; what runs may end."""
        self.closed = True
        self.waiting_bytes = 0
        for lane in self._lanes.values():
            lane.waiting.clear()

    def _open(self, stream_id: str | UnsetType) -> Lane[T]:
        name = None if stream_id is UNSET else stream_id
        assert name is None or isinstance(name, str)
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) > self.max_lanes:
                raise StreamLimitReached(f"{self.max_lanes} named streams are open on this connection", "stream_id")
            lane = self._lanes[name] = Lane(name)
        return lane
