"""Several workers as one: sessions stick, spill, survive the loss of a worker; every turn ends once, whatever happens when."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.worker.client import WORKER_STOPPED, TurnFrame, WorkerClient, cancelled_before_start
from agentserve.worker.fleet import Fleet, merged
from agentserve.worker.messages import (
    PROTOCOL_VERSION,
    CancelTurn,
    Draining,
    Expect,
    Hello,
    Matched,
    Memory,
    Progress,
    ResizeExperts,
    Sampling,
    SetBudgets,
    StartTurn,
    TierRow,
    Tiers,
    Tokens,
    ToWorker,
    TurnFailed,
    TurnFinished,
)
from statecache.types import MarkerTable


class FakePipe:
    """sent: what the server has asked this worker. started: which worker got which turn, for all workers."""

    def __init__(self, worker: int, started: list[tuple[str, int]]) -> None:
        self.sent: list[ToWorker] = []
        self._worker = worker
        self._started = started

    def send(self, frame: ToWorker) -> None:
        self.sent.append(frame)
        if isinstance(frame, StartTurn):
            self._started.append((frame.turn_id, self._worker))


class Workers:
    """A fleet over workers that do what the test says."""

    def __init__(self, count: int = 2, ready: bool = True) -> None:
        self.clients = [WorkerClient(start_wait_s=60) for _ in range(count)]
        self.fleet = Fleet(self.clients, start_wait_s=60)
        self.started: list[tuple[str, int]] = []
        self.pipes = [FakePipe(worker, self.started) for worker in range(count)]
        self.frames: dict[str, list[TurnFrame]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        for worker in range(count if ready else 0):
            self.up(worker)

    def up(self, worker: int, sessions: dict[str, int] | None = None, rows: int = 4) -> None:
        self.pipes[worker] = FakePipe(worker, self.started)
        self.clients[worker].attach(self.pipes[worker])
        hello = Hello(
            version=PROTOCOL_VERSION,
            model="fake",
            model_type="fake",
            vocab_size=100,
            eos_token_ids=(0,),
            max_context=100_000,
            backend="fake",
            namespace="n",
            pid=1,
            rows=rows,
            sessions=sessions or {},
        )
        self.clients[worker].receive(hello)

    def down(self, worker: int, failure: str | None = None) -> None:
        self.clients[worker].detach(failure)

    async def start(self, turn_id: str, session: str = "s", tokens: int = 600, on_tokens: Callable | None = None) -> int | None:
        """Begin a turn; the worker that got it."""
        ids = np.arange(tokens, dtype="<u4").tobytes()
        start = StartTurn(
            turn_id=turn_id,
            ids=ids,
            cuts=(),
            markers=MarkerTable(),
            salt=session.encode(),
            session=session,
            sampling=Sampling(max_tokens=10),
            accepted_at=0.0,
        )
        self.frames[turn_id] = []

        async def read() -> None:
            async for frame in self.fleet.run(start, on_tokens):
                self.frames[turn_id].append(frame)

        self.tasks[turn_id] = asyncio.create_task(read())
        await settle()
        return self.at(turn_id)

    def at(self, turn_id: str) -> int | None:
        """The worker that got it last."""
        return next((worker for name, worker in reversed(self.started) if name == turn_id), None)

    async def finish(self, turn_id: str, reason: str = "stop") -> list[TurnFrame]:
        worker = self.at(turn_id)
        assert worker is not None
        self.clients[worker].receive(finished(turn_id, reason))
        await self.tasks[turn_id]
        return self.frames[turn_id]


def finished(turn_id: str, reason: str = "stop") -> TurnFinished:
    return TurnFinished(
        turn_id=turn_id,
        reason=reason,  # pyright: ignore[reportArgumentType]
        prompt_tokens=1,
        output_tokens=1,
        reused_tokens=0,
        written_tokens=0,
        queue_s=0.0,
        restore_s=0.0,
        prefill_s=0.0,
        ttft_s=0.1,
        decode_s=0.1,
    )


def progress(turn_id: str, processed: int, total: int) -> Progress:
    return Progress(turn_id=turn_id, processed=processed, total=total, cached=0, queued=0, eta_s=0.0)


def matched(turn_id: str, position: int = 0) -> Matched:
    return Matched(
        turn_id=turn_id, position=position, tier=None, kind=None, divergence=None, cause="cold", predicted_ttft_s=0.1
    )


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_session_stays_with_its_worker_while_both_are_idle() -> None:
    workers = Workers(3)
    first = {session: await workers.start(f"{session}.0", session) for session in "abcdefgh"}
    for session in first:
        await workers.finish(f"{session}.0")
    assert len(set(first.values())) > 1, "sessions begin at several workers"
    for n in range(1, 4):
        for session, home in first.items():
            assert await workers.start(f"{session}.{n}", session, 600 + 100 * n) == home
            await workers.finish(f"{session}.{n}")
    assert workers.fleet.spilled == 0


async def test_a_session_leaves_a_busy_worker_and_stays_where_it_went() -> None:
    workers = Workers()
    home = await workers.start("s.0", "s", 300)
    await workers.finish("s.0")
    assert home is not None
    # Somebody else's long prompt is computed there: 80 s at the rate that is assumed at first.
    other = workers.fleet._holdings
    other.add(home, (), "long")
    assert await workers.start("long", "long", 40_000) == home
    assert await workers.start("s.1", "s", 350) == 1 - home
    await workers.finish("s.1")
    await workers.finish("long")
    assert await workers.start("s.2", "s", 400) == 1 - home
    assert workers.fleet.spilled == 1


async def test_a_session_with_a_long_state_waits_rather_than_leave_it() -> None:
    workers = Workers()
    home = await workers.start("s.0", "s", 30_000)
    assert home is not None
    await workers.finish("s.0")
    workers.fleet._holdings.add(home, (), "other")
    assert await workers.start("other", "other", 1000) == home
    assert await workers.start("s.1", "s", 30_100) == home, "two seconds behind another are less than sixty to compute"


async def test_progress_makes_a_worker_free_again() -> None:
    workers = Workers()
    home = await workers.start("s.0", "s", 300)
    await workers.finish("s.0")
    assert home is not None
    workers.fleet._holdings.add(home, (), "long")
    await workers.start("long", "long", 40_000)
    workers.clients[home].receive(matched("long"))
    workers.clients[home].receive(progress("long", 40_000, 40_000))
    await settle()
    assert await workers.start("s.1", "s", 350) == home


async def test_a_turn_of_which_nothing_came_runs_again_elsewhere_when_its_worker_is_lost() -> None:
    workers = Workers()
    home = await workers.start("s.0")
    assert home is not None
    workers.clients[home].receive(matched("s.0"))
    workers.clients[home].receive(progress("s.0", 100, 600))
    workers.down(home)
    await settle()
    assert workers.at("s.0") == 1 - home
    frames = await workers.finish("s.0")
    assert isinstance(frames[-1], TurnFinished)
    assert not [frame for frame in frames if isinstance(frame, TurnFailed)]
    assert workers.fleet.moved == 1
    assert await workers.start("s.1") == 1 - home, "the session goes on there"


async def test_a_turn_that_has_answered_fails_with_its_worker_whoever_takes_its_tokens() -> None:
    taken: list[Tokens] = []
    for on_tokens in (None, lambda frame: taken.append(frame) or True):
        workers = Workers()
        home = await workers.start("s.0", on_tokens=on_tokens)
        assert home is not None
        workers.clients[home].receive(Tokens(turn_id="s.0", ids=(1,)))
        workers.down(home)
        await workers.tasks["s.0"]
        assert workers.frames["s.0"][-1] == TurnFailed("s.0", "server_error", WORKER_STOPPED)
        assert workers.at("s.0") == home
    assert len(taken) == 1


async def test_a_turn_that_two_workers_died_of_is_given_up() -> None:
    workers = Workers(3)
    home = await workers.start("s.0")
    assert home is not None
    workers.down(home)
    await settle()
    second = workers.at("s.0")
    assert second not in (None, home)
    workers.down(second or 0)
    await workers.tasks["s.0"]
    assert workers.frames["s.0"] == [TurnFailed("s.0", "server_error", WORKER_STOPPED, unanswered=True)]


async def test_a_draining_worker_gets_no_turn_and_gives_back_what_it_refuses() -> None:
    workers = Workers()
    home = await workers.start("s.0")
    assert home is not None
    workers.clients[home].receive(Draining())
    assert await workers.start("s.1") == 1 - home
    refused = TurnFailed("s.0", "server_error", "the worker is shutting down; retry", unanswered=True)
    workers.clients[home].receive(refused)
    await settle()
    assert workers.at("s.0") == 1 - home
    assert isinstance((await workers.finish("s.0"))[-1], TurnFinished)


async def test_the_only_worker_may_be_told_to_end_and_the_next_one_takes_the_turn() -> None:
    workers = Workers(1)
    await workers.start("s.0")
    workers.clients[0].receive(Draining())
    workers.clients[0].receive(TurnFailed("s.0", "server_error", "the worker is shutting down; retry", unanswered=True))
    await settle()
    workers.down(0)
    workers.up(0)
    await settle()
    assert workers.started == [("s.0", 0), ("s.0", 0)]
    assert isinstance((await workers.finish("s.0"))[-1], TurnFinished)


async def test_cancel_reaches_the_worker_that_has_the_turn() -> None:
    workers = Workers()
    home = await workers.start("s.0")
    assert home is not None
    workers.fleet.cancel("s.0")
    assert [CancelTurn("s.0") in pipe.sent for pipe in workers.pipes] == [worker == home for worker in range(2)]
    # The worker is lost before it answers: the turn is not run again for nobody.
    workers.down(home)
    await workers.tasks["s.0"]
    assert workers.frames["s.0"] == [cancelled_before_start("s.0")]
    assert workers.at("s.0") == home


async def test_a_turn_waits_for_whichever_worker_is_ready_first_and_can_be_cancelled_before() -> None:
    workers = Workers(ready=False)
    assert await workers.start("a") is None
    assert await workers.start("b") is None
    workers.fleet.cancel("a")
    await workers.tasks["a"]
    assert workers.frames["a"] == [cancelled_before_start("a")]
    workers.up(1)
    await settle()
    assert workers.at("b") == 1
    workers.fleet.cancel("unknown")


async def test_a_model_that_no_worker_can_serve_says_why() -> None:
    workers = Workers(ready=False)
    workers.down(0, "no config.json")
    assert workers.fleet.failure is None
    workers.down(1, "no config.json")
    assert workers.fleet.failure == "no config.json"
    assert not await workers.fleet.wait_ready()
    await workers.start("a")
    await workers.tasks["a"]
    assert workers.frames["a"] == [TurnFailed("a", "server_error", "no config.json")]


async def test_after_a_restart_a_session_goes_where_its_state_was_found() -> None:
    for owner in (0, 1):
        workers = Workers(ready=False)
        for worker in (0, 1):
            workers.up(worker, {f"s{n}": 500 for n in range(8)} if worker == owner else {})
        for n in range(8):
            assert await workers.start(f"t{n}", f"s{n}") == owner
            await workers.finish(f"t{n}")


async def test_budgets_of_all_workers_are_divided_and_their_tiers_told_as_one() -> None:
    workers = Workers(3)
    workers.down(2)
    asked = asyncio.create_task(workers.fleet.tiers(ram_bytes=900, disk_bytes=500))
    await settle()
    for worker in (0, 1):
        (frame,) = [frame for frame in workers.pipes[worker].sent if isinstance(frame, SetBudgets)]
        assert (frame.ram_bytes, frame.disk_bytes) == (300, 500)
        row = TierRow(tier="ram", used_bytes=10 + worker, budget_bytes=300, checkpoints=2)
        workers.clients[worker].receive(Tiers(frame.query_id, (row,)))
    told = await asked
    assert told is not None
    assert told.rows == (TierRow(tier="ram", used_bytes=21, budget_bytes=600, checkpoints=4),)
    # Also the one that is only starting will have it.
    assert [client.budgets for client in workers.clients] == [{"ram_cache_bytes": 300, "disk_cache_bytes": 500}] * 3
    assert merged([None, Tiers(1, (), "there is no disk tier")]) == Tiers(1, (), "there is no disk tier")
    assert merged([None]) is None


async def test_every_worker_is_asked_about_its_device_and_answers_for_itself() -> None:
    workers = Workers(3)
    workers.down(2)
    asked = asyncio.create_task(workers.fleet.memory(40))
    await settle()
    for worker in (0, 1):
        (frame,) = [frame for frame in workers.pipes[worker].sent if isinstance(frame, ResizeExperts)]
        assert frame.slots == 40
        workers.clients[worker].receive(Memory(frame.query_id, None, "slots: got 40, accepted: 2 to 30" if worker else ""))
    first, second, third = await asked
    assert third is None
    assert first is not None
    assert second is not None
    assert (first.refused, second.refused) == ("", "slots: got 40, accepted: 2 to 30")


async def test_what_is_expected_is_told_to_the_sessions_own_worker() -> None:
    workers = Workers()
    home = await workers.start("s.0")
    assert home is not None
    workers.fleet.expect("key", b"", b"", "s")
    assert [any(isinstance(frame, Expect) for frame in pipe.sent) for pipe in workers.pipes] == [home == 0, home == 1]


@settings(deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 4))
def test_every_turn_ends_once_and_runs_on_one_worker_at_a_time_whatever_happens_when(seed: int, count: int) -> None:
    asyncio.run(_random_story(random.Random(seed), count))


async def _random_story(choice: random.Random, count: int) -> None:
    workers = Workers(count)
    up = [True] * count
    number = 0
    for _ in range(60):
        event = choice.choice(["start", "start", "progress", "token", "finish", "cancel", "down", "up", "drain", "leave"])
        running = [turn for turn, task in workers.tasks.items() if not task.done()]
        worker, turn = choice.randrange(count), choice.choice(running) if running else ""
        at = workers.at(turn) if turn else None
        here = at is not None and up[at] and workers.fleet._turns[turn].at == at
        if event == "start":
            number += 1
            await workers.start(f"t{number}", f"s{choice.randrange(3)}", choice.randrange(1, 2000))
        elif event == "down" and up[worker]:
            up[worker] = False
            workers.down(worker)
        elif event == "up" and not up[worker]:
            up[worker] = True
            workers.up(worker)
        elif event == "drain" and up[worker]:
            workers.clients[worker].receive(Draining())
        elif event == "cancel" and turn:
            workers.fleet.cancel(turn)
        elif event == "leave" and turn:
            workers.tasks[turn].cancel()
        elif here and at is not None:
            frames = {"progress": progress(turn, 1, 9), "token": Tokens(turn_id=turn, ids=(1,)), "finish": finished(turn)}
            if event in frames:
                workers.clients[at].receive(frames[event])
        await settle()
    for worker in range(count):
        workers.down(worker)
        workers.up(worker)
    await settle()
    for turn, task in workers.tasks.items():
        if not task.done():
            await workers.finish(turn)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert workers.fleet._turns == {}
    assert all(client.running == 0 for client in workers.clients)
    for turn, task in workers.tasks.items():
        ends = [frame for frame in workers.frames[turn] if isinstance(frame, TurnFinished | TurnFailed)]
        assert len(ends) == (0 if task.cancelled() else 1), (turn, workers.frames[turn])
