"""Which waiting turn goes first: deadlines, the cost of what is left, and shares. Integers only, no clocks.

As many turns as possible are to be on time: those that all can be go by deadline, and where there is too much to do the longest
ones are given up, since each of these makes many others late. Before them go the cheapest of all turns, as long as nobody's
deadline is lost by it; behind them whoever is left, cheapest first. Cheapness is counted together with what lies before a turn
in its own share, so that many turns of one agent never stand before another agent's few. Owners of shares then take turns by
what each has had (`Service`): one with many agents gets no more than one with a single one.

Aging: a turn whose deadline cannot be kept any more gets a second one, GRACE_US after it, which is for good. Once that is near
the turn goes before all others. New turns have later ones, so every turn comes to the front, whatever arrives behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

GRACE_US = 30_000_000
"""From a missed deadline to the second one."""
PRESS_US = 100_000
"""Least slack at which a turn counts as pressed."""
FOR_EVER = 1 << 62
NEAR_US = 1 << 17
"""Deadlines this near to each other are equal, and `priority` decides."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one turn asks for. Times in µs on one clock.

    due: when its first token should come. cost: µs that the prefill before it still takes. share: who it is counted to.
    priority: a higher one goes first among equals of one owner, or of one deadline. arrival: number; breaks ties. owner: of the
    share.
    """

    due: int
    cost: int
    share: str = ""
    priority: int = 0
    arrival: int = 0
    owner: str = ""


class Service:
    """What owners have had, µs of prefill, while others waited. Who was alone owes nothing for it; who comes back after a while
    is not given what it did not ask for."""

    def __init__(self) -> None:
        self._had: dict[str, int] = {}
        self._least = 0

    def charge(self, owner: str, us: int) -> None:
        """A part of the owner's prefill is computed; `ahead` was asked since the one before."""
        self._had[owner] = self._had.get(owner, self._least) + us

    def ahead(self, owners: Collection[str]) -> dict[str, int]:
        """Of those that wait for prefill now: µs that each has had more than the one that has had least."""
        had = {owner: self._had.get(owner, self._least) for owner in owners}
        if had:
            self._least = min(had.values())
            self._had = {owner: us for owner, us in self._had.items() if us > self._least}
        return {owner: us - self._least for owner, us in had.items()}


def deadline(claim: Claim, now: int) -> int:
    """The deadline that counts now: the turn's own while it can be kept, then the second one."""
    return claim.due if now + claim.cost <= claim.due else claim.due + GRACE_US


def pressed(claim: Claim, now: int) -> bool:
    """Whether waiting much longer would cost the deadline; also once the second one is near, and ever after."""
    slack = deadline(claim, now) - now - claim.cost
    return slack < max(PRESS_US, claim.cost // 2)


def order(claims: Sequence[Claim], now: int, ahead: Mapping[str, int] | None = None) -> list[int]:
    """Indices of the claims, the first to be served first. ahead: as Service tells it, none = all owners have had the same."""
    aged = [i for i, claim in enumerate(claims) if deadline(claim, now) != claim.due and pressed(claim, now)]
    aged.sort(key=lambda i: _by_deadline(claims[i], now))
    timely, spare = _timely(claims, now, aged)
    cheap = _by_owner(claims, _by_cost(claims, set(aged)), ahead or {})
    line = aged
    for i in cheap:
        spare -= _with_margin(claims[i].cost)
        if spare < 0:
            break
        line.append(i)
    for those in (timely, cheap):
        placed = set(line)
        line.extend(i for i in those if i not in placed)
    return line


def _timely(claims: Sequence[Claim], now: int, aged: Sequence[int]) -> tuple[list[int], int]:
    """By deadline, as many turns as can all be on time behind the aged ones: where one would be late, the longest up to there
    is given up (Moore and Hodgson). And for how long they could all wait."""
    begin = now + sum(_with_margin(claims[i].cost) for i in aged)
    taken = set(aged)
    rest = [i for i, claim in enumerate(claims) if i not in taken and deadline(claim, now) == claim.due]
    rest.sort(key=lambda i: _by_deadline(claims[i], now))
    at, given_up, longest = begin, set[int](), list[tuple[int, int, int, int]]()
    for i in rest:
        claim = claims[i]
        heapq.heappush(longest, (-_with_margin(claim.cost), claim.priority, -claim.arrival, i))
        late = at + claim.cost > claim.due
        at += _with_margin(claim.cost)
        if late:
            less, _, _, worst = heapq.heappop(longest)
            given_up.add(worst)
            at += less
    timely = [i for i in rest if i not in given_up]
    at, spare = begin, FOR_EVER
    for i in timely:
        spare = min(spare, claims[i].due - PRESS_US - claims[i].cost - at)
        at += _with_margin(claims[i].cost)
    return timely, spare


def _with_margin(cost: int) -> int:
    """What a turn holds others up by: answers go on beside its prefill."""
    return cost + cost // 8


def _by_deadline(claim: Claim, now: int) -> tuple[int, int, int, int]:
    due = deadline(claim, now)
    return due // NEAR_US, -claim.priority, due, claim.arrival


def _by_cost(claims: Sequence[Claim], without: set[int]) -> list[int]:
    """Cheapest first by the sum that a turn's share has before and with it. Equal: within a factor of two. Owners are not
    looked at but as part of the share."""
    rest = sorted((i for i in range(len(claims)) if i not in without), key=lambda i: _cost_key(claims[i], claims[i].cost))
    sums: dict[tuple[str, str], int] = {}
    keys: dict[int, tuple[int, int, int, int]] = {}
    for i in rest:
        claim = claims[i]
        share = (claim.owner, claim.share)
        sums[share] = total = sums.get(share, 0) + claim.cost
        keys[i] = _cost_key(claim, total)
    return sorted(rest, key=lambda i: keys[i])


def _by_owner(claims: Sequence[Claim], ordered: Sequence[int], ahead: Mapping[str, int]) -> list[int]:
    """The turns of each owner stay in their order; those of different ones go by what theirs has had, with them."""
    sums: dict[str, int] = {}
    had: dict[int, int] = {}
    for i in ordered:
        claim = claims[i]
        sums[claim.owner] = had[i] = sums.get(claim.owner, ahead.get(claim.owner, 0)) + claim.cost
    return sorted(ordered, key=had.__getitem__) if len(sums) > 1 else list(ordered)


def _cost_key(claim: Claim, cost: int) -> tuple[int, int, int, int]:
    return cost.bit_length(), -claim.priority, cost, claim.arrival
