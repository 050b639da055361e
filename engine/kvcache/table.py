"""A running request's line in the page table: which page holds which positions. Integers only."""

from __future__ import annotations

import numpy as np
import torch


class PageTable:
    """Page ids in position order.

    borrowed_tail: the last page is partly filled and came from a hold, so other requests may hold or write it; see
    StateStore.grow. `view` gives the tensor that a forward pass reads; it is remade only when the page count asked for
    changes, so that decoding costs no Python per page.
    """

    __slots__ = ("_ids", "_tensor", "_view", "_viewed", "borrowed_tail", "count")

    def __init__(self, pages: np.ndarray, borrowed_tail: bool = False) -> None:
        self.count = len(pages)
        self.borrowed_tail = borrowed_tail
        self._resize(max(8, self.count), pages)

    def _resize(self, capacity: int, pages: np.ndarray) -> None:
        self._ids = np.empty(capacity, dtype=np.int32)
        self._ids[: len(pages)] = pages
        self._tensor = torch.from_numpy(self._ids)
        self._view = self._tensor[: self.count]
        self._viewed = self.count

    @property
    def pages(self) -> np.ndarray:
        """int32 [count], a view."""
        return self._ids[: self.count]

    def append(self, pages: np.ndarray) -> None:
        count = self.count + len(pages)
        if count > len(self._ids):
            self._resize(max(count, 2 * len(self._ids)), self.pages)
        self._ids[self.count : count] = pages
        self.count = count

    def rename(self, renamed: np.ndarray) -> None:
        """Pages have moved: renamed[old id] is the new one. Views follow."""
        self._ids[: self.count] = renamed[self._ids[: self.count]]

    def replace_tail(self, page: int) -> None:
        self._ids[self.count - 1] = page
        self.borrowed_tail = False

    def view(self, count: int) -> torch.Tensor:
        """int32 [count]: the first count pages, sharing this table's memory."""
        if self._viewed != count:
            self._view = self._tensor[:count]
            self._viewed = count
        return self._view
