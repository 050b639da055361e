"""Reference-counted ids: which pages and rows are taken, and how often. Integers only; see pool.py for the bytes."""

from __future__ import annotations

import numpy as np

from engine.errors import OutOfPages, OutOfRows


class RefAllocator:
    """Ids 0 … total−1, each free or referenced n ≥ 1 times.

    The last freed id is given out first, so that warm memory is used again.
    """

    def __init__(self, total: int, shortage: type[OutOfPages] | type[OutOfRows]) -> None:
        self.total = total
        self.refs = np.zeros(total, dtype=np.int32)
        self._shortage = shortage
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int32)
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

    def check(self, references: list[np.ndarray]) -> None:
        """Assert that exactly these references exist, and that what nobody references is free, once each."""
        counted = np.zeros(self.total, dtype=np.int64)
        for ids in references:
            np.add.at(counted, ids, 1)
        assert np.array_equal(counted, self.refs), f"references {counted.tolist()}, counts {self.refs.tolist()}"
        free = np.sort(self._stack[: self._top])
        assert np.array_equal(free, np.flatnonzero(self.refs == 0)), "the free list is not what is unreferenced"
