"""What every stage is handed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.common import spread
from benchmarks.gpu.bench import Running
from benchmarks.gpu.geometry import Shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.play import Player, Words
from benchmarks.gpu.results import Results
from benchmarks.routing.trace import Trace


class OutOfTime(Exception):
    """No further measurement fits into this run; the same command goes on."""


@dataclass
class Context:
    """One engine of one variant and size, made when it is first needed, and where its results go. trace: of the programmed
    variant, None else."""

    start: Callable[[], Running]
    results: Results
    plan: Plan
    shape: Shape
    directory: Path
    variant: str
    share: int
    trace: Trace | None

    @cached_property
    def running(self) -> Running:
        return self.start()

    @cached_property
    def player(self) -> Player:
        return Player(self.running.engine)

    def words(self, seed: int = 0) -> Words:
        return Words(self.shape.vocab, self.shape.states, self.variant == "programmed", seed)

    def measure(self, stage: str, work: Callable[[], Mapping[str, Any]], **workload: Any) -> None:
        """Do the work and write its figures down, unless that is done already. Raises OutOfTime."""
        described = {"variant": self.variant, "resident": self.share, "layers": self.shape.layers, **workload}
        if self.results.find(stage, **described) is not None:
            return
        if not self.results.room():
            raise OutOfTime
        began = time.monotonic()
        figures = work()
        self.player.stop()
        self.results.add(stage, {**described, "slots": self.running.slots}, figures, time.monotonic() - began)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of single tokens or turns: median, p99 and worst."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))
    return {"p50": statistics.median(ordered), "p99": ordered[at], "worst": ordered[-1], "n": len(ordered)}


def rounded(figures: Any, digits: int = 4) -> Any:
    """Every float of a nested dict with so many significant digits."""
    if isinstance(figures, float):
        return float(f"{figures:.{digits}g}")
    if isinstance(figures, dict):
        return {key: rounded(value, digits) for key, value in figures.items()}
    return figures


def spread_of(values: Sequence[float]) -> dict[str, float]:
    return rounded(spread(values))
