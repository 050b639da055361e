"""The worker's own speed, measured from what it did. Feeds the TTFT prediction; see agentserve/deadlines.py."""

from __future__ import annotations

from agentserve.deadlines import Rates, blend
from engine.types import EngineStats

LEAST_PREFILL_TOKENS = 32
"""Fewer tokens than this measure the fixed cost of a step, not the rate."""
LEAST_RESTORE_BYTES = 1 << 16


class Measure:
    """Exponential averages over engine counters; starts from the defaults of `Rates`."""

    def __init__(self) -> None:
        self.rates = Rates()
        self._prefill = (0, 0.0)
        self._decode = (0, 0.0)
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

    def restored(self, nbytes: int, seconds: float) -> None:
        """A restore of `nbytes` took `seconds`."""
        if nbytes >= LEAST_RESTORE_BYTES and seconds > 0:
            self._set("restore", "restore_bytes_per_s", round(nbytes / seconds))

    def _set(self, what: str, field: str, value: int) -> None:
        old = {name: getattr(self.rates, name) for name in self.rates.__struct_fields__}
        # The first measurement replaces the guess; later ones are averaged in.
        old[field] = max(1, value) if what in self._fresh else blend(old[field], value)
        self._fresh.discard(what)
        self.rates = Rates(**old)
