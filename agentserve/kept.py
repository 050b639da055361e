"""A cache bounded by bytes, oldest use first out. For immutable values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

ENTRY_BYTES = 250
"""What a value takes beside its own weight: its key, a place in the dict, headers of objects. Most of what small ones take."""
PER_JSON_BYTE = 10
"""What decoded JSON takes for each byte of its text: an empty list three bytes later is 64, a word in a dict a hundred."""


class Kept(Generic[K, T]):
    """limit_bytes: what all may take together; each put says the weight of its value. Thread-safe.

    size_bytes: what they take now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._values: OrderedDict[K, tuple[T, int]] = OrderedDict()
        self.size_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> T | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: K, value: T, size: int) -> None:
        with self._lock:
            self._drop(key)
            self._put(key, value, size)

    def setdefault(self, key: K, value: T, size: int) -> T:
        """What is there, else `value`, which is put there."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                self._put(key, value, size)
                return value
            self._values.move_to_end(key)
            return found[0]

    def drop(self, key: K) -> None:
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.size_bytes = 0

    def _put(self, key: K, value: T, size: int) -> None:
        self._values[key] = (value, size + ENTRY_BYTES)
        self.size_bytes += size + ENTRY_BYTES
        while self.size_bytes > self._limit and len(self._values) > 1:
            self._drop(next(iter(self._values)))

    def _drop(self, key: K) -> None:
        if key in self._values:
            self.size_bytes -= self._values.pop(key)[1]
