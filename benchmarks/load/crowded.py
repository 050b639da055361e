"""The load of `agents` in virtual time: recorded suffixes behind contexts of any length, at random times.

    python -m benchmarks.load crowd [--machine small] [--utilisation 0.5] [--turns 400] [--seeds 1 2 3] [--record]

Deadlines are three times each turn's lone first token and a quarter of a second, as the lab's are on a real server; who goes
first, chunks and rows are the engine's. Utilisation is the share of time that the machine computes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common import report
from benchmarks.load.goals import Goal, judge
from benchmarks.load.lab import show, work
from benchmarks.load.lone import CONTEXTS, Lone, sizes_behind
from benchmarks.load.machines import MACHINES, Machine
from benchmarks.load.policies import summary, tails
from benchmarks.load.recorded import Job
from benchmarks.load.simulator import POLICIES, Figures, lone_ttft_us, simulate

GAP_US = 80_000
"""As engine.config has it."""
LONGEST = 24_000
"""Tokens of the longest context."""


def crowd(machine: Machine, *, turns: int, per_second: float, seed: int, agents: int = 16, longest: int = LONGEST) -> list[Job]:
    rng = random.Random(seed)
    contexts = [rng.randrange(longest) for _ in range(agents)]
    recorded, now, jobs = work(), 0, list[Job]()
    for _ in range(turns):
        now += round(rng.expovariate(per_second) * 1e6)
        session, turn = rng.randrange(agents), rng.choice(recorded)
        if contexts[session] + turn.suffix + turn.output > longest:
            contexts[session] = 0
        jobs.append(Job(now, session, contexts[session], turn.suffix, turn.output))
        contexts[session] += turn.suffix + turn.output
    return jobs


def lone_of(machine: Machine, longest: int = LONGEST) -> Lone:
    """As the lab measures it on a real server."""
    contexts = [longest * place // CONTEXTS for place in range(CONTEXTS)]
    grid = [(behind, size) for behind in contexts for size in sizes_behind(behind, longest)]
    return Lone([(behind, size, lone_ttft_us(Job(0, 0, behind, size, 1), machine) / 1e6) for behind, size in grid], longest)


class Run(NamedTuple):
    jobs: list[Job]
    figures: Figures


def played(machine: Machine, policy: str, *, turns: int, seed: int, utilisation: float) -> Run:
    """Turns as often as keep the machine busy for that share of the time, within a hundredth or so."""
    per_second, jobs, figures = 1.0, list[Job](), Figures([])
    for _ in range(8):
        jobs = crowd(machine, turns=turns, per_second=per_second, seed=seed)
        figures = simulate(jobs, machine, POLICIES[policy], gap_us=GAP_US)
        busy = figures.busy_us / figures.span_us
        if abs(busy - utilisation) < 0.01:
            break
        per_second *= utilisation / busy
    return Run(jobs, figures)


def stretches(runs: Sequence[Run], lone: Lone) -> list[float]:
    """TTFT ÷ the median of lone ones of the same suffix behind any context, rising."""
    pairs = ((job, outcome) for run in runs for job, outcome in zip(run.jobs, run.figures.outcomes, strict=True))
    return sorted(outcome.ttft / 1e6 / lone.usual_s(job.suffix) for job, outcome in pairs)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load crowd", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="small", choices=sorted(MACHINES))
    parser.add_argument("--utilisation", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    console, found = Console(width=140), dict[str, Any]()
    lone = lone_of(MACHINES[options.machine])
    for policy in POLICIES:
        runs = [
            played(MACHINES[options.machine], policy, turns=options.turns, seed=seed, utilisation=options.utilisation)
            for seed in options.seeds
        ]
        own = summary([run.figures for run in runs])
        found[policy] = {**own, "own_stretch": own["stretch"], "stretch": tails(stretches(runs, lone))}
        show(console, policy, found[policy])
    late, stretch = found["slack"]["missed"], found["slack"]["stretch"]["p99"]
    found["goals"] = judge(
        console,
        [
            Goal("first token, p99, in lone ones of the same suffix", stretch, 8),
            Goal("deadlines met", round(1 - late, 4), 0.99, least=True),
        ],
    )
    workload = {key: value for key, value in vars(options).items() if key not in ("machine", "record")}
    report("load_crowd", f"virtual {options.machine}", workload, found, options.record)
