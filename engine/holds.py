"""Held states as their owner sees them: what they are, what they take, copies of them, and the memory that copies go to.

Who refers to which page and row is counted in kvcache/store.py.
"""

from __future__ import annotations

from engine.device.base import Device
from engine.errors import InvalidRequest
from engine.kvcache.arena import ArenaStats, PinnedArena
from engine.kvcache.leaving import Leaving
from engine.kvcache.store import StateStore
from engine.types import HeldState, HoldId, Room, StateSnapshot


class Holds:
    """device: where state lies, None = host memory. Each method that takes a hold raises UnknownHold."""

    def __init__(self, store: StateStore, device: Device | None) -> None:
        self._store, self._device = store, device
        self._arena: PinnedArena | None = None

    def get(self, hold: HoldId) -> HeldState:
        """What a hold names."""
        held = self._store.get(hold)
        return HeldState(held.position, held.tokens, held.logits is not None)

    # ── what they take ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def room(self) -> Room:
        """What is free now."""
        store = self._store
        return Room(
            store.pages.free,
            store.pages.total,
            store.rows.free,
            store.total_rows,
            store.bytes_of(1, 0),
            store.layout.state_bytes,
        )

    @property
    def all_bytes(self) -> int:
        """Bytes of pages and rows of all holds, what they share counted once."""
        return self._store.held_bytes()

    def own_bytes(self, hold: HoldId) -> int:
        """Bytes of pages and row that release() would free now."""
        return self._store.own_bytes(self._store.get(hold))

    # ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────

    def copy_out(self, hold: HoldId, kv_start: int) -> StateSnapshot:
        """A copy on the host, now: KV rows from kv_start on, recurrent components, logits if held.

        Raises InvalidRequest unless 0 ≤ kv_start ≤ position.
        """
        held = self._store.get(hold)
        if not 0 <= kv_start <= held.position:
            raise InvalidRequest("kv_start", kv_start, f"0 to {held.position}")
        return self._store.export(held, kv_start)

    def copy_kv(self, hold: HoldId, start: int, stop: int, each: int) -> Leaving:
        """Begin to copy KV rows [start, stop), in arrays of `each` tokens (0: one). For large states, piece by piece: on a
        device nothing waits for it, and what it reads stays until it is over, whatever becomes of the hold.

        Raises InvalidRequest unless 0 ≤ start ≤ stop ≤ position.
        """
        held = self._store.get(hold)
        if not 0 <= start <= stop <= held.position:
            raise InvalidRequest("stop", (start, stop), f"a range within 0 to {held.position}")
        return self._store.copy(held, start, stop, each)

    def copy_rest(self, hold: HoldId, start: int) -> Leaving:
        """The same of the KV rows from start on, the recurrent components and the logits."""
        held = self._store.get(hold)
        if not 0 <= start <= held.position:
            raise InvalidRequest("start", start, f"0 to {held.position}")
        return self._store.copy(held, start, held.position, rest=True)

    # ── memory for copies ───────────────────────────────────────────────────────────────────────────────────────

    def memory_for_copies(self, limit_bytes: int) -> PinnedArena | None:
        """Where copies go from now on, and whatever is to be restored soon should lie: memory that the device reads and writes
        by itself. Whoever asks lets it be pinned, and gives it back. None: there is no device, any memory does."""
        if self._device is None:
            return None
        self._arena = arena = PinnedArena(self._device, limit_bytes)
        self._store.take = arena.take
        return arena

    def forget_memory(self) -> None:
        """Give that memory back when the device is done with it; copies go to any from now on. Raises DeviceError."""
        arena, self._arena = self._arena, None
        self._store.forget_memory()
        if arena is not None:
            arena.close()

    def memory_stats(self) -> ArenaStats | None:
        """Of the memory for copies; None if there is none."""
        return None if self._arena is None else self._arena.stats()
