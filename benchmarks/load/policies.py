"""Who goes first, compared in virtual time on the same recorded load: how many deadlines each policy misses.

    python -m benchmarks.load policies [--machines H200 laptop] [--turns 600] [--seeds 1 2 3] [--utilisation 0.8] [--record]

Deadlines are three times the TTFT that the turn would have alone, and a quarter of a second. Utilisation is the share of time
that the machine computes when turns go in order of arrival; the time between arrivals is set so that it is as asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.load.goals import Goal, judge
from benchmarks.load.machines import MACHINES, Machine
from benchmarks.load.recorded import Job, Turn, open_loop, recorded_sessions
from benchmarks.load.simulator import POLICIES, Figures, fifo, lone_ttft_us, simulate


def load_for(
    sessions: Sequence[Sequence[Turn]], machine: Machine, *, turns: int, seed: int, utilisation: float
) -> tuple[list[Job], float]:
    """Jobs that keep the machine busy for that share of the time in order of arrival, and the share as it came out."""
    jobs = open_loop(sessions, turns=turns, mean_us=1, seed=seed)
    mean = sum(lone_ttft_us(job, machine) + job.output * machine.decode_us for job in jobs) // turns
    low, high, busy = 0, 0, 0.0
    for _ in range(24):
        jobs = open_loop(sessions, turns=turns, mean_us=mean, seed=seed)
        figures = simulate(jobs, machine, fifo)
        busy = figures.busy_us / figures.span_us
        if abs(busy - utilisation) < 0.005:
            break
        if busy > utilisation:
            low = mean
        else:
            high = mean
        mean = (low + high) // 2 if high and low else mean * 2 if not high else mean // 2
    return jobs, busy


def compare(
    machine: Machine, *, turns: int, seeds: Sequence[int], utilisation: float, gap_us: int = 300_000
) -> dict[str, dict[str, Any]]:
    """Policy → figures over all seeds. "slack" is what the engine does with its decode gap, "slack, whole chunks" without."""
    sessions = recorded_sessions(machine.most_context)
    runs: dict[str, list[Figures]] = {}
    for seed in seeds:
        jobs, _ = load_for(sessions, machine, turns=turns, seed=seed, utilisation=utilisation)
        for name, policy in POLICIES.items():
            if name == "slack":
                runs.setdefault("slack, whole chunks", []).append(simulate(jobs, machine, policy))
            figures = simulate(jobs, machine, policy, gap_us=gap_us if name == "slack" else 0, pause=name == "slack")
            runs.setdefault(name, []).append(figures)
    return {name: summary(figures) for name, figures in runs.items()}


def summary(runs: Sequence[Figures]) -> dict[str, Any]:
    """missed: share of late turns, of all and per seed. stretch: TTFT ÷ lone TTFT. ttft_s, gap_s: seconds."""
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    stretch = sorted(outcome.ttft / max(1, outcome.lone) for outcome in outcomes)
    ttft = sorted(outcome.ttft / 1e6 for outcome in outcomes)
    gaps = sorted(gap / 1e6 for run in runs for gap in run.gaps)
    return {
        "missed": round(sum(not outcome.met for outcome in outcomes) / len(outcomes), 4),
        "missed_by_seed": [round(run.missed, 4) for run in runs],
        "busy": round(sum(run.busy_us for run in runs) / sum(run.span_us for run in runs), 3),
        "stretch": tails(stretch),
        "ttft_s": {p: round(at(ttft, q), 3) for p, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))},
        "gap_s": {p: round(at(gaps, q), 3) for p, q in (("p50", 0.5), ("p99", 0.99))} if gaps else None,
        "pauses": sum(run.pauses for run in runs),
    }


def tails(ordered: Sequence[float]) -> dict[str, float]:
    return {name: round(at(ordered, share), 2) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def at(ordered: Sequence[float], share: float) -> float:
    """The value at this share of an ordered list (nearest rank)."""
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load policies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", nargs="+", default=("H200", "laptop"), choices=sorted(MACHINES))
    parser.add_argument("--turns", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3, 4, 5))
    parser.add_argument("--utilisation", type=float, default=0.8)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    for name in options.machines:
        found = compare(MACHINES[name], turns=options.turns, seeds=options.seeds, utilisation=options.utilisation)
        table = Table(title=f"{name}, {options.turns} turns × {len(options.seeds)} seeds, {options.utilisation:.0%} busy")
        for column in (
            "policy",
            "missed",
            "busy",
            "stretch p50",
            "p95",
            "p99",
            "TTFT p50 s",
            "p99",
            "max",
            "gap p99 s",
            "pauses",
        ):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for policy, line in found.items():
            stretch, ttft, gap = line["stretch"], line["ttft_s"], line["gap_s"]
            table.add_row(
                policy,
                f"{line['missed']:.2%}",
                str(line["busy"]),
                *(str(stretch[p]) for p in ("p50", "p95", "p99")),
                *(str(ttft[p]) for p in ("p50", "p99", "max")),
                str(gap["p99"]) if gap else "",
                str(line["pauses"]),
            )
        console.print(table)
        slack, first_come = found["slack"]["missed"], found["fifo"]["missed"]
        goal = Goal("late turns by slack, of those in order of arrival", _ratio(slack, first_come), 0.5)
        found["goals"] = judge(console, [goal])
        workload = {
            "recording": "coding_agent_blocks",
            "turns": options.turns,
            "seeds": list(options.seeds),
            "utilisation": options.utilisation,
            "deadline": "3 × lone TTFT + 250 ms",
        }
        report("load_policies", f"virtual {name}", workload, found, options.record)
