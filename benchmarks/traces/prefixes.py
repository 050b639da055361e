"""Longest common token prefixes, computed without any code of the cache: the independent yardstick of every replay."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that agree from the start."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class Known:
    """Token sequences seen so far. In sorted order the longest common prefix with all of them is that with a neighbour."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []
        self._whole: set[bytes] = set()

    def longest(self, ids: np.ndarray) -> int:
        """Tokens that `ids` shares with the sequence that shares most."""
        key = ids.astype(">u4").tobytes()
        at = bisect_left(self._sorted, key)
        neighbours = self._sorted[max(0, at - 1) : at + 1]
        return max((common_prefix(ids, np.frombuffer(other, ">u4")) for other in neighbours), default=0)

    def reusable(self, prompt: np.ndarray) -> int:
        """Tokens of a prompt that an ideal cache need not compute: one is left, unless the very prompt was computed before."""
        if prompt.astype(">u4").tobytes() in self._whole:
            return len(prompt)
        return min(self.longest(prompt), len(prompt) - 1)

    def add(self, prompt: np.ndarray, generated: np.ndarray) -> int:
        """Remember a turn; how many of its tokens, without the last sampled one, are on no known path."""
        whole = np.concatenate([prompt, generated])
        computed = whole[: len(whole) - 1] if len(generated) else whole
        fresh = len(computed) - min(self.longest(computed), len(computed))
        key = whole.astype(">u4").tobytes()
        at = bisect_left(self._sorted, key)
        if at == len(self._sorted) or self._sorted[at] != key:
            self._sorted.insert(at, key)
        self._whole.add(prompt.astype(">u4").tobytes())
        return fresh
