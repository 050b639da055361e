"""Results as one picture: what each policy re-prefills, and what a budget costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TITLES = {
    "coding_agent_blocks": "coding agent",
    "airline_tool_calls": "assistant with tools",
    "magagent": "several agents",
    "miniswe": "append-only agent",
}
SHOWN = 4.0
"""Re-prefill beyond this is cut off and written beside its bar."""


def draw(
    alone: Mapping[str, Mapping[str, Mapping[str, Any]]], stores: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path
) -> None:
    """alone, stores: recording → policy or budget → figures. Writes a PNG. Needs matplotlib (the `bench` extra)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), width_ratios=(3, 2))
    names = list(next(iter(alone.values())))
    height = 0.8 / max(1, len(alone))
    for index, (recording, figures) in enumerate(alone.items()):
        at = [row + index * height for row in range(len(names))]
        values = [figures[name]["re_prefill"] for name in names]
        bars = left.barh(at, [min(v, SHOWN) - 1 for v in values], height, left=1, label=TITLES.get(recording, recording))
        left.bar_label(bars, [f"{v:.1f}" if v > SHOWN else "" for v in values], fontsize=7, padding=2)
    left.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], names, fontsize=8)
    left.invert_yaxis()
    left.set_xlim(1, SHOWN + 0.3)
    left.set_xlabel("tokens prefilled ÷ tokens that the ideal prefills", fontsize=8)
    left.set_title("policies alone", fontsize=9)
    left.legend(fontsize=7)
    for recording, figures in stores.items():
        values = [line["re_prefill"] for line in figures.values()]
        right.plot(range(len(values)), values, marker="o", markersize=3, label=TITLES.get(recording, recording))
    budgets = list(next(iter(stores.values())))
    right.set_xticks(range(len(budgets)), [b.replace(" + ", "\n+ ") for b in budgets], fontsize=7)
    right.set_ylim(1, None)
    right.axhline(1.03, color="grey", linewidth=0.8, linestyle=":")
    right.set_title("the real store, by GiB of memory + disk", fontsize=9)
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.tick_params(labelsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
