"""Replay recorded agent sessions: what is reused, what is prefilled beyond the ideal, what is written.

    python -m benchmarks.traces [NAME ...] [--data DIR] [--sessions N] [--lanes 4] [--budgets 8+64 unlimited]
                                [--plot FILE.png] [--record]

NAME: coding_agent_blocks, airline_tool_calls, magagent, miniswe; all of them by default. `docs/traces.md` explains the figures.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import report
from benchmarks.traces import plot, show
from benchmarks.traces.alone import block_policies, prompt_policies
from benchmarks.traces.compose import compose, exchanges
from benchmarks.traces.data import AIRLINE, BLOCKS, DATA, MAGAGENT, MINISWE, block_sessions
from benchmarks.traces.store import replay_blocks
from benchmarks.traces.text import replay_prompts
from statecache.policy import Policy

NAMES = (BLOCKS, AIRLINE, MAGAGENT, MINISWE)
GIB = 1 << 30
UNLIMITED = 1 << 50
BUDGETS = ("8+64", "16+128", "32+256", "unlimited")


def budget(text: str) -> tuple[str, int, int]:
    """ "8+64" → (label, bytes of memory, bytes of disk)."""
    if text == "unlimited":
        return text, UNLIMITED, UNLIMITED
    memory, disk = (float(part) for part in text.split("+"))
    return f"{memory:g} + {disk:g}", int(memory * GIB), int(disk * GIB)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--data", type=Path, default=DATA, help="directory of NAME.jsonl.gz")
    parser.add_argument("--sessions", type=int, default=None, help="only the first N of each recording")
    parser.add_argument("--lanes", type=int, default=4, help="sessions that run at once")
    parser.add_argument("--budgets", nargs="*", default=BUDGETS, help="GiB of memory + disk")
    parser.add_argument("--plot", type=Path, default=None, help="write a picture here")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown recording {sorted(unknown)[0]!r}; there are {', '.join(NAMES)}")
    console = Console(width=180)
    alone: dict[str, Any] = {}
    stores: dict[str, Any] = {}
    for name in options.names or NAMES:
        if not (options.data / f"{name}.jsonl.gz").exists():
            console.print(f"skipped: {options.data / name}.jsonl.gz is not here")
            continue
        if name == BLOCKS:
            sessions: Any = block_sessions(options.data, options.sessions)
            alone[name], replay = block_policies(sessions), replay_blocks
        else:
            sessions = compose(exchanges(name, options.data, options.sessions), lanes=options.lanes)
            alone[name], replay = prompt_policies(sessions), replay_prompts
        workload = {"recording": name, "sessions": len(sessions), "requests": sum(map(len, sessions))}
        show.policies(console, name, alone[name])
        report("traces", "policies alone", workload, alone[name], options.record)
        stores[name] = {}
        for label, memory, disk in map(budget, options.budgets):
            figures = replay(sessions, Policy(), memory, disk, options.lanes)
            stores[name][label] = figures
            here = workload | {"budget_gib": label, "lanes": options.lanes}
            report("traces", "store, hybrid 35B: 20,480 B of KV a token, 61.4 MiB of state", here, figures, options.record)
        if stores[name]:
            show.store(console, name, stores[name])
    if options.plot is not None and alone and all(stores.values()):
        plot.draw(alone, stores, options.plot)
        console.print(f"picture: {options.plot}")


if __name__ == "__main__":
    main()
