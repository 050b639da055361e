"""Adds up what turns asked, could have reused and did reuse, and says it as the figures of the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.traces.rates import KV_TOKEN_BYTES, MACHINES, STATE_BYTES
from benchmarks.traces.tiers import ScaledTier


@dataclass
class Tally:
    """asked: prompt tokens. ideal: those that lie on a known path, at most n − 1 of n unless the very prompt was seen.
    fresh: tokens whose KV is new. placed: checkpoints that were not there before. restored: bytes by tier.
    """

    turns: int = 0
    asked: int = 0
    ideal: int = 0
    reused: int = 0
    fresh: int = 0
    placed: int = 0
    restored: Counter[str] = field(default_factory=Counter)

    def turn(self, asked: int, ideal: int, reused: int, tier: str | None = "ram") -> None:
        self.turns += 1
        self.asked += asked
        self.ideal += ideal
        self.reused += reused
        if reused and tier is not None:
            self.restored[tier] += reused * KV_TOKEN_BYTES + STATE_BYTES

    def figures(self) -> dict[str, Any]:
        """hit: reused ÷ asked. re_prefill: prefilled ÷ what the ideal prefills. reuse: reused ÷ ideal.

        seconds: per machine and turn, cold, ideal (restores cost nothing) and as replayed; and the ratio of the last two.
        """
        ideal_prefill = self.asked - self.ideal
        result: dict[str, Any] = {
            "hit": round(self.reused / self.asked, 4),
            "ideal_hit": round(self.ideal / self.asked, 4),
            "reuse": round(self.reused / self.ideal, 4) if self.ideal else 1.0,
            "re_prefill": round((self.asked - self.reused) / ideal_prefill, 3),
            "placed_per_turn": round(self.placed / self.turns, 2),
        }
        for machine in MACHINES:
            spent = machine.seconds(self.asked - self.reused, self.restored["ram"], self.restored["disk"])
            ideal = machine.seconds(ideal_prefill)
            result[machine.name] = {
                "cold_s": round(machine.seconds(self.asked) / self.turns, 3),
                "ideal_s": round(ideal / self.turns, 3),
                "s": round(spent / self.turns, 3),
                "ratio": round(spent / ideal, 3),
            }
        return result

    def written(self, tiers: Sequence[ScaledTier]) -> dict[str, Any]:
        """Per tier: bytes written ÷ bytes of new KV, for extents and in all, and states per turn."""
        new_kv = self.fresh * KV_TOKEN_BYTES
        return {
            f"{tier.name}_written": {
                "extents": round(tier.written["extent"] / new_kv, 3),
                "all": round(sum(tier.written.values()) / new_kv, 3),
                "states_per_turn": round(tier.segments["state"] / self.turns, 2),
                "gib": round(sum(tier.written.values()) / (1 << 30), 1),
            }
            for tier in tiers
        }
