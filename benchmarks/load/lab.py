"""Agents on a real server: times to the first token, gaps, deadlines, predictions, reuse and memory over time.

    python -m benchmarks.load agents [--engine demo] [--agents 16] [--load 0.5] [--minutes 3] [--plot FILE.png] [--record]

First one agent alone, for the TTFT of suffixes behind contexts of any length, and some of the turns to come, to see what that
is worth; then all of them, in the middle of their sessions, without pauses, for what the server can do; then the same turns at
random times at `load` of that. Suffixes are the recorded ones from 64 to 8,192 tokens, answers at most 64 tokens.
Deadlines are three times each turn's lone TTFT, of its suffix behind its context, and a quarter of a second. Nothing else
should run; see the load in each line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import cpu_s, report
from benchmarks.load.agents import Asked, Behaviour, Crowd
from benchmarks.load.goals import Goal, judge, of_turns
from benchmarks.load.lone import Lone
from benchmarks.load.policies import at
from benchmarks.load.recorded import Turn, recorded_sessions
from benchmarks.load.server import ENGINES, LabServer, lab_server

LONE_OUTPUT = 4
APART = 2
"""Lone turns of each session that lone times are held against."""
OFTEN = 1024
"""Lone turns of no more tokens are played several times: what holds one up for a moment counts for more in them."""


def work(least: int = 64, most: int = 8192, output: int = 64) -> list[Turn]:
    """Recorded turns with suffixes in a range. Their answers are shortened, their pauses kept."""
    turns = (turn for session in recorded_sessions(131_072) for turn in session)
    return [Turn(t.pause, t.restored, t.suffix, min(t.output, output)) for t in turns if least <= t.suffix <= most]


class Memory:
    """MiB of each process once a second. kept: also of the server's caches, by that name."""

    def __init__(self, server: LabServer, *, kept: bool = False) -> None:
        self._server = server
        self._kept = kept
        self._begun = time.monotonic()
        self.samples: list[tuple[float, dict[str, float]]] = []

    async def run(self) -> None:
        while True:
            sample = self._server.rss_mib()
            if self._kept:
                counters = await asyncio.to_thread(self._server.counters)
                caches = [size for name, size in counters.items() if name.startswith("agentserve_kept_bytes")]
                sample["kept"] = sum(caches) / (1 << 20)
            self.samples.append((time.monotonic() - self._begun, sample))
            await asyncio.sleep(1.0)

    def figures(self) -> dict[str, dict[str, float]]:
        """Per process: at the first and the last quarter's beginning, at the end, at most."""
        found: dict[str, dict[str, float]] = {}
        for name in self.samples[-1][1]:
            values = [sample[name] for _, sample in self.samples if name in sample]
            places = {"early": len(values) // 4, "late": 3 * len(values) // 4, "end": len(values) - 1}
            found[name] = {key: round(values[index], 1) for key, index in places.items()} | {"most": round(max(values), 1)}
        return found


def summary(asked: Sequence[Asked], lone: Lone) -> dict[str, Any]:
    """Of turns that were not cut short. Shares are of those turns. stretch: TTFT ÷ the median of lone ones with as much to
    compute behind any context; own_stretch: ÷ the turn's own lone TTFT."""
    ended: dict[str, int] = {}
    for turn in asked:
        ended[turn.ends] = ended.get(turn.ends, 0) + 1
    turns = [t for t in asked if t.ttft is not None]
    if not turns:
        return {"turns": 0, "ended": ended}
    ttft = sorted(t.ttft or 0.0 for t in turns)
    stretch = sorted((t.ttft or 0.0) / max(1e-3, lone.usual_s(t.new)) for t in turns)
    own_stretch = sorted((t.ttft or 0.0) / max(1e-3, t.lone_s) for t in turns)
    gaps = sorted(gap for t in turns for _, gap in t.gaps)
    told = [t for t in turns if t.predicted is not None]
    errors = sorted(abs((t.predicted or 0) - (t.ttft or 0)) / max(1e-3, t.ttft or 0) for t in told)
    late = [t for t in told if (t.ttft or 0) > t.deadline_s]
    in_time = [t for t in told if (t.ttft or 0) <= t.deadline_s]
    warned_after = sorted(t.warned_after or 0.0 for t in told)
    prompt = sum(t.prompt for t in turns)
    return {
        "turns": len(turns),
        "ended": ended,
        "ttft_s": _at(ttft, p50=0.5, p95=0.95, p99=0.99),
        "stretch": _at(stretch, p50=0.5, p95=0.95, p99=0.99),
        "own_stretch": _at(own_stretch, p50=0.5, p95=0.95, p99=0.99),
        "gap_s": _at(gaps, p50=0.5, p99=0.99, max=1.0) if gaps else None,
        "met": round(1 - sum((t.ttft or 0) > t.deadline_s for t in turns) / len(turns), 4),
        "prediction_error": _at(errors, p50=0.5, p95=0.95) if errors else None,
        "first_word_ms": _at([1000 * s for s in warned_after], p50=0.5, p99=0.99) if told else None,
        "missed_alarms": round(sum(not t.warned for t in late) / max(1, len(told)), 4),
        "false_alarms": round(sum(bool(t.warned) for t in in_time) / max(1, len(told)), 4),
        "reused": round(sum(t.cached for t in turns) / prompt, 4) if prompt else None,
    }


def _at(ordered: Sequence[float], **shares: float) -> dict[str, float]:
    return {name: round(at(ordered, share), 4) for name, share in shares.items()}


async def measure(
    server: LabServer, options: argparse.Namespace, turns: Sequence[Turn]
) -> tuple[dict[str, Any], list[Asked], Memory]:
    behaviour = Behaviour(options.cancel, options.vanish, options.reconnect, options.edit)
    plain = Crowd(server.port, seed=options.seed, behaviour=Behaviour(), most_context=options.context)
    memory = Memory(server)
    sampling = asyncio.create_task(memory.run())
    cores: dict[str, dict[str, float]] = {}
    try:
        lone = measured(
            await plain.behind(LONE_OUTPUT, lambda size: options.rounds if size <= OFTEN else 1), options.context - LONE_OUTPUT
        )
        sessions = await plain.grown(options.agents)
        crowd = Crowd(server.port, seed=options.seed, behaviour=behaviour, most_context=options.context, lone_s=lone.own_s)
        apart = await crowd.apart(turns, sessions, LONE_OUTPUT, APART)
        with using(server, cores, "capacity"):
            capacity, same = await plain.closed(options.agents, turns, options.capacity_s, sessions)
        with using(server, cores, "load"):
            asked = await crowd.open(options.agents, same, capacity * options.load, options.minutes * 60, sessions)
    finally:
        sampling.cancel()
    figures = {
        "lone_ttft_s": {
            str(behind): {str(size): round(seconds, 4) for size, seconds in points} for behind, points in lone.points.items()
        },
        "lone_error": off(apart),
        "capacity_turns_per_s": round(capacity, 3),
        "offered_turns_per_s": round(capacity * options.load, 3),
        "cores": cores,
        **summary(asked, lone),
        "rss_mib": memory.figures(),
    }
    return figures, asked, memory


def measured(alone: Sequence[Asked], room: int) -> Lone:
    """room: see Lone. Raises RuntimeError where nothing was answered."""
    points = [(t.behind, t.new, t.ttft) for t in alone if t.ttft is not None]
    if not points:
        raise RuntimeError(f"no turn was answered: {[t.ends for t in alone]}")
    return Lone(points, room)


def off(apart: Sequence[Asked]) -> dict[str, float]:
    """How far lone turns are from what they should take, relative: all of them too early or too late (bias), and each."""
    ratios = sorted((t.ttft or 0.0) / t.lone_s - 1 for t in apart if t.ttft is not None)
    errors = sorted(abs(ratio) for ratio in ratios)
    return {"turns": len(ratios), "bias": round(at(ratios, 0.5), 3), **_at(errors, p50=0.5, max=1.0)} if ratios else {}


@contextlib.contextmanager
def using(server: LabServer, cores: dict[str, dict[str, float]], phase: str) -> Iterator[None]:
    """Note how many cores each process uses in the block: whether half of the capacity is half of the work."""
    pids = server.pids | {"client": os.getpid()}
    began, before = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
    yield
    span = time.monotonic() - began
    cores[phase] = {name: round((cpu_s(pid) - before[name]) / span, 3) for name, pid in pids.items()}


def write_turns(path: Path, asked: Sequence[Asked]) -> None:
    """A JSON line for each turn: which were late, behind what."""
    begun = min((t.at for t in asked), default=0.0)
    with path.open("w") as file:
        for t in asked:
            line = {
                "at_s": round(t.at - begun, 3),
                "suffix": t.suffix,
                "behind": t.behind,
                "again": t.again,
                "restored": t.cached,
                "computed": t.prompt - t.cached,
                "ttft_s": t.ttft,
                "lone_s": round(t.lone_s, 4),
                "deadline_s": round(t.deadline_s, 4),
                "predicted_s": t.predicted,
                "warned": t.warned,
                "first_word_s": t.warned_after,
                "longest_gap_s": max((gap for _, gap in t.gaps), default=None),
                "ended": t.ends,
            }
            file.write(json.dumps(line) + "\n")


def show(console: Console, title: str, figures: dict[str, Any]) -> None:
    table = Table(title=title, show_header=False)
    for key, value in figures.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(key, text)
    console.print(table)


def plot(asked: Sequence[Asked], memory: Memory, path: Path) -> None:
    """TTFT by suffix, gaps over time, memory over time. Needs matplotlib (the `bench` extra)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.6))
    turns = [t for t in asked if t.ttft is not None]
    late = [t for t in turns if (t.ttft or 0) > t.deadline_s]
    left.loglog([t.suffix for t in turns], [t.ttft for t in turns], ".", markersize=3, label="in time")
    left.loglog([t.suffix for t in late], [t.ttft for t in late], "x", markersize=4, label="late")
    left.set_xlabel("suffix, tokens", fontsize=8)
    left.set_title("time to first token, s", fontsize=9)
    left.legend(fontsize=7)
    begun = min((t.at for t in turns), default=0.0)
    gaps = [(when - begun, 1000 * gap) for t in turns for when, gap in t.gaps]
    middle.semilogy([when for when, _ in gaps], [max(0.1, gap) for _, gap in gaps], ".", markersize=1)
    middle.set_title("gap between tokens, ms", fontsize=9)
    middle.set_xlabel("s", fontsize=8)
    for name in memory.samples[-1][1] if memory.samples else ():
        right.plot([s for s, _ in memory.samples], [sample.get(name, 0.0) for _, sample in memory.samples], label=name)
    right.set_ylim(0, None)
    right.set_title("resident memory, MiB", fontsize=9)
    right.legend(fontsize=7)
    for axes in (left, middle, right):
        axes.tick_params(labelsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load agents", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="demo")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--load", type=float, default=0.5, help="share of the measured capacity")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3, help="lone turns of each small size behind each context")
    parser.add_argument("--capacity-s", type=float, default=45.0)
    parser.add_argument("--context", type=int, default=24_000, help="longest context before a session begins anew")
    parser.add_argument("--most-suffix", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    for name in ("cancel", "vanish", "reconnect", "edit"):
        parser.add_argument(f"--{name}", type=float, default=0.0, help="share of turns")
    parser.add_argument("--plot", type=Path, default=None, help="write a picture here")
    parser.add_argument("--turns", type=Path, default=None, help="write a line for each turn here")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    parser.add_argument("settings", nargs="*", metavar="section.field=value", help="of the server")
    options = parser.parse_args(arguments)
    turns = work(most=options.most_suffix)
    with tempfile.TemporaryDirectory() as folder, lab_server(Path(folder), options.engine, options.settings) as server:
        figures, asked, memory = asyncio.run(measure(server, options, turns))
    console = Console(width=140)
    show(console, f"{options.agents} agents at {options.load:.0%} of capacity, {options.engine}", figures)
    figures["goals"] = judge(
        console,
        [
            Goal("first token, p99, in lone ones of the same suffix", (figures.get("stretch") or {}).get("p99"), 8),
            Goal("deadlines met", figures.get("met"), 0.99, least=True),
            *of_turns(figures),
        ],
    )
    if options.plot is not None:
        plot(asked, memory, options.plot)
    if options.turns is not None:
        write_turns(options.turns, asked)
    workload = {key: value for key, value in vars(options).items() if key not in ("plot", "turns", "record", "engine")}
    report("load_agents", options.engine, workload, figures, options.record)
