"""Whether decode misses are shared between link and CPU or go one way only, by what steps were seen to take. Integers only.

The cost model can be wrong about a machine: so each way is tried for a short window now and then, and the fastest one is used.
The difference must be clear, since switching costs a colder cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["hybrid", "fetch", "cpu"]
MODES: tuple[Mode, ...] = ("hybrid", "fetch", "cpu")
WINDOW_STEPS = 32
TRY_EVERY = 32
"""Windows between two tries of another mode: 1 step in 32 is spent on it while the modes are far apart."""
CLEAR_PERMILLE = 970
"""Another mode must take at most this much of the time."""
DROP_PERMILLE = 1300
"""A mode seen to be slower than this is tried a quarter as often."""


@dataclass(slots=True)
class ModeChoice:
    """One per batch size class: a batch of four misses other experts than one token does."""

    mode: Mode = "hybrid"
    ns: dict[Mode, int] = field(default_factory=dict)
    """Nanoseconds of a step, newest windows weigh a third."""
    windows: int = 0
    _trying: Mode | None = None
    _seen: list[int] = field(default_factory=list)
    _tried: int = 0

    @property
    def current(self) -> Mode:
        """What the next step uses."""
        return self.mode if self._trying is None else self._trying

    def record(self, step_ns: int) -> bool:
        """A step of the current mode took this long. True if `current` has changed."""
        self._seen.append(step_ns)
        if len(self._seen) < WINDOW_STEPS:
            return False
        before, middle = self.current, sorted(self._seen)[WINDOW_STEPS // 2]
        self._seen.clear()
        old = self.ns.get(before)
        self.ns[before] = middle if old is None else (2 * old + middle) // 3
        self.windows += 1
        self._trying = None
        best = min(self.ns, key=lambda mode: (self.ns[mode], MODES.index(mode)))
        if self.ns[best] * 1000 <= self.ns.get(self.mode, self.ns[best]) * CLEAR_PERMILLE:
            self.mode = best
        unknown: list[Mode] = [mode for mode in MODES if mode not in self.ns]
        if unknown:
            self._trying = unknown[0]
        elif self.windows % TRY_EVERY == 0:
            self._trying = self._next_try()
        return self.current != before

    def _next_try(self) -> Mode | None:
        others: list[Mode] = [mode for mode in MODES if mode != self.mode]
        self._tried += 1
        mode: Mode = others[self._tried % len(others)]
        hopeless = self.ns[mode] * 1000 > self.ns[self.mode] * DROP_PERMILLE
        return None if hopeless and self._tried % 4 else mode
