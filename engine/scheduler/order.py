"""Which waiting turn goes first: deadlines, the cost of what is left, and shares. Integers only, no clocks.

Two classes. A turn is pressed once its slack (time to its deadline beyond what its own prefill takes) is short, and as long as
the deadline can still be kept; pressed turns go by deadline. All others go by what is left to compute, cheapest first, counted
together with what lies before them in their own share, so that many turns of one agent never stand before another agent's few.

Aging: a turn whose deadline cannot be kept any more gets a second one, GRACE_US after it, which is for good. New turns have
later ones, so every turn comes to the front of the first class, whatever arrives behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GRACE_US = 30_000_000
"""From a missed deadline to the second one."""
PRESS_US = 100_000
"""Least slack at which a turn counts as pressed."""
NEAR_US = 1 << 17
"""Deadlines this near to each other are equal, and `priority` decides."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one turn asks for. Times in µs on one clock.

    due: when its first token should come. cost: µs that the prefill before it still takes. share: who it is counted to.
    priority: a higher one goes first among equals. arrival: number; breaks ties.
    """

    due: int
    cost: int
    share: str = ""
    priority: int = 0
    arrival: int = 0


def deadline(claim: Claim, now: int) -> int:
    """The deadline that counts now: the turn's own while it can be kept, then the second one."""
    return claim.due if now + claim.cost <= claim.due else claim.due + GRACE_US


def pressed(claim: Claim, now: int) -> bool:
    """Whether waiting much longer would cost the deadline; also once the second one is near, and ever after."""
    slack = deadline(claim, now) - now - claim.cost
    return slack < max(PRESS_US, claim.cost // 2)


def order(claims: Sequence[Claim], now: int) -> list[int]:
    """Indices of the claims, the first to be served first."""
    urgent = [i for i, claim in enumerate(claims) if pressed(claim, now)]
    urgent.sort(key=lambda i: _by_deadline(claims[i], now))
    return [*urgent, *_by_cost(claims, set(urgent))]


def _by_deadline(claim: Claim, now: int) -> tuple[int, int, int, int]:
    due = deadline(claim, now)
    return due // NEAR_US, -claim.priority, due, claim.arrival


def _by_cost(claims: Sequence[Claim], without: set[int]) -> list[int]:
    """Cheapest first by the sum that a turn's share has before and with it. Equal: within a factor of two."""
    rest = sorted((i for i in range(len(claims)) if i not in without), key=lambda i: _cost_key(claims[i], claims[i].cost))
    sums: dict[str, int] = {}
    keys: dict[int, tuple[int, int, int, int]] = {}
    for i in rest:
        claim = claims[i]
        sums[claim.share] = total = sums.get(claim.share, 0) + claim.cost
        keys[i] = _cost_key(claim, total)
    return sorted(rest, key=lambda i: keys[i])


def _cost_key(claim: Claim, cost: int) -> tuple[int, int, int, int]:
    return cost.bit_length(), -claim.priority, cost, claim.arrival
