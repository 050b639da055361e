"""A cache bounded by bytes, oldest use first out. For immutable values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

ENTRY_BYTES = 250
"""What a value takes beside its own weight: its key, a place in the dict, headers of objects. Most of what small ones take."""


class Kept(Generic[T]):
    """limit_bytes: what all may take together; each put says the weight of its value. Thread-safe.

    size_bytes: what they take now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self.size_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> T | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: str, value: T, size: int) -> None:
        with self._lock:
            self._drop(key)
            self._values[key] = (value, size + ENTRY_BYTES)
            self.size_bytes += size + ENTRY_BYTES
            while self.size_bytes > self._limit and len(self._values) > 1:
                self._drop(next(iter(self._values)))

    def drop(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.size_bytes = 0

    def _drop(self, key: str) -> None:
        if key in self._values:
            self.size_bytes -= self._values.pop(key)[1]
