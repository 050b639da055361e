"""Where contexts were seen to part from what is saved, and where shadows should go therefore. Integers only, no tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import combinations

from statecache.policy import Policy

BUCKETS = range(4, 14)
"""Distances are counted by powers of two, 16 to 8,192 tokens; beyond that the ladder is near."""
PRIOR = 8
"""How many sightings the configured shadows count for at the start."""
FORGET_AT = 512
"""Counts are halved when there are so many, so that a client that changes its ways is followed."""
MOST_GROUPS = 256


class Divergences:
    """Histogram of one group of contexts: tokens from the point of parting to the end of the prompt that was saved."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._counts = dict.fromkeys(BUCKETS, 0)
        for distance in policy.shadows:
            self._counts[_bucket(distance)] += PRIOR
        self._shadows = policy.shadows

    @property
    def shadows(self) -> tuple[int, ...]:
        """As many distances as the policy has shadows, those that would have saved the most tokens, rising."""
        return self._shadows

    def saw(self, distance: int) -> None:
        """A context parted `distance` tokens (≥ 1) before the end of a saved prompt."""
        if distance > 1 << BUCKETS[-1]:
            return
        self._counts[_bucket(distance)] += 1
        if sum(self._counts.values()) >= FORGET_AT:
            self._counts = {bucket: count // 2 for bucket, count in self._counts.items()}
        self._shadows = self._best()

    def _best(self) -> tuple[int, ...]:
        count = len(self._policy.shadows)
        # Among equals the first one: what is configured, then the nearer ones.
        choices = [tuple(sorted(_bucket(d) for d in self._policy.shadows)), *combinations(BUCKETS, count)]
        best = min(choices, key=self._recomputed) if count else ()
        return self._policy.shadows if best == choices[0] else tuple(1 << bucket for bucket in best)

    def _recomputed(self, shadows: tuple[int, ...]) -> int:
        """Tokens that the sightings would have cost: from the nearest shadow at or before each, or else a ladder's length."""
        total = 0
        for bucket, count in self._counts.items():
            behind = min((1 << s for s in shadows if s >= bucket), default=max(1 << BUCKETS[-1], self._policy.ladder_tokens))
            total += count * (behind - (1 << bucket >> 1))
        return total


class Experience:
    """Histograms by group (who asks, through which client), a bounded number of them; the least recently used is forgotten."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: OrderedDict[bytes, Divergences] = OrderedDict()

    def saw(self, group: bytes, distance: int) -> None:
        if distance >= 1:
            self._group(group).saw(distance)

    def go_on_with(self, policy: Policy) -> None:
        """The configured policy has changed; what was learned stays."""
        self._policy = policy

    def policy(self, group: bytes) -> Policy:
        """The policy with the shadows that suit a group."""
        known = self._groups.get(group)
        return self._policy if known is None else replace(self._policy, shadows=known.shadows)

    def _group(self, group: bytes) -> Divergences:
        found = self._groups.setdefault(group, Divergences(self._policy))
        self._groups.move_to_end(group)
        if len(self._groups) > MOST_GROUPS:
            self._groups.popitem(last=False)
        return found


def _bucket(distance: int) -> int:
    """The smallest bucket whose shadow lies at or before the parting."""
    return min(max((distance - 1).bit_length(), BUCKETS[0]), BUCKETS[-1])
