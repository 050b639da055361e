"""How far predictions are off by their size, as permille of them: towards any quantile of what comes. Integers only.

What comes later and goes before a turn cannot be known; the longer the turn, the more of it there is, so that each size has a
correction of its own. A quantile, not a mean: a mean follows the few turns that many others pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVEN = 1000
"""Permille: predictions are right as they are."""
LEAST, MOST = 250, 6000
SIZES = 7
"""Of predictions: up to 64 ms, four times that, and so on."""
STEP = 24
"""Permille that a correction moves by at most after one turn: with more it follows a crowd that is gone by the next one."""
NEWS = 16
"""Turns of a size that move it twice as far, since nothing is known of it."""
NEAR = 50
"""A turn that took what was predicted, but for a fiftieth, changes nothing."""


@dataclass(frozen=True, slots=True)
class Expected:
    """µs from now to a first token. usual: as often too much as too little. cautious: few turns take longer. raw: before either
    correction. alone: nothing else ran or waited."""

    usual: int
    cautious: int
    raw: int
    alone: bool


class Correction:
    """percent: of the turns of each size that are to come no later than predicted. known: permille, as `known` gave them."""

    def __init__(self, percent: int, known: Sequence[int] = ()) -> None:
        self._up, self._down = STEP * percent // 100, STEP * (100 - percent) // 100
        self._compared = [0] * SIZES
        self.known = [EVEN] * SIZES
        if len(known) == SIZES:
            self.known = [min(MOST, max(LEAST, permille)) for permille in known]

    def of(self, us: int) -> int:
        """The prediction `us`, corrected."""
        return us * self.known[size_of(us)] // EVEN

    def came(self, us: int, actual: int) -> None:
        """What was predicted to take `us`, before any correction, took `actual`."""
        size = size_of(us)
        known, off = self.known[size], actual * EVEN - us * self.known[size]
        self._compared[size] += 1
        if abs(off) * NEAR > actual * EVEN:
            step = (self._up if off > 0 else -self._down) * (2 if self._compared[size] <= NEWS else 1)
            self.known[size] = min(MOST, max(LEAST, known + known * step // 1000))


def size_of(us: int) -> int:
    """Which correction a prediction has."""
    return min(SIZES - 1, max(0, (us.bit_length() - 15) // 2))
