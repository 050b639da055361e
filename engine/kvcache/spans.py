"""Arrays that lie side by side in memory, as one: a copy has a price of its own, whatever it moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np


class Span:
    """Bytes at an address, for numpy; `keeps` lives as long as they are looked at."""

    __slots__ = ("__array_interface__", "keeps")

    def __init__(self, address: int, nbytes: int, keeps: object) -> None:
        self.keeps = keeps
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def joined(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The bytes of contiguous arrays in order, as uint8 [n]: as few as cover them. Nothing is copied.

    The results may be written to even where an array says that it may not.
    """
    group: list[np.ndarray] = []
    first = end = 0
    for array in arrays:
        if not array.nbytes:
            continue
        address = _address(array)
        if address != end and group:
            yield _as_one(first, end, group)
            group = []
        if not group:
            first = address
        group.append(array)
        end = address + array.nbytes
    if group:
        yield _as_one(first, end, group)


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.__array_interface__["data"][0]


def _as_one(first: int, end: int, group: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(Span(first, end - first, tuple(group)))
