"""The worker's own speed, measured from what it did. Feeds the TTFT prediction; see agentserve/deadlines.py."""

from __future__ import annotations

from agentserve.deadlines import Rates, blend
from engine.types import EngineStats

LEAST_PREFILL_TOKENS = 32
"""Fewer tokens than this measure the fixed cost of a step, not the rate."""
LEAST_RESTORE_BYTES = 1 << 16
TRY_AGAIN = 16
"""Every so many times a slow tier is read all the same, since it may have become faster."""


class Measure:
    """Exponential averages over engine counters; starts from the defaults of `Rates`."""

    def __init__(self) -> None:
        self.rates = Rates()
        self._prefill = (0, 0.0)
        self._decode = (0, 0.0)
        self._tiers: dict[str, int] = {}
        self._declined = 0
        self._fresh = {"prefill", "decode", "restore"}

    def look(self, stats: EngineStats) -> None:
        """Take in what the engine did since the last look."""
        tokens, seconds = stats.prefill_tokens - self._prefill[0], stats.prefill_seconds - self._prefill[1]
        if tokens >= LEAST_PREFILL_TOKENS and seconds > 0:
            self._prefill = (stats.prefill_tokens, stats.prefill_seconds)
            self._set("prefill", "prefill_tokens_per_s", round(tokens / seconds))
        tokens, seconds = stats.decode_tokens - self._decode[0], stats.decode_seconds - self._decode[1]
        if tokens > 0 and seconds > 0:
            self._decode = (stats.decode_tokens, stats.decode_seconds)
            self._set("decode", "decode_step_us", round(seconds * 1e6 / tokens))

    def restored(self, nbytes: int, seconds: float, tier: str | None = None) -> None:
        """A restore of `nbytes` from a tier took `seconds`."""
        if nbytes < LEAST_RESTORE_BYTES or seconds <= 0:
            return
        rate = max(1, round(nbytes / seconds))
        self._set("restore", "restore_bytes_per_s", rate)
        if tier is not None:
            self._tiers[tier] = blend(self._tiers.get(tier, rate), rate)

    def worth_restoring(self, tokens: int, nbytes: int, tier: str | None) -> bool:
        """Whether reading a checkpoint beats computing its tokens again; True as long as either speed is unknown.

        Loading wins while the prefill rate is below the tier's bandwidth ÷ bytes per token.
        """
        rate = self._tiers.get(tier or "")
        if rate is None or "prefill" in self._fresh:
            return True
        if nbytes * self.rates.prefill_tokens_per_s < tokens * rate:
            return True
        self._declined += 1
        return self._declined % TRY_AGAIN == 0

    def _set(self, what: str, field: str, value: int) -> None:
        old = {name: getattr(self.rates, name) for name in self.rates.__struct_fields__}
        # The first measurement replaces the guess; later ones are averaged in.
        old[field] = max(1, value) if what in self._fresh else blend(old[field], value)
        self._fresh.discard(what)
        self.rates = Rates(**old)
