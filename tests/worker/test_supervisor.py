"""Client and supervisor over real child processes: turns end exactly once, dead and stuck workers are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.worker.client import WORKER_STOPPED, TurnFrame, WorkerClient
from agentserve.worker.messages import Sampling, StartTurn, Tokens, TurnFailed, TurnFinished
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.supervisor import Process, Supervisor, WorkerState, backoff_ms, spawn_worker
from statecache.types import MarkerTable

ROOT = Path(__file__).parents[2]
SETTINGS = WorkerSettings(model_dir="/nowhere", model_name="fake", state_dir="/nowhere")


def spawner(*modes: str):
    """Spawn the scripted worker; the n-th start gets the n-th mode, later ones the last."""
    left = list(modes)

    async def spawn(settings: WorkerSettings, sock: socket.socket) -> Process:
        mode = left.pop(0) if len(left) > 1 else left[0]
        fd = sock.fileno()
        command = (sys.executable, "-m", "tests.fakes.scripted_worker", str(fd), mode)
        return await asyncio.create_subprocess_exec(*command, pass_fds=(fd,), cwd=ROOT)

    return spawn


@contextlib.asynccontextmanager
async def running(*modes: str, **settings: float) -> AsyncIterator[tuple[WorkerClient, Supervisor]]:
    client = WorkerClient(start_wait_s=60)
    options = {"first_backoff_s": 0.01, "watch_s": 0.05, "kill_s": 5.0} | settings
    supervisor = Supervisor(client, SETTINGS, spawn=spawner(*modes), **options)  # pyright: ignore[reportArgumentType]
    supervisor.start()
    try:
        yield client, supervisor
    finally:
        await supervisor.stop(drain_s=60)


def start_turn(turn_id: str, session: str, ids: list[int]) -> StartTurn:
    return StartTurn(
        turn_id=turn_id,
        ids=np.array(ids, "<u4").tobytes(),
        cuts=(),
        markers=MarkerTable(),
        salt=b"",
        session=session,
        sampling=Sampling(max_tokens=10),
        accepted_at=time.monotonic(),
    )


async def frames_of(client: WorkerClient, start: StartTurn) -> list[TurnFrame]:
    return [frame async for frame in client.run(start)]


async def test_concurrent_turns_get_their_own_frames_in_order() -> None:
    async with running("ok") as (client, supervisor):
        turns = [start_turn(f"t{n}", "echo", list(range(n, n + 50))) for n in range(5)]
        results = await asyncio.gather(*(frames_of(client, turn) for turn in turns))
        for n, frames in enumerate(results):
            assert [f.ids[0] for f in frames if isinstance(f, Tokens)] == list(range(n, n + 50))
            assert isinstance(frames[-1], TurnFinished)
        assert client.running == 0
        assert supervisor.state is WorkerState.READY
        assert supervisor.reason == ""


async def test_a_dead_worker_fails_its_turn_and_the_next_turn_runs_on_a_new_one() -> None:
    async with running("ok") as (client, supervisor):
        frames = await frames_of(client, start_turn("a", "die", [7, 8]))
        assert frames == [Tokens(turn_id="a", ids=(7,)), TurnFailed("a", "server_error", WORKER_STOPPED)]
        again = await frames_of(client, start_turn("b", "echo", [7, 8]))
        assert isinstance(again[-1], TurnFinished)
        assert supervisor.restarts == 1


async def test_a_worker_whose_device_failed_says_why_to_its_turn_and_in_the_reason() -> None:
    async with running("serve", first_backoff_s=0.5) as (client, supervisor):
        frames = await frames_of(client, start_turn("t", "device", [1, 2]))
        assert frames == [
            TurnFailed("t", "server_error", f"{WORKER_STOPPED} (the CPU executor's thread has ended)", unanswered=True)
        ]
        while supervisor.state is not WorkerState.RESTARTING:
            await asyncio.sleep(0)
        assert "ended with status 1: the CPU executor's thread has ended; it starts again" in supervisor.reason
        again = await frames_of(client, start_turn("u", "s", [5]))
        assert isinstance(again[-1], TurnFinished)
        assert client.trouble is None


async def test_a_stuck_worker_is_killed_but_an_idle_one_is_left_alone() -> None:
    async with running("ok", stuck_s=120.0, watch_s=0.01) as (client, supervisor):
        assert await client.wait_ready(60)
        pid = supervisor.pid
        client.heard_at -= 1000
        await asyncio.sleep(0.2)  # it is looked at now and then; a machine that stops here finds no less
        assert (supervisor.pid, supervisor.restarts) == (pid, 0)
        hangs = asyncio.create_task(frames_of(client, start_turn("a", "hang", [1])))
        while not client.expecting:
            await asyncio.sleep(0)
        assert client.heard_at > time.monotonic() - 500, "its silence counts from when it was asked"
        client.heard_at -= 1000
        assert await hangs == [TurnFailed("a", "server_error", WORKER_STOPPED, unanswered=True)]
        assert isinstance((await frames_of(client, start_turn("b", "echo", [1])))[-1], TurnFinished)


async def test_cancel_ends_a_turn_and_leaving_the_iterator_cancels_too() -> None:
    async with running("ok") as (client, _):
        frames: list[TurnFrame] = []
        async for frame in client.run(start_turn("a", "slow", [1])):
            frames.append(frame)
            client.cancel("a")
        last = frames[-1]
        assert isinstance(last, TurnFinished)
        assert last.reason == "cancelled"
        async with contextlib.aclosing(client.run(start_turn("b", "slow", [1]))) as turn:
            async for _frame in turn:
                break
        assert client.running == 0
        # The same id can run again only because the worker was told to stop the first run.
        assert isinstance((await frames_of(client, start_turn("b", "echo", [1])))[-1], TurnFinished)


async def test_a_model_that_cannot_be_served_is_reported_and_not_retried() -> None:
    async with running("permanent") as (client, supervisor):
        assert not await client.wait_ready(60)
        frames = await frames_of(client, start_turn("a", "echo", [1]))
        assert frames == [TurnFailed("a", "server_error", "the model directory has no config.json")]
        while supervisor.state is not WorkerState.FAILED:
            await asyncio.sleep(0.01)
        assert "config.json" in supervisor.reason
        assert supervisor.restarts == 0


async def test_crashes_at_start_are_retried_while_a_turn_waits() -> None:
    async with running("crash", "crash", "ok") as (client, supervisor):
        frames = await frames_of(client, start_turn("a", "echo", [1]))
        assert isinstance(frames[-1], TurnFinished)
        assert supervisor.restarts == 2


async def test_a_turn_cancelled_while_it_waits_for_a_worker_ends_cancelled() -> None:
    async with running("crash", first_backoff_s=5.0) as (client, _):
        reader = asyncio.create_task(frames_of(client, start_turn("a", "echo", [1])))
        await asyncio.sleep(0.05)
        client.cancel("a")
        (last,) = await reader
        assert isinstance(last, TurnFinished)
        assert last.reason == "cancelled"


async def test_stop_leaves_no_process() -> None:
    async with running("ok") as (client, supervisor):
        assert await client.wait_ready(60)
        pid = supervisor.pid
        await supervisor.stop()
        assert supervisor.state is WorkerState.STOPPED
        assert not Path(f"/proc/{pid}").exists()


@given(failures=st.integers(1, 1000), jitter=st.integers(0, 1000))
def test_backoff_stays_between_half_and_full_and_below_the_most(failures: int, jitter: int) -> None:
    pause = backoff_ms(failures, 250, 30_000, jitter)
    full = min(30_000, 250 * 2 ** min(failures - 1, 20))
    assert full // 2 <= pause <= full


@pytest.mark.parametrize("jitter", [0, 1000])
def test_backoff_grows(jitter: int) -> None:
    pauses = [backoff_ms(n, 250, 30_000, jitter) for n in range(1, 9)]
    assert pauses == sorted(pauses)


async def test_a_terminal_interrupts_the_server_and_not_its_worker() -> None:
    here, there = socket.socketpair()
    with here, there:
        process = await spawn_worker(SETTINGS, there)
        try:
            # Ctrl-C goes to the whole group in front, from the first moment on: the worker could not ignore it yet.
            assert os.getpgid(process.pid) != os.getpgid(0)
        finally:
            process.kill()
            await process.wait()
