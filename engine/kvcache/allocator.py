"""Reference-counted ids: which pages and rows are taken, and how often. Integers only; see pool.py for the bytes."""

from __future__ import annotations

import numpy as np

from engine.errors import OutOfPages, OutOfRows


class RefAllocator:
    """Ids 0 … total−1, each free or referenced n ≥ 1 times. room: what total may grow to.

    The last freed id is given out first, so that warm memory is used again.
    """

    def __init__(self, total: int, shortage: type[OutOfPages] | type[OutOfRows], room: int | None = None) -> None:
        room = total if room is None else room
        self.total = total
        self.refs = np.zeros(room, dtype=np.int32)
        self._shortage = shortage
        self._stack = np.empty(room, dtype=np.int32)
        self._stack[:total] = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._top = total

    @property
    def free(self) -> int:
        return self._top

    def take(self, count: int) -> np.ndarray:
        """count fresh ids (int32), each referenced once. Raises OutOfPages or OutOfRows and takes nothing if too few."""
        if count > self._top:
            raise self._shortage(count, self._top)
        self._top -= count
        ids = self._stack[self._top : self._top + count][::-1].copy()
        self.refs[ids] = 1
        return ids

    def retain(self, ids: np.ndarray) -> None:
        """One more reference to each of ids (distinct, all taken)."""
        self.refs[ids] += 1

    def release(self, ids: np.ndarray) -> np.ndarray:
        """One reference less to each of ids (distinct). Returns those that became free."""
        self.refs[ids] -= 1
        left = self.refs[ids]
        assert left.size == 0 or left.min() >= 0, "released an id that was free"
        freed = ids[left == 0]
        self._stack[self._top : self._top + len(freed)] = freed
        self._top += len(freed)
        return freed

    def move(self, sources: np.ndarray, dests: np.ndarray) -> None:
        """Let free ids stand for taken ones, with all their references. sources become free."""
        assert not self.refs[dests].any(), "moved onto an id that is taken"
        self.refs[dests] = self.refs[sources]
        self.refs[sources] = 0
        self._list_free()

    def resize(self, total: int) -> None:
        """Give out ids 0 … total−1 only, from now on. Those that go must be free."""
        assert not self.refs[total:].any(), "an id that is taken cannot go"
        self.total = total
        self._list_free()

    def _list_free(self) -> None:
        free = np.flatnonzero(self.refs[: self.total] == 0)[::-1]
        self._top = len(free)
        self._stack[: self._top] = free

    def check(self, references: list[np.ndarray]) -> None:
        """Assert that exactly these references exist, and that what nobody references is free, once each."""
        counted = np.zeros(len(self.refs), dtype=np.int64)
        for ids in references:
            np.add.at(counted, ids, 1)
        assert np.array_equal(counted, self.refs), f"references {counted.tolist()}, counts {self.refs.tolist()}"
        free = np.sort(self._stack[: self._top])
        assert np.array_equal(free, np.flatnonzero(self.refs[: self.total] == 0)), "the free list is not what is unreferenced"
