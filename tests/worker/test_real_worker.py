"""A real worker process with a tiny random model: load, run, reuse, drain, die with its server, refuse a bad model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio

from agentserve.worker.client import WORKER_STOPPED, TurnFrame, WorkerClient
from agentserve.worker.main import serve
from agentserve.worker.messages import Cut, LoadFailed, Matched, Sampling, Saved, StartTurn, Tokens, TurnFailed, TurnFinished
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.supervisor import Supervisor, WorkerState
from engine.config import EngineConfig
from engine.engine import Engine
from statecache.types import BoundaryKind, MarkerTable
from tests.engine import helpers
from tests.engine.checkpoints import make, save

LIMITS = {"threads": 1, "backend": "exact", "chunk_tokens": 64, "kv_tokens": 4096, "max_rows": 4}
PROMPT = [int(t) for t in np.random.default_rng(5).integers(3, 90, 150)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make("qwen3_5_moe"), tmp_path_factory.mktemp("model"))


def settings_of(
    model_dir: Path, ram_cache_bytes: int = 64 << 20, *, state_dir: Path | None = None, **engine: int | str
) -> WorkerSettings:
    return WorkerSettings(
        model_dir=str(model_dir),
        model_name="tiny",
        ram_cache_bytes=ram_cache_bytes,
        state_dir=str(state_dir or model_dir),
        disk_cache_bytes=0 if state_dir is None else 1 << 30,
        disk_reserve_bytes=0,
        engine={**LIMITS, **engine},
        log_level="WARNING",
    )


@contextlib.asynccontextmanager
async def running(
    model_dir: Path, ram_cache_bytes: int = 64 << 20, *, state_dir: Path | None = None, **engine: int | str
) -> AsyncIterator[tuple[WorkerClient, Supervisor]]:
    client = WorkerClient(start_wait_s=60, query_wait_s=60)
    settings = settings_of(model_dir, ram_cache_bytes, state_dir=state_dir, **engine)
    supervisor = Supervisor(client, settings, first_backoff_s=0.05, watch_s=0.1)
    supervisor.start()
    try:
        yield client, supervisor
    finally:
        await supervisor.stop(drain_s=60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(model_dir: Path) -> AsyncIterator[tuple[WorkerClient, Supervisor]]:
    """Shared by tests with a salt of their own each. One that ends the process waits until that is known."""
    async with running(model_dir) as shared:
        yield shared


@pytest.fixture(scope="module")
def cold(model_dir: Path) -> Callable[[list[int], int], list[int]]:
    """cold(ids, most): the greedy answer of an engine in this process, which restores nothing."""
    engine = Engine.load(EngineConfig(model_dir=model_dir, **LIMITS))  # type: ignore[arg-type]

    def say(ids: list[int], most: int) -> list[int]:
        engine.submit(helpers.request("cold", ids, most, hold_at_end=False))
        return helpers.run(engine).tokens["cold"]

    return say


def start_turn(turn_id: str, ids: list[int], *, max_tokens: int = 8, salt: bytes = b"salt") -> StartTurn:
    return StartTurn(
        turn_id=turn_id,
        ids=np.array(ids, "<u4").tobytes(),
        cuts=(Cut(40, BoundaryKind.SYSTEM),),
        markers=MarkerTable(),
        salt=salt,
        session="s",
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
        accepted_at=time.monotonic(),
    )


async def run(client: WorkerClient, start: StartTurn) -> list[TurnFrame]:
    return [frame async for frame in client.run(start)]


def answer(frames: list[TurnFrame]) -> list[int]:
    return [token for frame in frames if isinstance(frame, Tokens) for token in frame.ids]


def matched(frames: list[TurnFrame]) -> Matched:
    return next(frame for frame in frames if isinstance(frame, Matched))


async def settled(client: WorkerClient) -> dict[str, float]:
    """Counters of the load report that follows the last turn."""
    load = client.load
    assert load is not None
    return load.counters


@pytest.mark.asyncio(loop_scope="module")
async def test_a_session_reuses_its_state_and_gets_the_answers_of_a_cold_run(
    worker: tuple[WorkerClient, Supervisor], cold: Callable[[list[int], int], list[int]]
) -> None:
    """The exact backend gives the same tokens bit for bit, in another process."""
    client, supervisor = worker
    first = await run(client, start_turn("a", PROMPT))
    assert isinstance(first[-1], TurnFinished), first[-1]
    assert client.hello is not None
    assert client.hello.model_type.startswith("qwen3_5_moe")
    assert supervisor.state is WorkerState.READY
    kinds = {(f.position, f.kind.value) for f in first if isinstance(f, Saved)}
    assert {(40, "system"), (86, "shadow"), (150, "prompt_end"), (157, "turn")} <= kinds
    context = [*PROMPT, *answer(first), 5, 6, 7]
    warm = await run(client, start_turn("b", context))
    assert matched(warm).position == 157
    assert matched(warm).kind is BoundaryKind.TURN
    again = await run(client, start_turn("b", context))
    assert matched(again).position == len(context)
    edited = await run(client, start_turn("c", [*PROMPT[:60], 9, *PROMPT[61:]]))
    assert (matched(edited).position, matched(edited).divergence) == (40, 60)
    rows = await client.checkpoints("s")
    assert (150, "prompt_end") in {(row.position, row.kind.value) for row in rows}
    counters = await settled(client)
    assert (counters["turns"], counters["holds"], counters["pins"], counters["cache_errors"]) == (0, 0, 0, 0)
    assert answer(first) == cold(PROMPT, 8)
    assert answer(warm) == answer(again) == cold(context, 8)
    assert answer(edited) == cold([*PROMPT[:60], 9, *PROMPT[61:]], 8)


async def test_sessions_that_run_together_and_are_cancelled_get_the_answers_of_a_cold_run(
    model_dir: Path, cold: Callable[[list[int], int], list[int]]
) -> None:
    """Shared prefixes, edits and cancels at random moments, in a cache so small that it evicts all the time."""
    asked: list[tuple[list[int], int, list[int]]] = []

    async def session(client: WorkerClient, number: int) -> None:
        choice = random.Random(number)
        context = PROMPT[: choice.randrange(60, 150)] + [number + 3] * choice.randrange(1, 40)
        for turn in range(4):
            most = choice.randrange(1, 12)
            start = start_turn(f"s{number}.{turn}", context, max_tokens=most)
            stop_after = choice.choice([None, None, 0, 1, 3])
            got: list[TurnFrame] = []
            async for frame in client.run(start):
                got.append(frame)
                if stop_after is not None and len(got) > stop_after:
                    client.cancel(start.turn_id)
            assert isinstance(got[-1], TurnFinished)
            asked.append(([*context], most, answer(got)))
            if got[-1].reason == "length":
                context = [*context, *answer(got), *[choice.randrange(3, 90) for _ in range(choice.randrange(1, 30))]]
            if choice.random() < 0.4:
                context[choice.randrange(len(context))] = choice.randrange(3, 90)

    async with running(model_dir, ram_cache_bytes=600_000, max_rows=3, snapshot_rows=6) as (client, _):
        await asyncio.gather(*(session(client, number) for number in range(6)))
        load = client.load
        assert load is not None
        assert (load.counters["turns"], load.counters["holds"], load.counters["pins"]) == (0, 0, 0)
        assert load.counters["ram_evictions"] > 0
        assert load.counters["cache_matches"] > load.counters["cache_misses"], "nothing was reused, nothing was tested"
        assert load.cache_bytes["ram"] <= 600_000
        assert load.counters["device_hits"] > 0
    for context, most, got in asked:
        assert cold(context, most)[: len(got)] == got


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_new_worker_restores_from_disk_bit_for_bit(
    model_dir: Path, tmp_path: Path, end: signal.Signals, cold: Callable[[list[int], int], list[int]]
) -> None:
    async with running(model_dir, state_dir=tmp_path) as (client, supervisor):
        first = await run(client, start_turn("a", PROMPT))
        context = [*PROMPT, *answer(first), 5, 6, 7]
        async with asyncio.timeout(60):
            while (await settled(client)).get("write_back_waiting", 1) > 0:
                await asyncio.sleep(0.02)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, end)
        async with asyncio.timeout(60):
            while supervisor.restarts == 0 or not client.ready:
                await asyncio.sleep(0.02)
        warm = await run(client, start_turn("b", context))
        assert (matched(warm).position, matched(warm).tier) == (157, "disk")
        again = await run(client, start_turn("c", PROMPT))
        assert matched(again).position == len(PROMPT)
        assert answer(again) == answer(first)
        positions = {row.position for row in await client.checkpoints("s")}
        assert {150, 157} <= positions
    assert answer(first) == cold(PROMPT, 8)
    assert answer(warm) == cold(context, 8)


@pytest.mark.asyncio(loop_scope="module")
async def test_kill_in_mid_turn_fails_that_turn_and_the_next_one_runs(worker: tuple[WorkerClient, Supervisor]) -> None:
    client, supervisor = worker
    restarts = supervisor.restarts
    frames: list[TurnFrame] = []
    killed: list[int] = []
    async for frame in client.run(start_turn("a", PROMPT, max_tokens=3000, salt=b"killed")):
        frames.append(frame)
        if isinstance(frame, Tokens) and not killed:  # what it has said by then is still read when it has long been reaped
            assert supervisor.pid is not None
            killed.append(supervisor.pid)
            os.kill(supervisor.pid, signal.SIGKILL)
    assert frames[-1] == TurnFailed("a", "server_error", WORKER_STOPPED)
    again = await run(client, start_turn("a", PROMPT, salt=b"killed"))
    assert isinstance(again[-1], TurnFinished)
    assert supervisor.restarts == restarts + 1


@pytest.mark.asyncio(loop_scope="module")
async def test_cancel_and_disconnect_free_everything(worker: tuple[WorkerClient, Supervisor]) -> None:
    client, _ = worker
    async with contextlib.aclosing(client.run(start_turn("gone", PROMPT, max_tokens=3000, salt=b"freed"))) as turn:
        async for frame in turn:
            if isinstance(frame, Tokens):
                break
    cancelled: list[TurnFrame] = []
    async for frame in client.run(start_turn("stop", PROMPT, max_tokens=3000, salt=b"freed")):
        cancelled.append(frame)
        if isinstance(frame, Tokens):
            client.cancel("stop")
    assert isinstance(cancelled[-1], TurnFinished)
    assert cancelled[-1].reason == "cancelled"
    last = await run(client, start_turn("last", PROMPT, salt=b"freed"))
    assert matched(last).tier == "device"
    async with asyncio.timeout(60):
        while (await settled(client))["turns"] > 0:
            await asyncio.sleep(0.05)
    load = client.load
    assert load is not None
    assert (load.running, load.waiting, load.counters["holds"]) == (0, 0, 0)


async def test_the_worker_ends_when_its_server_is_gone(model_dir: Path) -> None:
    async with running(model_dir) as (client, supervisor):
        assert await client.wait_ready(60)
        pid = supervisor.pid
        assert supervisor._pipe is not None
        supervisor._stopping = True
        supervisor._pipe.close()
        async with asyncio.timeout(60):
            while Path(f"/proc/{pid}").exists():
                await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="module")
async def test_terminate_lets_the_running_turn_finish(worker: tuple[WorkerClient, Supervisor]) -> None:
    client, supervisor = worker
    restarts = supervisor.restarts
    frames: list[TurnFrame] = []
    async for frame in client.run(start_turn("a", PROMPT, max_tokens=40, salt=b"ended")):
        if not frames and supervisor.pid is not None:
            os.kill(supervisor.pid, signal.SIGTERM)
        frames.append(frame)
    assert isinstance(frames[-1], TurnFinished)
    assert frames[-1].output_tokens == 40
    async with asyncio.timeout(60):
        while supervisor.restarts == restarts:
            await asyncio.sleep(0.02)


async def test_a_directory_without_a_model_is_reported_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (client, supervisor):
        assert not await client.wait_ready(60)
        assert client.failure is not None
        assert "config.json" in client.failure
        frames = await run(client, start_turn("a", PROMPT))
        assert isinstance(frames[-1], TurnFailed)
        assert "config.json" in frames[-1].message
        assert supervisor.restarts == 0


def test_an_unknown_engine_setting_is_named(model_dir: Path) -> None:
    told: list[object] = []
    pipe = SimpleNamespace(send=told.append, flush=lambda: None)
    with socket.socket() as wake:
        assert serve(pipe, wake, settings_of(model_dir, pages_of_gold=3)) == 1  # type: ignore[arg-type]
    (failed,) = told
    assert isinstance(failed, LoadFailed)
    assert failed.permanent
    assert "engine.pages_of_gold" in failed.message
