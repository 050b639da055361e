"""One table of everything that was measured, each figure beside its floor and its goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.results import Results

GOALS: Mapping[tuple[str, int], tuple[float, str]] = {
    ("decode", 25): (110.0, "≥"),
    ("decode", 84): (300.0, "≥"),
    ("restored 8", 25): (0.10, "≤"),
    ("restored 8", 84): (0.03, "≤"),
    ("restored 16", 25): (0.15, "≤"),
    ("restored 16", 84): (0.04, "≤"),
    ("restored 64", 25): (0.25, "≤"),
    ("restored 64", 84): (0.06, "≤"),
    ("restored 1024", 25): (0.40, "≤"),
    ("restored 1024", 84): (0.12, "≤"),
    ("cold 8192", 25): (0.50, "≤"),
    ("cold 8192", 84): (0.20, "≤"),
    ("first rate", 25): (0.8, "≥"),
    ("first rate", 84): (0.9, "≥"),
    ("gap", 25): (60.0, "≤"),
    ("gap", 84): (60.0, "≤"),
    ("layer", 100): (70.0, "≤"),
    ("beyond", 100): (40.0, "≤"),
    ("memory", 25): (0.8, "≥"),
    ("memory", 84): (0.8, "≥"),
    ("saving", 25): (0.97, "≥"),
    ("saving", 84): (0.97, "≥"),
    ("stall", 25): (200.0, "≤"),
    ("stall", 84): (200.0, "≤"),
    ("of fetch", 25): (1.8, "≥"),
    ("of cpu", 25): (1.1, "≥"),
}
PURE_SHARE = 0.97
"""With its fall-back, hybrid must reach this much of the better pure way, at every share and batch size."""


@dataclass(frozen=True)
class Row:
    """floor: in the unit of the figure; None where there is none. goal: "≥ 110"; met: None without a goal."""

    what: str
    variant: str
    resident: int
    figure: str
    spread: str = ""
    floor: str = ""
    goal: str = ""
    met: bool | None = None


def judged(value: float, goal: tuple[float, str] | None) -> tuple[str, bool | None]:
    if goal is None:
        return "", None
    bound, sign = goal
    return f"{sign} {bound:g}", value >= bound if sign == "≥" else value <= bound


def decode_floor_ms(figures: Mapping[str, Any], missed_bytes: float, rates: Mapping[str, Any]) -> float:
    """Bytes ÷ measured bandwidth, everything perfectly overlapped: what the device reads, and what both ways bring together."""
    on_device = (figures["dense_bytes"] + figures["routed_bytes"] - missed_bytes) / rates["hbm_mbs"]
    both = rates["both_link_mbs"] + rates["both_cpu_mbs"]
    return max(on_device, missed_bytes / both) / 1000


def newest(results: Results, stage: str) -> list[dict[str, Any]]:
    """One line for each workload, the newest, in the order of first appearance."""
    found: dict[str, dict[str, Any]] = {}
    for line in results.lines:
        if line["stage"] == stage:
            found[str(sorted(line["workload"].items()))] = line
    return list(found.values())


def rows(results: Results) -> Iterator[Row]:
    rates = results.find("calibrate")
    for line in newest(results, "decode"):
        yield from _decode_rows(line, rates)
    for line in newest(results, "suffix"):
        where = (line["workload"]["variant"], line["workload"]["resident"])
        figures = line["figures"]
        for name in sorted(figures, key=lambda name: (name.split()[0], int(name.split()[1]))):
            value = figures[name]["ttft_s"]
            goal, met = judged(value["median"], GOALS.get((name, where[1])))
            yield Row(f"first token, {name} tokens, s", *where, f"{value['median']:.3f}", _between(value, ".3f"), "", goal, met)
    for line in newest(results, "alternate"):
        where, figures = (line["workload"]["variant"], line["workload"]["resident"]), line["figures"]
        yield Row(
            "session: first token, s", *where, f"{figures['ttft_s']['median']:.3f}", f"worst {figures['worst_ttft_s']:.3f}"
        )
        gap = figures["gap_ms"]
        yield Row("session: between tokens, ms", *where, f"{gap['p50']:.2f}", f"p99 {gap['p99']:.2f}")
        value = figures["first_rate_of_steady"]
        goal, met = judged(value["median"], GOALS.get(("first rate", where[1])))
        yield Row(
            "session: rate of the first tokens ÷ steady",
            *where,
            f"{value['median']:.2f}",
            _between(value, ".2f"),
            "",
            goal,
            met,
        )
    for line in newest(results, "interleave"):
        where, figures = (line["workload"]["variant"], line["workload"]["resident"]), line["figures"]
        if "worst_gap_ms" in figures:
            value = figures["worst_gap_ms"]
            goal, met = judged(value["median"], GOALS.get(("gap", where[1])))
            yield Row(
                "longest gap during another's prefill, ms",
                *where,
                f"{value['median']:.1f}",
                _between(value, ".1f"),
                "",
                goal,
                met,
            )
    yield from _state_rows(results, rates)


def _decode_rows(line: Mapping[str, Any], rates: Mapping[str, Any] | None) -> Iterator[Row]:
    workload, figures = line["workload"], line["figures"]
    where, batch, arms = (workload["variant"], workload["resident"]), workload["batch"], figures["arms"]
    for arm, about in arms.items():
        rate = about["tokens_per_s"]
        floor = ""
        if rates is not None and batch == 1:
            floor = f"{1000 / decode_floor_ms(figures, about['missed_bytes_per_token'], rates):.0f}"
        counts = batch == 1 and arm in ("auto", "resident")
        goal, met = judged(rate["median"], GOALS.get(("decode", where[1])) if counts else None)
        name = f"decode {arm}, {batch} at once, tokens/s" if batch > 1 else f"decode {arm}, tokens/s"
        hits = ""
        if where[1] < 100:
            best = f" (LRU {figures['lru_hit_rate']:.0%}, optimum {figures['belady_hit_rate']:.0%})"
            hits = f"; {about['hit_rate']:.0%} hits{best if batch == 1 else ''}"
        yield Row(name, *where, f"{rate['median']:.1f}", _between(rate, ".1f") + hits, floor, goal, met)
        if batch == 1 and arm in ("auto", "resident"):
            gap = about["gap_ms"]
            yield Row(f"decode {arm}, ms between tokens", *where, f"{gap['p50']:.2f}", f"p99 {gap['p99']:.2f}")
        if arm == "resident" and batch == 1 and rates is not None:
            yield from _layer_rows(line, about, rates)
    if "hybrid_of_whole" in figures:
        value = figures["hybrid_of_whole"]
        name = f"hybrid ÷ whole experts, round by round, {batch} at once"
        yield Row(name, *where, f"{value['median']:.3f}", _between(value, ".3f"))
    if {"hybrid", "fetch", "cpu", "auto"} <= set(arms):
        middle = {arm: arms[arm]["tokens_per_s"]["median"] for arm in arms}
        if batch == 1:
            for pure in ("fetch", "cpu"):
                ratio = middle["hybrid"] / middle[pure]
                goal, met = judged(ratio, GOALS.get((f"of {pure}", where[1])))
                yield Row(f"hybrid without fall-back ÷ {pure}", *where, f"{ratio:.2f}", "", "", goal, met)
        ratio = middle["auto"] / max(middle["fetch"], middle["cpu"])
        goal, met = judged(ratio, (PURE_SHARE, "≥"))
        yield Row(f"with fall-back ÷ better pure way, {batch} at once", *where, f"{ratio:.2f}", "", "", goal, met)


def _layer_rows(line: Mapping[str, Any], about: Mapping[str, Any], rates: Mapping[str, Any]) -> Iterator[Row]:
    workload, figures = line["workload"], line["figures"]
    where, layers = (workload["variant"], workload["resident"]), workload["layers"]
    # The head is no layer's: it is taken out as the time of its bytes.
    us = (1000 * about["gap_ms"]["p50"] - figures["head_bytes"] / rates["hbm_mbs"]) / layers
    floor = (figures["dense_bytes"] - figures["head_bytes"] + figures["routed_bytes"]) / rates["hbm_mbs"] / layers
    for name, value in (("layer", us), ("beyond", us - floor)):
        goal, met = judged(value, GOALS.get((name, where[1])))
        what = "a layer with all resident, µs" if name == "layer" else "a layer beyond bytes ÷ bandwidth, µs"
        yield Row(what, *where, f"{value:.0f}", "", f"{floor:.0f}" if name == "layer" else "", goal, met)


def _state_rows(results: Results, rates: Mapping[str, Any] | None) -> Iterator[Row]:
    for line in newest(results, "restore"):
        where, figures = (line["workload"]["variant"], line["workload"]["resident"]), line["figures"]
        for way in ("memory", "file"):
            value = figures.get(f"{way}_gb_s")
            if value is None:
                continue
            name = f"restore {line['workload']['context']} tokens from {way}, GB/s"
            if rates is None:
                yield Row(name, *where, f"{value['median']:.1f}", _between(value, ".1f"))
                continue
            link = rates["copy_mbs"] / 1000
            bound = GOALS.get((way, where[1]))
            _, met = judged(value["median"] / link, bound)
            goal = "" if bound is None else f"≥ {bound[0] * link:.1f}"
            yield Row(name, *where, f"{value['median']:.1f}", _between(value, ".1f"), f"{link:.1f}", goal, met)
    for line in newest(results, "save"):
        where, value = (line["workload"]["variant"], line["workload"]["resident"]), line["figures"]["rate_while_saving_of_rate"]
        goal, met = judged(value["median"], GOALS.get(("saving", where[1])))
        yield Row("decode rate while saving ÷ without", *where, f"{value['median']:.3f}", _between(value, ".3f"), "", goal, met)
    for line in newest(results, "resize"):
        where, value = (line["workload"]["variant"], line["workload"]["resident"]), line["figures"]["worst_gap_ms"]
        goal, met = judged(value["median"], GOALS.get(("stall", where[1])))
        yield Row("longest gap at a resize, ms", *where, f"{value['median']:.1f}", _between(value, ".1f"), "", goal, met)


def _between(value: Mapping[str, float], form: str) -> str:
    return f"{value['p10']:{form}} … {value['p90']:{form}}"


def parts_lines(parts: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What a part of one expert takes on either side, by its inner rows."""
    for rows_, of in parts.items():
        yield (
            f"{rows_} rows of one expert: {of['us']:.1f} µs over the link ({of['gb_s']:.1f} GB/s), beside the CPU's load "
            f"{of['us_beside_cpu']:.1f} µs ({of['gb_s_beside_cpu']:.1f} GB/s, the CPU {of['cpu_gb_s_beside']:.1f}); on the CPU "
            f"alone {of['cpu_us']:.1f} µs"
        )


def show(console: Console, results: Results) -> int:
    """Print the table. Returns how many goals were missed."""
    rates = results.find("calibrate")
    if rates is not None:
        gb = {key: value / 1000 for key, value in rates.items() if key.endswith("_mbs")}
        console.print(
            f"GB/s: link {gb['copy_mbs']:.1f} by copy engine, {gb['link_mbs']:.1f} by kernels; CPU {gb['cpu_mbs']:.1f}; "
            f"together {gb['both_link_mbs']:.1f} + {gb['both_cpu_mbs']:.1f}; device memory {gb['hbm_mbs']:.0f}"
        )
        for line in parts_lines(rates.get("parts", {})):
            console.print(line)
    table = Table(caption="floor: bytes ÷ measured bandwidth, perfectly overlapped; p10 … p90 beside each median", box=SIMPLE)
    table.add_column("what", no_wrap=True)
    for name in ("variant", "resident"):
        table.add_column(name)
    for name in ("figure", "p10 … p90", "floor", "goal"):
        table.add_column(name, justify="right", no_wrap=True)
    missed = 0
    for row in sorted(rows(results), key=lambda row: (row.resident, row.variant)):
        mark = {None: "", True: " ✓", False: " ✗"}[row.met]
        missed += row.met is False
        table.add_row(row.what, row.variant, f"{row.resident}%", row.figure, row.spread, row.floor, row.goal + mark)
    console.print(table)
    wrong = [line for line in results.lines if line["figures"].get("walked_right") is False]
    if wrong:
        console.print(f"{len(wrong)} measurements did not give the programmed tokens")
    return missed
