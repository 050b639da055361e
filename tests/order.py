"""The order of tests that run side by side. `--dist worksteal` gives each process an equal run of the list and lets one that is
through take over the ends of the others: so long tests belong to the beginnings, and short ones to the ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
LONG = ("e2e", "benchmarks", "worker")
"""Folders of tests that take seconds each, by their time. One folder stays in one process, which so starts its servers once."""


def spread(items: Sequence[Item], processes: int, folder: Callable[[Item], str]) -> list[Item]:
    """The same items, so that the run of each process begins with folders of LONG; else in the order that they have."""
    runs: list[list[Item]] = [[] for _ in range(processes)]
    for number, name in enumerate(LONG):
        runs[number % processes] += [item for item in items if folder(item) == name]
    short = [item for item in items if folder(item) not in LONG]
    ordered: list[Item] = []
    end = 0
    for number, run in enumerate(runs):
        end += (len(items) - end) // (processes - number)  # as xdist does
        room = max(0, end - len(ordered) - len(run))
        ordered += [*run, *short[:room]]
        short = short[room:]
    return ordered + short
