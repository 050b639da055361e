"""Recorded turns as work: what each restores, prefills and generates, and when it arrives. Deterministic by seed.

From the coding-agent recording of benchmarks/data: contexts, suffixes behind the best earlier context of the session, answers
and pauses are as recorded; which sessions run beside each other is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.traces.data import BlockTurn, block_sessions

BLOCK = 64
MOST_PAUSE_S = 120.0
"""Longer pauses are nights and meals; what lies in between is not load."""


@dataclass(frozen=True, slots=True)
class Job:
    """One turn. arrival: µs. restored, suffix: prompt tokens that are saved, and that are not. output: tokens generated.

    session: number; ram: whether the saved state is still in memory.
    """

    arrival: int
    session: int
    restored: int
    suffix: int
    output: int
    ram: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn within its session, pause: µs since the one before it."""

    pause: int
    restored: int
    suffix: int
    output: int


class Deck:
    """Turns in an order of chance, each once before any comes again: what is drawn of it often has the same share of long ones.

    drawn: so far.
    """

    def __init__(self, turns: Sequence[Turn], rng: random.Random) -> None:
        self._turns, self._rng = list(turns), rng
        self._left: list[Turn] = []
        self.drawn: list[Turn] = []

    def draw(self) -> Turn:
        if not self._left:
            self._left = self._rng.sample(self._turns, len(self._turns))
        self.drawn.append(self._left.pop())
        return self.drawn[-1]


def recorded_sessions(most_context: int, limit: int | None = None) -> list[list[Turn]]:
    """Sessions of the recording, each turn with what it shares with the best of the eight before it.

    most_context: longer turns are left out, as a client of that machine would have compacted before.
    """
    return [turns for session in block_sessions(limit=limit) if (turns := _turns(session, most_context))]


def _turns(session: Sequence[BlockTurn], most_context: int) -> list[Turn]:
    found: list[Turn] = []
    earlier: list[np.ndarray] = []
    last = session[0].t if session else 0.0
    for turn in session:
        shared = max((_common(blocks, turn.blocks) for blocks in earlier), default=0) * BLOCK
        pause = min(turn.t - last, MOST_PAUSE_S)
        earlier = [*earlier[-7:], turn.blocks]
        last = turn.t
        if turn.input_tokens <= most_context:
            restored = min(shared, turn.input_tokens - 1)
            found.append(Turn(round(pause * 1e6), restored, turn.input_tokens - restored, max(1, turn.output_tokens)))
    return found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def open_loop(sessions: Sequence[Sequence[Turn]], *, turns: int, mean_us: int, seed: int) -> list[Job]:
    """`turns` arrivals, `mean_us` apart on average, whatever becomes of them: a Poisson process.

    Each is the next turn of one of 40 sessions that run at a time; one that ends gives its place to another, cold one.
    """
    rng = random.Random(seed)
    places: list[tuple[int, int, int]] = []
    serial = 0
    jobs: list[Job] = []
    now = 0
    while len(jobs) < turns:
        now += round(rng.expovariate(1.0) * mean_us)
        while len(places) < 40:
            which = rng.randrange(len(sessions))
            # Somewhere in the middle, so that not all begin cold at once; what is before it lies in memory.
            places.append((serial, which, rng.randrange(len(sessions[which])) if serial < 40 else 0))
            serial += 1
        place = rng.randrange(len(places))
        number, which, at = places[place]
        turn = sessions[which][at]
        jobs.append(Job(now, number, turn.restored, turn.suffix, turn.output, ram=rng.random() < 0.9))
        if at + 1 < len(sessions[which]):
            places[place] = (number, which, at + 1)
        else:
            places.pop(place)
    return jobs
