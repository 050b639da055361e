"""Which of several workers a turn goes to. Pure functions of integers; who asks them is fleet.py.

The cost of a worker is when the turn's first token would come there: what waits before it, what has to be restored, what has to
be computed. A session stays where it is until another worker would be clearly sooner, so that costs which change a little from
turn to turn do not carry its state to and fro.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STAY_US = 250_000
STAY_PERMILLE = 250
"""A session leaves its worker when another is sooner by a quarter of what that takes and a quarter second on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One worker as a turn finds it. All ≥ 0, rates ≥ 1.

    waiting_tokens: of prompts that are to be computed there first. decoding: turns that generate. turns: all that have not
    ended. rows: turns that it runs at once, 0 = not known. turn_us: what one takes from its first token to its end.
    held_tokens: of the turn's own prompt, whose state it has. token_bytes: of one saved token.
    """

    waiting_tokens: int = 0
    decoding: int = 0
    turns: int = 0
    rows: int = 0
    turn_us: int = 0
    held_tokens: int = 0
    token_bytes: int = 0
    prefill_tokens_per_s: int = 500
    decode_step_us: int = 20_000
    restore_bytes_per_s: int = 1 << 30


def first_token_us(standing: Standing, prompt_tokens: int) -> int:
    """µs until the first token of a turn that goes to this worker."""
    s = standing
    held = min(s.held_tokens, prompt_tokens)
    tokens = s.waiting_tokens + prompt_tokens - held
    us = tokens * 1_000_000 // s.prefill_tokens_per_s + held * s.token_bytes * 1_000_000 // s.restore_bytes_per_s
    us += s.decoding * s.decode_step_us
    if s.rows and s.turns >= s.rows:
        # Its rows are taken: as many turns as there are too many have to end first, `rows` of them at a time.
        us += (s.turns - s.rows + 1) * s.turn_us // s.rows
    return us


def leaves(home_us: int, best_us: int) -> bool:
    """Whether the best worker is so much sooner than a session's own that it goes there."""
    return home_us > best_us + STAY_US + best_us * STAY_PERMILLE // 1000


def choose(costs: Sequence[int | None], home: int) -> int | None:
    """The worker for a turn, None if there is none. costs: µs by worker, None = it takes no turns.

    home: where the session's state is, or where it would begin. Of equal ones the first behind home.
    """
    usable = [i for i, cost in enumerate(costs) if cost is not None]
    if not usable:
        return None
    count = len(costs)
    cost, _, best = min((costs[i] or 0, (i - home) % count, i) for i in usable)
    at_home = costs[home] if 0 <= home < count else None
    return best if at_home is None or leaves(at_home, cost) else home


def first_home(seed: int, workers: int) -> int:
    """Where a session begins of which no worker knows anything; the same after a restart. seed: a digest of its name."""
    return seed % workers
