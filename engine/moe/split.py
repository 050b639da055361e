"""How decode misses are divided between link and CPU: the table of the moment, by what was measured and what is being seen.

Integers only; the tensors that kernels read are gpu/experts.py's.
"""

from __future__ import annotations

import logging
from typing import Literal

from engine.moe.cost import Division, Rates, divisions
from engine.moe.modes import Mode, ModeChoice

log = logging.getLogger(__name__)

REFIT_STEPS = 1024
LEAST_BYTES = 64 << 20
"""Fewer bytes than this say little about a rate."""


class MissSplit:
    """One model. mode: "auto" = the fastest one seen, by batch size. inter: inner rows of an expert that may be divided between
    link and CPU, 0 = none. See experts.ExpertPool for the other arguments."""

    def __init__(
        self,
        rates: Rates,
        record_bytes: int,
        top_k: int,
        max_rows: int,
        mode: Mode | Literal["auto"] = "auto",
        inter: int = 0,
    ) -> None:
        self.rates = rates
        self.max_rows = max_rows
        self._record_bytes, self._top_k, self._most, self._inter = record_bytes, top_k, max_rows * top_k, inter
        self._mode: Mode | Literal["auto"] = mode
        self._fixed: tuple[Division, ...] | None = None
        self._choices: dict[int, ModeChoice] = {}
        self._steps = 0
        self._seen = (0, 0, 0, 0)

    def fix(self, table: tuple[Division, ...]) -> None:
        self._fixed = table

    @property
    def divides(self) -> bool:
        """Whether tables may divide experts: the rate at which the device reads parts is known, and the mode lets it."""
        return self._inter > 0 and self.rates.direct_mbs > 0 and self._mode in ("auto", "hybrid")

    def mode(self, rows: int) -> Mode:
        """What the next step of this many rows uses."""
        if self._mode == "auto":
            return self._choice(rows).current
        return self._mode

    def _choice(self, rows: int) -> ModeChoice:
        if rows not in self._choices:
            shared = ("hybrid", "whole") if self.divides else ("hybrid",)
            self._choices[rows] = ModeChoice(modes=(*shared, "cpu", "fetch"))
        return self._choices[rows]

    def table(self, mode: Mode, rows: int) -> tuple[Division, ...]:
        """Of m misses of a layer, how many are fetched, and how many inner rows of each other one the device takes from the
        CPU; the last entry serves every larger m."""
        if self._fixed is not None:
            return self._fixed
        if mode in ("hybrid", "whole"):
            inter = self._inter if mode == "hybrid" else 0
            return divisions(self.rates, self._record_bytes, self._most, rows * self._top_k, inter)
        return tuple((m, 0) for m in range(self._most + 1)) if mode == "fetch" else ((0, 0),)

    def stepped(self, rows: int, step_ns: int) -> bool:
        """A step took this long. True if it is time to look at what link and CPU did: see `refit`."""
        if self._fixed is not None:
            return False
        if self._mode == "auto":
            choice = self._choice(rows)
            before = choice.mode
            choice.record(step_ns)
            if choice.mode != before:
                log.info("decode misses mode=%s rows=%d was=%s ns=%s", choice.mode, rows, before, choice.ns)
        self._steps += 1
        return self._steps % REFIT_STEPS == 0

    def refit(self, fetch_ns: int, fetched_bytes: int, cpu_ns: int, cpu_bytes: int) -> bool:
        """Totals since the start. True if the rates moved so much that tables should be made anew."""
        now = (fetch_ns, fetched_bytes, cpu_ns, cpu_bytes)
        spent = tuple(new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        link = spent[1] * 1000 // spent[0] if spent[0] > 0 and spent[1] >= LEAST_BYTES else None
        cpu = spent[3] * 1000 // spent[2] if spent[2] > 0 and spent[3] >= LEAST_BYTES else None
        old, self.rates = self.rates, self.rates.refitted(link, cpu)
        return _apart(old.both_link_mbs, self.rates.both_link_mbs) or _apart(old.both_cpu_mbs, self.rates.both_cpu_mbs)


def _apart(a: int, b: int) -> bool:
    return abs(a - b) * 50 > a
