"""Agents that cancel, hang up, reconnect and edit for as long as asked: memory stays flat, and everything is given back.

Real server and worker processes, the fake engine, real sockets. SOAK_MINUTES sets how long; without it a short run keeps the
test itself honest.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.load.agents import Asked, Behaviour, Crowd
from benchmarks.load.lab import Memory, work
from benchmarks.load.server import LabServer, lab_server
from tests.soak.at_rest import flat, gave_back, rows_are_whole, settle

MINUTES = float(os.environ.get("SOAK_MINUTES", "0.1"))
SETTINGS = ("model.ram_cache_bytes=4194304", "model.disk_cache_bytes=8388608", "model.disk_reserve_bytes=0")
"""Full within a few minutes, so that a long run is one of tiers that evict: what grows then is no cache that fills."""


WANTED = ("incomplete", "cancelled", "vanished")
"""How some turns must have ended."""


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
    quiet = Crowd(server.port, seed=1, behaviour=Behaviour(), most_context=4096, lone_s=lambda suffix, behind: 10.0)
    await one_turn(quiet)
    await settle(server)
    before, memory = server.descriptors(), Memory(server)
    sampling = asyncio.create_task(memory.run())
    crowd = Crowd(server.port, seed=2, behaviour=behaviour, most_context=12_000, lone_s=lambda suffix, behind: 10.0)
    asked: list[Asked] = []
    ends: Counter[str] = Counter()
    # In pieces, so that what the test itself remembers does not grow with the time.
    pieces = max(1, round(minutes))
    begun = 0
    while begun < pieces or min(ends[name] for name in WANTED) == 0:  # what few agents do in a short one is left to chance
        begun += 1
        asked = await crowd.open(16, work(most=600, output=16), 3.0, minutes * 60 / pieces)
        ends.update(turn.ends for turn in asked)
    sampling.cancel()
    await one_turn(quiet)
    counters = await settle(server)
    assert set(ends) <= {"completed", *WANTED}, ends
    if not stays:
        assert counters['agentserve_worker_counter{name="holds",worker="demo/0"}'] == 0
        assert pages_in_use(counters) == 0, "nothing runs and nothing is held, so every page is free"
    gave_back(counters, before, server.descriptors())
    flat(memory)


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
