"""Agents that cancel, hang up, reconnect and edit for as long as asked: memory stays flat, and everything is given back.

Real server and worker processes, the fake engine, real sockets. SOAK_MINUTES sets how long; without it a short run keeps the
test itself honest.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.load.agents import Asked, Behaviour, Crowd
from benchmarks.load.lab import Memory, work
from benchmarks.load.server import LabServer, lab_server

MINUTES = float(os.environ.get("SOAK_MINUTES", "0.1"))
SETTLED = 200
"""Looks, 50 ms apart, at whether the server has come to rest."""
GROWTH_MIB = 24.0
"""Of either process between a third of the time and its end: caches that fill and the allocator's slack, in a long run."""
SETTINGS = ("model.ram_cache_bytes=33554432", "model.disk_cache_bytes=67108864", "model.disk_reserve_bytes=0")


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


def pages_in_use(counters: dict[str, float]) -> float:
    return (
        counters['agentserve_worker_kv_pages{state="total",worker="demo/0"}']
        - counters['agentserve_worker_kv_pages{state="free",worker="demo/0"}']
    )


async def one_turn(crowd: Crowd) -> None:
    """So that a load report is made after everything before it has ended."""
    (asked,) = await crowd.alone((64,), 1, 2)
    assert asked.ends in ("incomplete", "completed"), asked


async def soak(server: LabServer, minutes: float, stays: bool) -> None:
    """stays: states may stay in the engine's pools between turns."""
    behaviour = Behaviour(cancel=0.15, vanish=0.15, reconnect=0.2, edit=0.15)
    quiet = Crowd(server.port, seed=1, behaviour=Behaviour(), most_context=4096, lone_s=lambda size: 10.0)
    await one_turn(quiet)
    await settle(server)
    before, memory = server.descriptors(), Memory(server)
    sampling = asyncio.create_task(memory.run())
    crowd = Crowd(server.port, seed=2, behaviour=behaviour, most_context=12_000, lone_s=lambda size: 10.0)
    asked: list[Asked] = []
    ends: Counter[str] = Counter()
    # In pieces, so that what the test itself remembers does not grow with the time.
    pieces = max(1, round(minutes))
    for _ in range(pieces):
        asked = await crowd.open(16, work(most=600, output=16), 3.0, minutes * 60 / pieces)
        ends.update(turn.ends for turn in asked)
    sampling.cancel()
    await one_turn(quiet)
    counters = await settle(server)
    assert set(ends) <= {"completed", "incomplete", "cancelled", "vanished"}, ends
    assert min(ends[name] for name in ("incomplete", "cancelled", "vanished")) > 0, ends
    for name in ("turns", "pins", "cache_errors", "release_errors"):
        assert counters[f'agentserve_worker_counter{{name="{name}",worker="demo/0"}}'] == 0, name
    assert counters['agentserve_worker_restarts{worker="demo/0"}'] == 0
    if not stays:
        assert counters['agentserve_worker_counter{name="holds",worker="demo/0"}'] == 0
        assert pages_in_use(counters) == 0, "nothing runs and nothing is held, so every page is free"
    after = server.descriptors()
    # A pool of database connections may have opened a few more.
    assert all(after[name] <= before[name] + 6 for name in after), (before, after)
    flat(memory)


def flat(memory: Memory) -> None:
    third = len(memory.samples) // 3
    for name in ("server", "worker"):
        values = [sample[name] for _, sample in memory.samples[third:] if name in sample]
        early, late = values[: max(1, len(values) // 4)], values[-max(1, len(values) // 4) :]
        grown = sum(late) / len(late) - sum(early) / len(early)
        assert grown < GROWTH_MIB, f"{name} grew by {grown:.1f} MiB after the first third"


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


@pytest.mark.parametrize("stays", [True, False], ids=["states stay", "states leave"])
def test_agents_for_as_long_as_asked_leave_memory_flat_and_nothing_behind(tmp_path: Path, stays: bool) -> None:
    with lab_server(tmp_path, "small", (*SETTINGS, f"model.device_residency={str(stays).lower()}")) as server:
        asyncio.run(soak(server, MINUTES / 2, stays))
    rows_are_whole(tmp_path / "sessions.db")


def test_growth_is_seen() -> None:
    memory = Memory.__new__(Memory)
    memory.samples = [(float(i), {"server": 100.0, "worker": 200.0 + i}) for i in range(120)]
    with pytest.raises(AssertionError, match="worker grew"):
        flat(memory)
