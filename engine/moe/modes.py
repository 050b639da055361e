"""Whether decode misses are shared between link and CPU or go one way only, by what steps were seen to take. Integers only.

The cost model can be wrong about a machine: so each way is tried for a short window now and then, and the fastest one is used.
While the cache of experts fills, steps become faster whatever the way, and the one tried last looks best: so rounds over all
ways are run, back and forth, until a round is about as fast as the one before it. One window says little where ways are nearly
as fast, so those are tried again until that is known, and more often later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["hybrid", "whole", "cpu", "fetch"]
"""whole: shared like hybrid, but by whole experts only."""
MODES: tuple[Mode, ...] = ("hybrid", "whole", "cpu", "fetch")
WINDOW_STEPS = 32
SETTLE_STEPS = 2
"""First steps of a mode that do not count: they may have been launched in the one before."""
STEADY_PERMILLE = 900
"""A round of which no mode takes less than this of its time in the round before is believed."""
MOST_ROUNDS = 6
WORTH_PERMILLE = 1600
"""A mode that takes more than this much of the round's best time sits the next rounds out."""
SURE_WINDOWS = 3
"""Windows of a mode after which its time is believed."""
TRY_EVERY = 32
"""Windows between two tries of another mode: 1 step in 32 is spent on it while the modes are far apart."""
TRY_NEAR_EVERY = 8
NEAR_PERMILLE = 1080
"""Modes that take at most this much of the best one's time are tried more often, which costs a hundredth at most."""
CLEAR_PERMILLE = 985
"""Another mode must take at most this much of the time, since switching costs a colder cache."""
DROP_PERMILLE = 1300
"""A mode seen to be slower than this is tried a quarter as often."""


@dataclass(slots=True)
class ModeChoice:
    """One per batch size class: a batch of four misses other experts than one token does. modes: to choose from."""

    mode: Mode = "hybrid"
    modes: Sequence[Mode] = MODES
    ns: dict[Mode, int] = field(default_factory=dict)
    """Nanoseconds of a step: of the last round, then the mean of the first windows, then newest windows weigh a third."""
    windows: int = 0
    _trying: Mode | None = None
    _seen: list[int] = field(default_factory=list)
    _measured: dict[Mode, int] = field(default_factory=dict)
    _tried: int = 0
    _rounds: int = 0
    _round: list[Mode] = field(default_factory=list)
    """What is still to be tried in this round."""
    _before: dict[Mode, int] = field(default_factory=dict)
    """Times of the round before."""
    _steady: bool = False

    def __post_init__(self) -> None:
        self._round = list(self.modes)
        self._trying = self._round.pop(0)

    @property
    def current(self) -> Mode:
        """What the next step uses."""
        return self.mode if self._trying is None else self._trying

    def record(self, step_ns: int) -> bool:
        """A step of the current mode took this long. True if `current` has changed."""
        self._seen.append(step_ns)
        if len(self._seen) < WINDOW_STEPS + SETTLE_STEPS:
            return False
        before = self.current
        self._take(before, sorted(self._seen[SETTLE_STEPS:])[WINDOW_STEPS // 2])
        self._seen.clear()
        self.windows += 1
        if not self._steady:
            self._trying = self._learn()
        if self._steady:
            best = min(self.ns, key=lambda mode: (self.ns[mode], self.modes.index(mode)))
            if self.ns[best] * 1000 <= self.ns.get(self.mode, self.ns[best]) * CLEAR_PERMILLE:
                self.mode = best
            self._trying = self._next_try()
        return self.current != before

    def _learn(self) -> Mode | None:
        """The next mode of the rounds with which it begins; after the last one they are believed."""
        if not self._round:
            self._rounds += 1
            still = all(self.ns[mode] * 1000 >= before * STEADY_PERMILLE for mode, before in self._before.items())
            self._steady = len(self.modes) == 1 or (self._rounds > 1 and still) or self._rounds == MOST_ROUNDS
            if self._steady:
                return None
            best = min(self.ns.values())
            worth: list[Mode] = [mode for mode in self.modes if self.ns[mode] * 1000 <= best * WORTH_PERMILLE]
            self._round = worth if self._rounds % 2 == 0 else worth[::-1]
            self._before = dict(self.ns)
            self._measured = dict.fromkeys(set(self.modes) - set(worth), 1)  # the others' next window counts alone
        return self._round.pop(0)

    def _take(self, mode: Mode, ns: int) -> None:
        count = self._measured[mode] = self._measured.get(mode, 0) + 1
        weight = min(count, SURE_WINDOWS)
        self.ns[mode] = ((weight - 1) * self.ns.get(mode, 0) + ns) // weight

    def _next_try(self) -> Mode | None:
        """None: go on with the best."""
        near: list[Mode] = [mode for mode in self.modes if self.ns[mode] * 1000 <= min(self.ns.values()) * NEAR_PERMILLE]
        unsure: list[Mode] = [mode for mode in near if self._measured[mode] < SURE_WINDOWS]
        if len(near) > 1 and unsure:
            return min(unsure, key=lambda mode: self._measured[mode])
        others: list[Mode] = [mode for mode in near if mode != self.mode]
        if others and self.windows % TRY_NEAR_EVERY == 0 and self.windows % TRY_EVERY:
            return min(others, key=lambda mode: self._measured[mode])
        return None if self.windows % TRY_EVERY else self._far_try()

    def _far_try(self) -> Mode | None:
        others: list[Mode] = [mode for mode in self.modes if mode != self.mode]
        if not others:
            return None
        self._tried += 1
        mode: Mode = others[self._tried % len(others)]
        hopeless = self.ns[mode] * 1000 > self.ns[self.mode] * DROP_PERMILLE
        return None if hopeless and self._tried % 4 else mode
