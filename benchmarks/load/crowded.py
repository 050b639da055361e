"""The load of `agents` in virtual time: recorded suffixes behind contexts of any length, at random times.

    python -m benchmarks.load crowd [--machine small] [--utilisation 0.5] [--turns 400] [--seeds 1 2 3] [--record]

Deadlines are three times a lone first token of the suffix, the median over contexts, and a quarter of a second, as the lab's
are on a real server; who goes first, chunks and rows are the engine's. Utilisation is the share of time that the machine
computes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.common import report
from benchmarks.load.goals import Goal, judge
from benchmarks.load.lab import SIZES, interpolate, show, work
from benchmarks.load.machines import MACHINES, Machine
from benchmarks.load.policies import summary
from benchmarks.load.recorded import Job
from benchmarks.load.simulator import POLICIES, Figures, lone_ttft_us, simulate

GAP_US = 80_000
"""As engine.config has it."""


def crowd(machine: Machine, *, turns: int, per_second: float, seed: int, agents: int = 16, longest: int = 24_000) -> list[Job]:
    """Deadlines follow from the suffix, as those of `agents` do: from the median over contexts up to the longest one."""
    rng = random.Random(seed)
    lone_s = interpolate([(size, median(_alone(machine, size, longest)) / 1e6) for size in SIZES])
    contexts = [rng.randrange(longest) for _ in range(agents)]
    recorded, now, jobs = work(), 0, list[Job]()
    for _ in range(turns):
        now += round(rng.expovariate(per_second) * 1e6)
        session, turn = rng.randrange(agents), rng.choice(recorded)
        if contexts[session] + turn.suffix + turn.output > longest:
            contexts[session] = 0
        lone = round(lone_s(turn.suffix) * 1e6)
        jobs.append(Job(now, session, contexts[session], turn.suffix, turn.output, lone=lone))
        contexts[session] += turn.suffix + turn.output
    return jobs


def _alone(machine: Machine, size: int, longest: int, contexts: int = 6) -> Sequence[int]:
    behind = [longest * place // contexts for place in range(contexts)]
    return [lone_ttft_us(Job(0, 0, at if at + size <= longest else 0, size, 1), machine) for at in behind]


def played(machine: Machine, policy: str, *, turns: int, seed: int, utilisation: float) -> Figures:
    """Turns as often as keep the machine busy for that share of the time, within a hundredth or so."""
    per_second, figures = 1.0, Figures([])
    for _ in range(8):
        jobs = crowd(machine, turns=turns, per_second=per_second, seed=seed)
        figures = simulate(jobs, machine, POLICIES[policy], gap_us=GAP_US)
        busy = figures.busy_us / figures.span_us
        if abs(busy - utilisation) < 0.01:
            break
        per_second *= utilisation / busy
    return figures


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load crowd", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="small", choices=sorted(MACHINES))
    parser.add_argument("--utilisation", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    console, found = Console(width=140), dict[str, Any]()
    for policy in POLICIES:
        runs = [
            played(MACHINES[options.machine], policy, turns=options.turns, seed=seed, utilisation=options.utilisation)
            for seed in options.seeds
        ]
        found[policy] = summary(runs)
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
