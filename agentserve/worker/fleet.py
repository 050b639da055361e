"""The workers of one model as one: each turn goes to the one that will be soonest, for most sessions the one with their state.

Implements interfaces.Worker over several clients. Decides nothing itself; see routing.py, and holdings.py for what is known.
A turn of which no token was generated when its worker ended runs again on another, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import xxhash

from agentserve.deadlines import Rates, blend
from agentserve.worker.client import TurnFrame, WorkerClient, cancelled_before_start
from agentserve.worker.holdings import Holdings, block_digests
from agentserve.worker.messages import (
    CheckpointRow,
    Hello,
    Load,
    Loading,
    Matched,
    Memory,
    Progress,
    StartTurn,
    TierRow,
    Tiers,
    Tokens,
    TurnFailed,
    TurnFinished,
)
from agentserve.worker.routing import Standing, choose, first_home, first_token_us

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Turn:
    """One that has not ended. at: its worker, None while it waits for one. left: prompt tokens that are to be computed."""

    start: StartTurn
    digests: tuple[int, ...]
    left: int
    at: int | None = None
    cancelled: bool = False
    runs: int = 0
    waiter: asyncio.Future[None] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.start.ids) // 4

    def saw(self, frame: TurnFrame) -> None:
        if type(frame) is Progress:
            self.left = max(0, frame.total - frame.processed)
        elif type(frame) is Matched:
            self.left = max(0, self.prompt_tokens - frame.position)
        elif type(frame) is Tokens:
            self.left = 0


class Fleet:
    """clients: one for each worker, whose supervisors keep them. start_wait_s: how long a turn waits for one that is ready."""

    def __init__(self, clients: Sequence[WorkerClient], *, start_wait_s: float = 300.0) -> None:
        self.clients = tuple(clients)
        self._start_wait_s = start_wait_s
        self._turns: dict[str, _Turn] = {}
        self._turn_us = [0] * len(self.clients)
        self._holdings = Holdings(len(self.clients))
        self._known: list[Hello | None] = [None] * len(self.clients)
        self.spilled = 0
        """Turns that went to another worker than their session's, since that would have been later."""
        self.moved = 0
        """Turns that were run again on another worker."""
        for client in self.clients:
            client.on_change = self._changed

    # ── how it is ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        return any(client.ready for client in self.clients)

    @property
    def hello(self) -> Hello | None:
        """Of a worker that is ready, if any is; all serve the same model."""
        found = [client.hello for client in self.clients if client.hello is not None]
        ready = [client.hello for client in self.clients if client.ready and client.hello is not None]
        return min(ready or found, key=lambda hello: hello.max_context, default=None)

    @property
    def load(self) -> Load | None:
        """The last report of the worker with the least that waits."""
        reports = [client.load for client in self.clients if client.load is not None]
        return min(reports, key=lambda load: load.waiting_prefill_tokens, default=None)

    @property
    def failure(self) -> str | None:
        """Why the model cannot be served at all; None while there is hope."""
        failures = [client.failure for client in self.clients]
        return failures[0] if all(failures) else None

    @property
    def loading(self) -> Loading | None:
        return next((client.loading for client in self.clients if client.loading is not None), None)

    @property
    def reason(self) -> str:
        """Why no worker is ready now."""
        return next((client.reason for client in self.clients if client.failure is None), self.clients[0].reason)

    async def wait_ready(self) -> bool:
        """Wait until a worker is ready (True) or none ever will be (False)."""
        waiting = {asyncio.ensure_future(client.wait_ready()) for client in self.clients}
        try:
            while waiting and not self.ready:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return self.ready

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, start: StartTurn, on_tokens: Callable[[Tokens], bool] | None = None) -> AsyncGenerator[TurnFrame, None]:
        """See WorkerClient.run."""
        if start.turn_id in self._turns:
            raise ValueError(f"turn {start.turn_id} is running already")
        digests = block_digests(start.ids, start.salt) if len(self.clients) > 1 else ()
        turn = self._turns[start.turn_id] = _Turn(start, digests, len(start.ids) // 4)
        left: int | None = None
        try:
            while True:
                at = await self._place(turn, left)
                if turn.cancelled:
                    yield cancelled_before_start(start.turn_id)
                    return
                turn.runs += 1
                left = None
                async with aclosing(self.clients[at].run(start, on_tokens)) as frames:
                    async for frame in frames:
                        turn.saw(frame)
                        if type(frame) is TurnFailed and self._runs_again(turn, frame, at):
                            left = at
                            break
                        if type(frame) is TurnFinished and frame.ttft_s is not None:
                            self._turn_us[at] = blend(self._turn_us[at] or 1, max(1, round(frame.decode_s * 1e6)))
                        yield frame
                if left is None:
                    return
                self.moved += 1
                log.info("turn runs again turn=%s worker_lost=%d", start.turn_id, at)
                turn.at, turn.left = None, turn.prompt_tokens
        finally:
            del self._turns[start.turn_id]

    def cancel(self, turn_id: str) -> None:
        """See WorkerClient.cancel."""
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        turn.cancelled = True
        if turn.at is not None:
            self.clients[turn.at].cancel(turn_id)
        _wake(turn)

    async def _place(self, turn: _Turn, left: int | None) -> int:
        """The worker of a turn; waits while none is ready. left: the one that it ran on in vain, which is the last choice."""
        if len(self.clients) > 1:
            until = time.monotonic() + self._start_wait_s
            while not self.ready and self.failure is None and not turn.cancelled and time.monotonic() < until:
                turn.waiter = asyncio.get_running_loop().create_future()
                await asyncio.wait({turn.waiter}, timeout=until - time.monotonic())
        turn.at = at = self._route(turn, left)
        return at

    def _route(self, turn: _Turn, left: int | None) -> int:
        if len(self.clients) == 1:
            return 0
        start, prompt = turn.start, turn.prompt_tokens
        known = self._holdings.home(start.session)
        home = known
        if home is None:
            home = first_home(xxhash.xxh3_64_intdigest(start.session.encode()), len(self.clients))
        held = self._holdings.held(turn.digests, start.session)
        costs = [self._cost_us(i, held[i], prompt) for i in range(len(self.clients))]
        at = choose([None if i == left else cost for i, cost in enumerate(costs)], home)
        if at is None:
            at = choose(costs, home)
        if at is None:
            # Nobody is ready and the time is over, or nobody ever will be: the client says so in its own words.
            return next((i for i, client in enumerate(self.clients) if client.failure is None), home)
        if known is not None and at != known and costs[known] is not None:
            self.spilled += 1
            log.info("session leaves its worker session=%s from=%d to=%d us=%s held=%s", start.session, known, at, costs, held)
        turn.left = prompt - min(prompt, held[at])
        self._holdings.add(at, turn.digests, start.session)
        return at

    def _cost_us(self, worker: int, held: int, prompt: int) -> int | None:
        client = self.clients[worker]
        if not client.ready or client.hello is None:
            return None
        mine = [turn for turn in self._turns.values() if turn.at == worker]
        guess, load = Rates(), client.load
        step_us = guess.decode_step_us
        if load is not None and load.decode_tokens_per_s > 0:
            step_us = max(1, round(1e6 / load.decode_tokens_per_s))
        standing = Standing(
            waiting_tokens=sum(turn.left for turn in mine),
            decoding=sum(turn.left == 0 for turn in mine),
            turns=len(mine),
            rows=client.hello.rows,
            turn_us=self._turn_us[worker],
            held_tokens=held,
            token_bytes=client.hello.kv_token_bytes,
            prefill_tokens_per_s=guess.prefill_tokens_per_s if load is None else max(1, round(load.prefill_tokens_per_s)),
            decode_step_us=step_us,
            restore_bytes_per_s=guess.restore_bytes_per_s if load is None else max(1, round(load.restore_bytes_per_s)),
        )
        return first_token_us(standing, prompt)

    def _runs_again(self, turn: _Turn, frame: TurnFailed, at: int) -> bool:
        """A turn that nothing came of goes to another worker, once: it may be what its worker died of."""
        if not frame.unanswered or turn.runs > 1:
            return False
        if turn.cancelled:
            return True  # and ends as such there
        # A worker that was told to end is followed by another of its kind.
        return self.clients[at].draining or any(client.ready for i, client in enumerate(self.clients) if i != at)

    # ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def checkpoints(self, session: str) -> tuple[CheckpointRow, ...]:
        lists = await asyncio.gather(*(client.checkpoints(session) for client in self.clients))
        return tuple(sorted((row for rows in lists for row in rows), key=lambda row: row.position))

    async def pin(self, session: str, checkpoint: str, pinned: bool) -> tuple[CheckpointRow, ...] | None:
        """See WorkerClient.pin: "" pins the deepest of all, or releases every one."""
        chosen = self.clients
        if pinned and not checkpoint and len(chosen) > 1:
            lists = await asyncio.gather(*(client.checkpoints(session) for client in chosen))
            deepest = [max((row.position for row in rows), default=-1) for rows in lists]
            chosen = (chosen[deepest.index(max(deepest))],)
        answers = await asyncio.gather(*(client.pin(session, checkpoint, pinned) for client in chosen))
        return None if all(answer is None for answer in answers) else await self.checkpoints(session)

    async def tiers(self, *, ram_bytes: int | None = None, disk_bytes: int | None = None) -> Tiers | None:
        """See WorkerClient.tiers. ram_bytes: for all workers, equally; of disk_bytes they know their part themselves."""
        each = None if ram_bytes is None else ram_bytes // len(self.clients)
        answers = await asyncio.gather(*(client.tiers(ram_bytes=each, disk_bytes=disk_bytes) for client in self.clients))
        together = merged(answers)
        if together is not None and not together.refused:
            wanted = {"ram_cache_bytes": each, "disk_cache_bytes": disk_bytes}
            for client in self.clients:  # also those that are only starting
                client.budgets |= {name: value for name, value in wanted.items() if value is not None}
        return together

    async def memory(self, slots: int | None = None) -> tuple[Memory | None, ...]:
        """See WorkerClient.memory: one answer for each worker, in order."""
        answers = await asyncio.gather(*(client.memory(slots) for client in self.clients))
        return tuple(answer for one in answers for answer in one)

    def forget(self, session: str) -> None:
        self._holdings.forget(session)
        for client in self.clients:
            client.forget(session)

    def expect(self, key: str, ids: bytes, salt: bytes, session: str = "") -> None:
        """Told to the session's own worker, or to the one that has most of these tokens."""
        at = self._holdings.home(session)
        if at is None:
            held = self._holdings.held(block_digests(ids, salt), session)
            at = held.index(max(held))
        self.clients[at].expect(key, ids, salt)

    def unexpect(self, key: str) -> None:
        for client in self.clients:
            client.unexpect(key)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _changed(self) -> None:
        """A worker became ready, drains, or ended."""
        for worker, client in enumerate(self.clients):
            before, now = self._known[worker], client.hello
            if before is now:
                continue
            self._known[worker] = now
            if before is not None:
                self._holdings.lost(worker)
            if now is not None and len(self.clients) > 1:
                self._holdings.tell(worker, now.sessions)
        for turn in self._turns.values():
            _wake(turn)


def merged(answers: Sequence[Tiers | None]) -> Tiers | None:
    """The tiers of several workers as one, and why a worker refused. None: no worker answered."""
    rows: dict[str, TierRow] = {}
    given = [answer for answer in answers if answer is not None]
    for row in (row for answer in given for row in answer.rows):
        before = rows.get(row.tier, TierRow(tier=row.tier, used_bytes=0, budget_bytes=0, checkpoints=0))
        rows[row.tier] = TierRow(
            tier=row.tier,
            used_bytes=before.used_bytes + row.used_bytes,
            budget_bytes=before.budget_bytes + row.budget_bytes,
            checkpoints=before.checkpoints + row.checkpoints,
        )
    refused = next((answer.refused for answer in given if answer.refused), "")
    return Tiers(given[0].query_id, tuple(rows.values()), refused) if given else None


def _wake(turn: _Turn) -> None:
    if turn.waiter is not None and not turn.waiter.done():
        turn.waiter.set_result(None)
