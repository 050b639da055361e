"""What a turn takes that has the server to itself: measured for suffixes behind contexts, and in between along straight lines.

A suffix costs the more the longer the context that it looks back on, so each turn's own time follows from both. Seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

SIZES = (64, 256, 1024, 4096, 8000)
"""Suffixes that are measured behind each context, as far as they fit."""
CONTEXTS = 6
"""Contexts, from none on, evenly spread below the longest."""

LoneS = Callable[[int, int], float]
"""(suffix, context behind which it stands) → TTFT."""


def unhurried(suffix: int, behind: int) -> float:
    """Of turns that are not compared with anything: no deadline of theirs matters."""
    return 300.0


def deadline_s(lone_s: float) -> float:
    return 3 * lone_s + 0.25


def sizes_behind(behind: int, room: int) -> list[int]:
    """What is measured behind a context: each size, the larger ones as much of it as fits. room: tokens of the longest context,
    less the answer."""
    return sorted({min(size, room - behind) for size in SIZES if room > behind})


class Lone:
    """points: (behind, suffix, TTFT), any number of each; the median counts. room: as `sizes_behind` has it."""

    def __init__(self, points: Sequence[tuple[int, int, float]], room: int) -> None:
        found: dict[int, dict[int, list[float]]] = {}
        for behind, suffix, seconds in points:
            found.setdefault(behind, {}).setdefault(suffix, []).append(seconds)
        self.points = {
            behind: [(suffix, median(times)) for suffix, times in sorted(found[behind].items())] for behind in sorted(found)
        }
        self._lines = [(behind, interpolate(points)) for behind, points in self.points.items()]
        self._room = room

    def own_s(self, suffix: int, behind: int) -> float:
        """Of that suffix behind that context."""
        lines = self._lines
        if len(lines) == 1:
            return lines[0][1](suffix)
        above = next((i for i, (depth, _) in enumerate(lines) if depth >= behind), len(lines) - 1)
        (low, least), (high, most) = lines[max(0, above - 1)], lines[max(1, above)]
        share = max(0.0, (behind - low) / (high - low))
        return max(0.0, least(suffix) + share * (most(suffix) - least(suffix)))

    def usual_s(self, suffix: int) -> float:
        """The median over the contexts behind which it was, or could have been, measured."""
        fits = [line(suffix) for behind, line in self._lines if behind + suffix <= self._room]
        return median(fits or [self._lines[0][1](suffix)])


def interpolate(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Straight lines between (size, seconds), and as far beyond them as the nearest line goes."""
    ordered = sorted(points)

    def value(size: int) -> float:
        for (a, low), (b, high) in pairwise(ordered):
            if size <= b:
                return max(low if size >= a else 0.0, low + (high - low) * (size - a) / (b - a)) if b > a else low
        return ordered[-1][1] * size / ordered[-1][0]

    return value
