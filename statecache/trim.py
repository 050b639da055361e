"""A budget that was made smaller while states lie there: what is over it goes, a few at a time.

Nothing is written to such a tier until it fits. What is being read, copied or pinned stays, and is looked at again later. Not
thread-safe: StateCache calls it under its lock.
"""

from __future__ import annotations

from statecache.residency import Residency
from statecache.shelf import Shelf
from statecache.types import TierName

PIECE = 8
"""Checkpoints that leave at once; on a disk each is a few files."""
LOOK_AGAIN_S = 1.0


class Trim:
    def __init__(self, kept: Residency) -> None:
        self._kept = kept
        self._order: dict[Shelf, list[str]] = {}
        self._stuck_until = 0.0

    def set_budget(self, name: TierName, budget_bytes: int) -> bool:
        """False: there is no such tier, or it is the engine's."""
        for shelf in self._kept.shelves:
            if shelf.tier.name == name:
                shelf.tier.budget_bytes = budget_bytes
                self._begin(shelf)
                return True
        return False

    def _begin(self, shelf: Shelf) -> None:
        shelf.shrinking = shelf.tier.used_bytes > shelf.tier.budget_bytes
        self._order.pop(shelf, None)
        self._stuck_until = 0.0

    @property
    def work_waits(self) -> bool:
        """Something is over a budget. May be asked without the lock."""
        return any(shelf.shrinking for shelf in self._kept.shelves)

    def work(self) -> bool:
        """Let a few go. False: nothing is over, or what is cannot go now."""
        if not self.work_waits or self._kept.clock() < self._stuck_until:
            return False
        left = sum(self._piece(shelf) for shelf in self._kept.shelves if shelf.shrinking)
        if not left and self.work_waits:
            self._stuck_until = self._kept.clock() + LOOK_AGAIN_S
        return left > 0

    def _piece(self, shelf: Shelf) -> int:
        """How many left."""
        tier, records, left = shelf.tier, self._kept.records, 0
        order = self._order.get(shelf) or self._kept.victims(shelf)[::-1]
        while order and left < PIECE and tier.used_bytes > tier.budget_bytes:
            record = records.get(order.pop())
            if record is None or record.id not in shelf.holdings or record.in_use or record.pins:
                continue  # not what it was when they were put in order
            self._kept.evict_from(shelf, record)
            left += 1
        self._order[shelf] = order
        if tier.used_bytes <= tier.budget_bytes:
            shelf.shrinking = False
            del self._order[shelf]
        return left
