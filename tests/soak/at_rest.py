"""What a server must be once all that was asked of it has ended: quiet, no larger, and with a whole database."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from benchmarks.load.lab import Memory
from benchmarks.load.server import LabServer

SETTLED = 1200
"""Looks, 50 ms apart, at whether the server has come to rest."""
GROWTH_MIB = 24.0
"""Of either process between a third of the time and its end: caches that fill and the allocator's slack, in a long run."""


async def settle(server: LabServer) -> dict[str, float]:
    """Counters at rest. Fails with them if the server does not come to rest."""
    counters: dict[str, float] = {}
    for _ in range(SETTLED):
        counters = await asyncio.to_thread(server.counters)
        busy = (
            "agentserve_active_responses",
            "agentserve_open_sockets",
            'agentserve_worker_counter{name="turns",worker="demo/0"}',
        )
        if not any(counters.get(name, 0.0) for name in busy):
            return counters
        await asyncio.sleep(0.05)
    raise AssertionError({name: value for name, value in counters.items() if value and "bucket" not in name})


def gave_back(counters: dict[str, float], before: dict[str, int], after: dict[str, int]) -> None:
    """counters: at rest. before, after: descriptors of each process."""
    for name in ("turns", "pins", "cache_errors", "release_errors"):
        assert counters[f'agentserve_worker_counter{{name="{name}",worker="demo/0"}}'] == 0, name
    assert counters['agentserve_worker_restarts{worker="demo/0"}'] == 0
    # A keep-alive connection may still be open, and a file be in use by a writer in the background.
    assert all(after[name] <= before[name] + 2 for name in after), (before, after)


def flat(memory: Memory) -> None:
    """What the server says that its caches took in is not counted."""
    grown = {name: _grown(memory, name) for name in ("server", "worker", "kept")}
    print({name: f"{mib:+.1f} MiB after the first third" for name, mib in grown.items()})
    for name in ("server", "worker"):
        unexplained = grown[name] - (grown["kept"] if name == "server" else 0.0)
        assert unexplained < GROWTH_MIB, (
            f"{name} grew by {grown[name]:.1f} MiB after the first third, caches by {grown['kept']:.1f}"
        )


def _grown(memory: Memory, name: str) -> float:
    values = [sample[name] for _, sample in memory.samples[len(memory.samples) // 3 :] if name in sample]
    if not values:
        return 0.0
    early, late = values[: max(1, len(values) // 4)], values[-max(1, len(values) // 4) :]
    return sum(late) / len(late) - sum(early) / len(early)


def rows_are_whole(database: Path) -> None:
    """Every stored response has a session, and its parent is there: nothing was left half written."""
    with sqlite3.connect(database) as connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        assert "responses" in tables
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        (orphans,) = connection.execute(
            "select count(*) from responses r left join sessions s on s.id = r.session where s.id is null"
        ).fetchone()
        assert orphans == 0
        (statuses,) = connection.execute("select count(*) from responses where status = 'in_progress'").fetchone()
        assert statuses == 0
