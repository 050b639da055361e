"""The engine's holds as the state cache's first tier, and when its pools count as short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agentserve.worker.ports import EnginePort
from engine.kvcache.leaving import Leaving
from engine.types import HoldId, Room

ROOM_SHARE = 4
"""One part in so many of pages and rows is kept free between turns: a turn begins without waiting for copies."""


def is_short(room: Room) -> bool:
    """Whether held states should leave the pools before anybody asks for the room."""
    return ROOM_SHARE * room.free_pages < room.total_pages or ROOM_SHARE * room.free_rows < room.total_rows


class EnginePools:
    """Implements statecache.device.Pools. release: as the bridge does it, which never raises."""

    def __init__(self, engine: EnginePort, release: Callable[[HoldId], None]) -> None:
        self._engine = engine
        self._release = release

    @property
    def used_bytes(self) -> int:
        return self._engine.held_bytes

    @property
    def budget_bytes(self) -> int:
        room = self._engine.room
        return room.total_pages * room.page_bytes + room.total_rows * room.row_bytes

    def tokens(self, hold: int) -> np.ndarray:
        return self._engine.held(HoldId(hold)).tokens.astype(np.uint32)

    def rows(self, hold: int, start: int, stop: int, each: int) -> Leaving:
        return self._engine.copy_kv(HoldId(hold), start, stop, each)

    def rest(self, hold: int, start: int) -> Leaving:
        return self._engine.copy_rest(HoldId(hold), start)

    def own_bytes(self, hold: int) -> int:
        return self._engine.own_bytes(HoldId(hold))

    def release(self, hold: int) -> None:
        self._release(HoldId(hold))
