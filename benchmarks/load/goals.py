"""What the load lab's figures are held against: one line for each goal, whether it is met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Goal(NamedTuple):
    """value: as measured; None, if there was nothing to measure, meets no goal. least: limit is the least, not the most."""

    what: str
    value: float | None
    limit: float
    least: bool = False

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.least else self.value <= self.limit


def judge(console: Console, goals: Sequence[Goal]) -> dict[str, Any]:
    """Print a verdict for each goal. Returns them for the line that is recorded."""
    table = Table()
    for column in ("goal", "wanted", "measured", "verdict"):
        table.add_column(column, justify="left" if column in ("goal", "verdict") else "right")
    for goal in goals:
        wanted = f"{'≥' if goal.least else '≤'} {goal.limit:g}"
        measured = "–" if goal.value is None else f"{goal.value:g}"
        table.add_row(goal.what, wanted, measured, "met" if goal.met else "NOT MET")
    console.print(table)
    return {goal.what: goal.met for goal in goals}


def of_turns(figures: dict[str, Any]) -> list[Goal]:
    """Of predictions and warnings, by the names that both labs give them."""
    error, word = figures.get("prediction_error") or figures.get("error") or {}, figures.get("first_word_ms") or {}
    goals = [
        Goal("error of predicted first tokens, median", error.get("p50"), 0.15),
        Goal("error of predicted first tokens, p95", error.get("p95"), 0.40),
        Goal("missed alarms, of all turns", figures.get("missed_alarms"), 0.05),
        Goal("false alarms, of all turns", figures.get("false_alarms"), 0.05),
    ]
    return [*goals, Goal("first word on the deadline, p99 ms", word.get("p99"), 200)] if word else goals
