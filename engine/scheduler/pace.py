"""What a step costs, learned from steps: decoding rows, prefill tokens and the context that they look back on.

A least-squares fit of relative error that forgets. Numbers only; whoever has the clock calls `observe`. Times are µs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul, truediv

import numpy as np

LEAST_CHUNK = 64
"""Tokens to which a chunk may be shortened for the sake of running answers."""
KNEE = 64
"""Prefill tokens up to which each may cost more: the first ones of a step pull in most of a layer's experts."""
_SCALE = (1, 1, 1 << 12, KNEE, 1 << 9, 1 << 20)
"""Of the features: the step itself, rows, their context, tokens up to the knee, tokens, pairs."""
_GUESS = (5_000.0, 5_000.0, 0.0, 16_000.0, 512_000.0, 100_000.0)
_FORGET = 0.98
_PRIOR = 0.0001
"""Weight of what was known before, against the steps: enough to decide what they say nothing about, and no more."""
_OUTLIER = 4.0
_SOLVE_EVERY = 8
_TRUSTED = 16
"""Steps after which one that is far off counts as an interruption of the machine, and is only let in in part."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step. rows: decoding requests, context: tokens they look back on together. prefill: prompt tokens, pairs: sum over
    them of the tokens before each."""

    rows: int = 0
    context: int = 0
    prefill: int = 0
    pairs: int = 0


def pairs(start: int, end: int) -> int:
    """Tokens that the prompt tokens [start, end) look back on, summed."""
    return (end - start) * (start + end) // 2


class Pace:
    """The cost of steps on this machine with this model. Starts from a guess, or from what another process learned.

    Steps with and without prefill are forgotten apart: a thousand decode steps say nothing about prefill and must not wash out
    what is known of it. The weights are not negative, in units of _SCALE.
    """

    def __init__(self) -> None:
        self._weights = _GUESS
        self._seen = [0, 0]
        size = len(_SCALE)
        self._a = np.zeros((2, size, size))
        self._b = np.zeros((2, size))
        self._noted: tuple[list[tuple[float, ...]], ...] = ([], [])

    @property
    def seen(self) -> int:
        """Steps with prefill that were learned from."""
        return self._seen[1]

    def observe(self, work: Work, us: int) -> None:
        """A step took `us`."""
        if not work.rows and not work.prefill:
            return
        kind = int(work.prefill > 0)
        x = _features(1, work.rows, work.context, min(work.prefill, KNEE), work.prefill, work.pairs)
        if self._seen[kind] >= _TRUSTED:
            us = min(us, round(_OUTLIER * max(1.0, self._expected(x))))
        share = 1 / max(us, 1)  # relative error: a decode step counts as much as a long chunk
        self._noted[kind].append(tuple(share * number for number in x))
        self._seen[kind] += 1

    @property
    def _unsolved(self) -> int:
        return len(self._noted[0]) + len(self._noted[1])

    def step_us(self, work: Work) -> int:
        """What such a step is expected to take."""
        prefill = work.prefill
        return round(self._expected(_features(1, work.rows, work.context, min(prefill, KNEE), prefill, work.pairs)))

    def prefill_us(self, context: int, tokens: int, chunk: int, rows: int = 0, rows_context: int = 0) -> int:
        """Computing `tokens` prompt tokens behind `context`, in steps of `chunk`, beside decoding rows."""
        return self.prompts_us([(context, tokens)], chunk, rows, rows_context)

    def prompts_us(self, prompts: Sequence[tuple[int, int]], chunk: int, rows: int = 0, rows_context: int = 0) -> int:
        """The same for several prompts, one after the other; what fits into one step shares it."""
        total = sum(tokens for _, tokens in prompts)
        if total <= 0:
            return 0
        steps = -(-total // max(1, chunk))
        last = total - (steps - 1) * chunk
        knees = (steps - 1) * min(chunk, KNEE) + min(last, KNEE)
        back = sum(pairs(context, context + tokens) for context, tokens in prompts)
        return round(self._expected(_features(steps, steps * rows, steps * rows_context, knees, total, back)))

    def known(self) -> list[int]:
        """What was learned, as integers to keep: six weights in ns, then steps seen without and with prefill."""
        if self._unsolved:
            self._solve()
        return [*(round(w * 1000) for w in self._weights), *self._seen]

    def recall(self, known: Sequence[int]) -> None:
        """Begin with what `known()` gave. Raises ValueError if it is not such a list."""
        if len(known) != len(_SCALE) + 2 or any(not 0 <= n < 1 << 62 for n in known):
            raise ValueError(f"known: {len(known)} numbers, {len(_SCALE) + 2} integers from 0 are expected")
        self._weights = tuple(number / 1000 for number in known[: len(_SCALE)])
        self._seen = list(known[len(_SCALE) :])

    def _expected(self, x: Sequence[float]) -> float:
        # Solving takes as long as ten predictions, and one step among many changes little.
        if self._unsolved >= _SOLVE_EVERY or (self._unsolved and sum(self._seen) <= _TRUSTED):
            self._solve()
        return sum(map(mul, x, self._weights))

    def _solve(self) -> None:
        """Ridge towards the weights before; what would be negative is zero."""
        self._take_notes()
        before = np.array(self._weights)
        a, b = self._a.sum(0), self._b.sum(0)
        ridge = _PRIOR * max(float(a.trace()) / len(a), 1e-30)
        a.flat[:: len(a) + 1] += ridge
        b += ridge * before
        keep = np.arange(len(a))
        found = before
        while len(keep):
            found = np.linalg.solve(a[keep][:, keep], b[keep])
            if (found >= 0).all():
                break
            keep = keep[found >= 0]
        weights = np.zeros(len(a))
        weights[keep] = found[: len(keep)]
        self._weights = tuple(weights.tolist())

    def _take_notes(self) -> None:
        """Into the sums, each step that came after another making that count for a little less."""
        for kind, noted in enumerate(self._noted):
            if noted:
                x = np.array(noted)
                weight = _FORGET ** np.arange(len(noted) - 1, -1, -1.0)
                self._a[kind] = self._a[kind] * _FORGET ** len(noted) + (x.T * weight) @ x
                self._b[kind] = self._b[kind] * _FORGET ** len(noted) + weight @ x
                noted.clear()


def _features(*numbers: int) -> tuple[float, ...]:
    return tuple(map(truediv, numbers, _SCALE))


def chunk_within(limit_us: int, sizes: Sequence[int], cost: Callable[[int], int], waste_eighths: int) -> int:
    """The largest of `sizes` (falling) whose step costs no more than limit_us, as long as a token in it costs at most so many
    eighths more than in the largest; where none does, the smallest that is no more wasteful.

    A pass over all experts is paid for once, whatever it carries: cutting it up makes the gap a little shorter and the queue
    very much longer.
    """
    whole = sizes[0]
    most = (8 + waste_eighths) * cost(whole)
    chosen = whole
    for size in sizes:
        us = cost(size)
        if 8 * us * whole > most * size:
            break
        chosen = size
        if us <= limit_us:
            break
    return chosen


def chunk_now(
    step_us: Callable[[Work], int],
    sizes: Sequence[int],
    limit_us: int,
    rows: int,
    context: int,
    start: int,
    costs: Sequence[int],
    presses: bool,
) -> int:
    """Tokens between the edges at which the next chunks end: fewer than the largest of `sizes` so that no step holds others up.

    step_us: what a step costs. rows, context: of decoding requests. start: tokens that the deepest prompt looks back on; a step
    may get to any. costs: prefill left of each prompt, at least one. presses: the first of them has no time to lose. limit_us:
    for a step, 0 = none.
    """
    if not limit_us:
        return sizes[0]

    def cost(size: int) -> int:
        return step_us(Work(rows, context, size, pairs(start, start + size)))

    if rows or len(costs) > 1:
        return chunk_within(limit_us, sizes, cost, waste_allowed(sum(costs) - max(costs), limit_us, presses))
    # Alone it only holds up who may come and is told between steps what to expect: for a small price, and not in vain.
    size = chunk_within(limit_us, sizes, cost, 1)
    return size if cost(size) <= 2 * limit_us else sizes[0]


def waste_allowed(others_us: int, limit_us: int, presses: bool) -> int:
    """Eighths that prefill may cost more so that answers go on smoothly: four while one prompt with time is all there is to
    compute, but for what is done in a step or two, else one. At 80% of what a machine can do, a quarter more work is more than
    it can do. others_us: prefill of all but the longest prompt. limit_us: for a step."""
    return 4 if others_us <= 2 * limit_us and not presses else 1


def chunk_sizes(chunk: int, least: int) -> tuple[int, ...]:
    """chunk and its halves down to `least`, falling. Multiples of a half include the multiples of the whole, so that shortened
    chunks end on the same edges and some between."""
    sizes = [chunk]
    while sizes[-1] % 2 == 0 and sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)
