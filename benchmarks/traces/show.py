"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.traces.rates import MACHINES


def policies(console: Console, title: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Policies alone."""
    table = Table(title=f"{title}: policies alone", title_justify="left")
    table.add_column("kept per session")
    for column in ("hit", "re-prefill", "reused of ideal", "placed a turn", *(f"s a turn, {m.name}" for m in MACHINES)):
        table.add_column(column, justify="right")
    for name, line in figures.items():
        table.add_row(name, *_common(line))
    ideal = next(iter(figures.values()))
    best = [f"{ideal[m.name]['ideal_s']:.2f}" for m in MACHINES]
    table.add_row("ideal", f"{ideal['ideal_hit']:.2%}", "1.000", "100.00%", "", *best, style="dim")
    console.print(table)


def store(console: Console, title: str, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """The real store, by budget. "written" is in units of the new KV's bytes."""
    table = Table(title=f"{title}: the real store, sized like a 35B hybrid model", title_justify="left")
    table.add_column("memory + disk")
    columns = ["hit", "re-prefill", "reused of ideal", "placed a turn", *(f"s a turn, {m.name}" for m in MACHINES)]
    for column in (*columns, "to disk a turn", "extents written", "all written", "evictions"):
        table.add_column(column, justify="right")
    for name, line in figures.items():
        disk = line.get("disk_written")
        wrote = (
            ["", "", ""]
            if disk is None
            else [f"{disk['states_per_turn']:.2f}", f"{disk['extents']:.2f}×", f"{disk['all']:.2f}×"]
        )
        table.add_row(name, *_common(line), *wrote, f"{line['evictions']:,}")
    console.print(table)


def _common(line: Mapping[str, Any]) -> list[str]:
    seconds = [f"{line[m.name]['s']:.2f} ({line[m.name]['ratio']:.2f}×)" for m in MACHINES]
    return [
        f"{line['hit']:.2%}",
        f"{line['re_prefill']:.3f}",
        f"{line['reuse']:.2%}",
        f"{line['placed_per_turn']:.2f}",
        *seconds,
    ]
