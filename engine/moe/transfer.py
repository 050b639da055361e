"""The ring: slots lent to prefill, through which missing experts are streamed. Integers only; the caller copies and computes.

A ring slot goes empty → filling → ready → empty. Lending cleared its owner in both maps, and it gets none while in the ring, so
decode can never hit bytes that are about to change. What a slot held last may stay as a resident when the ring is returned.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from engine.moe.slots import NONE, SlotMap


class RingState(Enum):
    EMPTY = "empty"
    FILLING = "filling"
    READY = "ready"


class Ring:
    """Slots borrowed from a SlotMap until `close`."""

    def __init__(self, slots: SlotMap, count: int, active: Iterable[int] = ()) -> None:
        """Borrow up to `count` of the coldest slots; flat ids in `active` keep theirs."""
        self._slots = slots
        self._state = dict.fromkeys(slots.lend(count, active), RingState.EMPTY)
        self._holds: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._state)

    def begin(self, flat_id: int) -> int:
        """An empty slot to copy this expert into, or NONE: release one first."""
        slot = next((s for s, state in self._state.items() if state is RingState.EMPTY), NONE)
        if slot != NONE:
            self._state[slot] = RingState.FILLING
            self._holds[slot] = flat_id
        return slot

    def ready(self, slot: int) -> None:
        """The copy is complete: kernels may read the slot."""
        assert self._state[slot] is RingState.FILLING
        self._state[slot] = RingState.READY

    def readable(self, slot: int, flat_id: int) -> bool:
        """Whether a kernel may read this expert from this slot now."""
        return self._state.get(slot) is RingState.READY and self._holds[slot] == flat_id

    def release(self, slot: int) -> None:
        """No kernel reads the slot any more: it may be filled again (its bytes stay until then)."""
        assert self._state[slot] is RingState.READY
        self._state[slot] = RingState.EMPTY

    def holder(self, flat_id: int) -> int:
        """The slot that still holds this expert whole although nothing reads it any more, or NONE."""
        held = (s for s, state in self._state.items() if state is RingState.EMPTY and self._holds.get(s) == flat_id)
        return next(held, NONE)

    def exchange(self, slot: int, resident: int) -> None:
        """Let the expert that lies whole in an empty ring slot stay as a resident; the ring takes another resident's slot for
        it, owner cleared."""
        assert self._state[slot] is RingState.EMPTY
        del self._state[slot]
        self._slots.give_back(slot, self._holds.pop(slot))
        self._slots.clear(resident)
        self._slots.lent.add(resident)
        self._state[resident] = RingState.EMPTY

    def close(self, keep: bool = True) -> None:
        """Give every slot back. keep: experts that lie there whole become residents. A slot still filling holds nothing."""
        for slot, state in self._state.items():
            whole = keep and state is not RingState.FILLING
            self._slots.give_back(slot, self._holds.get(slot, NONE) if whole else NONE)
        self._state.clear()
        self._holds.clear()
