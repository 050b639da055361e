"""What each principal may use: turns at once, turns per minute, bytes in the sessions database. Refusals say when to retry.

Counts only; sockets, frames and lanes have their own limits where they are.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from agentserve.config import LimitsConfig
from agentserve.errors import InsufficientQuota, RateLimitExceeded
from agentserve.interfaces import Store
from agentserve.worker.messages import Load

BUSY_RETRY_S = 5
"""While no worker has said how much it has to do."""
MOST_RETRY_S = 60


def retry_after_s(load: Load | None) -> int:
    """When a refused turn may try again: once the worker has computed about half of the prompt tokens that wait now."""
    if load is None or load.prefill_tokens_per_s <= 0:
        return BUSY_RETRY_S
    return min(MOST_RETRY_S, max(1, math.ceil(load.waiting_prefill_tokens / load.prefill_tokens_per_s / 2)))


ROUNDING = 1e-6
"""Part of a turn: sums of times are inexact, and who waited as long as it was told must not be a hair short."""


class Quotas:
    """One per server. clock: seconds, for tests."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._turns: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}
        """Turns that are left, at which time; one that has filled up again is forgotten."""

    def begin(self, principal: str, load: Load | None = None) -> None:
        """Count a turn that begins; `end` must follow. Raises RateLimitExceeded, and counts nothing then.

        load: the worker's last report, for the hint when to try again.
        """
        if self._turns[principal] >= self._limits.turns_per_principal:
            what = f"{self._turns[principal]} turns run or wait, no more are accepted"
            raise RateLimitExceeded(what, retry_after_s(load))
        most = self._limits.turns_per_minute
        if most:
            left = self._left(principal)
            if left < 1 - ROUNDING:
                raise RateLimitExceeded(f"{most} turns per minute are accepted", self._seconds(1 - left))
            self._buckets[principal] = (max(0.0, left - 1), self._clock())
        self._turns[principal] += 1

    def end(self, principal: str) -> None:
        self._turns[principal] -= 1
        if not self._turns[principal]:
            del self._turns[principal]

    def headers(self, principal: str) -> dict[str, str]:
        """How a client knows before it is refused; none where no rate is set."""
        most = self._limits.turns_per_minute
        if not most:
            return {}
        left = self._left(principal)
        return {
            "x-ratelimit-limit-requests": str(most),
            "x-ratelimit-remaining-requests": str(math.floor(left)),
            "x-ratelimit-reset-requests": f"{self._seconds(most - left) if left < most else 0}s",
        }

    async def check_stored(self, principal: str, store: Store) -> None:
        """Before something is to be stored. Raises InsufficientQuota."""
        most = self._limits.stored_bytes_per_principal
        if most and (used := await store.stored_bytes(principal)) >= most:
            raise InsufficientQuota(
                f"{used} bytes are stored, at most {most} are accepted; delete sessions or send store false"
            )

    def _left(self, principal: str) -> float:
        most = float(self._limits.turns_per_minute)
        left, at = self._buckets.get(principal, (most, 0.0))
        left = min(most, left + (self._clock() - at) * most / 60)
        if left >= most:
            self._buckets.pop(principal, None)
        return left

    def _seconds(self, turns: float) -> int:
        """Until so many turns more are accepted."""
        return max(1, math.ceil(turns * 60 / self._limits.turns_per_minute))
