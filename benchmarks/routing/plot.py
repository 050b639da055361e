"""Hit rates by share of resident experts, and the time they cost: one row of two pictures for each trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "lru": "tab:blue",
    "lru_floor": "tab:cyan",
    "frequency": "tab:green",
    "static, by prefill": "tab:orange",
    "static, blind": "tab:red",
    "belady": "black",
}
LINES = {"fetched": "-", "shared": "--", "on the CPU": ":"}


def draw(traces: Mapping[str, tuple[int, Sequence[Mapping[str, Any]]]], machine: str, path: Path) -> None:
    """traces: name → (layers, results of figures.compare). Writes a PNG. Needs matplotlib (the `bench` extra)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(traces), 2, figsize=(10, 2.9 * len(traces)), squeeze=False)
    for (left, right), (name, (layers, results)) in zip(rows, traces.items(), strict=True):
        for policy, misses in dict.fromkeys((line["policy"], line["misses"]) for line in results):
            mine = sorted((x for x in results if (x["policy"], x["misses"]) == (policy, misses)), key=lambda x: x["resident"])
            shares = [100 * line["resident"] for line in mine]
            style = {"color": COLOURS[policy], "linestyle": LINES[misses], "marker": "o", "markersize": 3, "linewidth": 1.2}
            if misses != "shared":
                left.plot(shares, [100 * line["hit_rate"] for line in mine], label=policy, **style)
            right.plot(shares, [line["experts_us_per_token"] / layers for line in mine], label=f"{policy}, {misses}", **style)
        left.set_title(f"{name}: experts found in a slot, %", fontsize=9)
        right.set_title(f"{name}: µs of a layer's experts ({machine}, by the cost model)", fontsize=9)
        left.set_ylim(0, 102)
        right.set_ylim(0, None)
        for axes in (left, right):
            axes.set_xlabel("experts resident, %", fontsize=8)
            axes.tick_params(labelsize=7)
            axes.grid(linewidth=0.3)
    rows[0][0].legend(fontsize=6.5)
    rows[0][1].legend(fontsize=5.5)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
