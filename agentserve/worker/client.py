"""The server's view of the worker: start turns, follow them, cancel them. One object for the server's whole life.

Outlives worker processes: the supervisor attaches a pipe to each new worker and detaches it when that worker ends. Never
blocks the event loop and never raises because a worker died; a turn then ends with TurnFailed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from agentserve.worker.messages import (
    CancelTurn,
    CheckpointRow,
    Checkpoints,
    Draining,
    Expect,
    ForgetSession,
    FromWorker,
    Hello,
    ListCheckpoints,
    Load,
    LoadFailed,
    Loading,
    Matched,
    Memory,
    PinCheckpoint,
    Progress,
    ResizeExperts,
    Saved,
    SetBudgets,
    StartTurn,
    Tiers,
    Tokens,
    ToWorker,
    TurnFailed,
    TurnFinished,
    Unexpect,
)
from agentserve.worker.pipe import PipeClosed

TurnFrame = Matched | Progress | Tokens | Saved | TurnFinished | TurnFailed
_TURN_FRAMES = (Tokens, Matched, Progress, Saved, TurnFinished, TurnFailed)
_LAST_FRAMES = (TurnFinished, TurnFailed)
WORKER_STOPPED = "the worker stopped while the turn ran; retry"


class Sender(Protocol):
    """What the client needs of a pipe. Raises PipeClosed."""

    def send(self, frame: ToWorker) -> None: ...


class _Inbox:
    """Frames of one turn that its reader has not taken yet."""

    __slots__ = ("answered", "frames", "on_tokens", "sent", "waiter")

    def __init__(self, on_tokens: Callable[[Tokens], bool] | None) -> None:
        self.frames: deque[TurnFrame] = deque()
        self.on_tokens = on_tokens
        self.waiter: asyncio.Future[None] | None = None
        self.sent = False
        self.answered = False

    def push(self, frame: TurnFrame) -> None:
        # Straight from the pipe to the socket saves a task switch and a loop iteration per token.
        if type(frame) is Tokens:
            self.answered = True
            if self.on_tokens is not None and not self.frames and self.on_tokens(frame):
                return
        self.frames.append(frame)
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class WorkerClient:
    """Turns of one worker.

    hello: of the worker that is ready now, else None. loading: last progress while a worker loads, else None.
    draining: it ends after its turns. load: last load report. failure: why the model cannot be served at all, None while there
    is hope. reason: why it is not ready now, kept by the supervisor.
    budgets: fields of WorkerSettings that were changed at run time; a worker that is started again has them.
    heard_at: `time.monotonic()` of the last frame, or of the first request since then that the worker owes an answer to.
    start_wait_s: how long a turn waits for a worker that is starting, before it fails.
    """

    def __init__(self, *, start_wait_s: float = 300.0, query_wait_s: float = 10.0) -> None:
        self.hello: Hello | None = None
        self.loading: Loading | None = None
        self.load: Load | None = None
        self.draining = False
        self.failure: str | None = None
        self.trouble: str | None = None
        """What a worker said of its end before it ended; another one will come."""
        self.reason = "no worker was started yet"
        self.heard_at = time.monotonic()
        self.on_load: Callable[[Load], None] | None = None
        self.on_loading: Callable[[Loading], None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when a worker became ready, began to drain, or ended."""
        self._start_wait_s = start_wait_s
        self._query_wait_s = query_wait_s
        self._pipe: Sender | None = None
        self._turns: dict[str, _Inbox] = {}
        self.budgets: dict[str, int] = {}
        self._queries: dict[int, asyncio.Future[Checkpoints | Tiers | Memory | None]] = {}
        self._query_ids = itertools.count(1)
        self._changed = asyncio.Event()

    # ── for the server ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        return self.hello is not None and self._pipe is not None and not self.draining

    @property
    def running(self) -> int:
        """Turns that have not ended."""
        return len(self._turns)

    @property
    def expecting(self) -> bool:
        """True while the worker owes an answer, so that silence means it is stuck."""
        return bool(self._queries) or any(inbox.sent for inbox in self._turns.values())

    async def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until a worker is ready (True), or the model is known to be unservable or the time is over (False)."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready and self.failure is None:
                    changed = self._changed
                    await changed.wait()
        except TimeoutError:
            pass
        return self.ready

    async def run(self, start: StartTurn, on_tokens: Callable[[Tokens], bool] | None = None) -> AsyncGenerator[TurnFrame, None]:
        """Run one turn: yields its frames; the last one is a TurnFinished or a TurnFailed, then it ends.

        on_tokens: offered each Tokens frame in the loop callback that received it, unless earlier frames wait; must not block
        or raise. True: taken, and not yielded. Frames keep their order either way.
        Waits first while a worker is starting. Closing the generator early (`contextlib.aclosing`) cancels the turn.
        Raises ValueError if a turn of that id is running.
        """
        if start.turn_id in self._turns:
            raise ValueError(f"turn {start.turn_id} is running already")
        inbox = self._turns[start.turn_id] = _Inbox(on_tokens)
        ended = False
        try:
            await self._send_when_ready(start, inbox)
            loop = asyncio.get_running_loop()
            frames = inbox.frames
            while True:
                while frames:
                    frame = frames.popleft()
                    if isinstance(frame, _LAST_FRAMES):
                        ended = True
                        yield frame
                        return
                    yield frame
                inbox.waiter = loop.create_future()
                await inbox.waiter
        finally:
            self._turns.pop(start.turn_id, None)
            if inbox.sent and not ended:
                self._try_send(CancelTurn(start.turn_id))

    def cancel(self, turn_id: str) -> None:
        """Ask for the end of a turn: its reader gets TurnFinished(reason "cancelled"), or the end that came first."""
        inbox = self._turns.get(turn_id)
        if inbox is None:
            return
        if inbox.sent:
            self._try_send(CancelTurn(turn_id))
        else:
            inbox.push(cancelled_before_start(turn_id))

    async def checkpoints(self, session: str) -> tuple[CheckpointRow, ...]:
        """Checkpoints that a session placed or used; empty when no worker answers within `query_wait_s`."""
        answer = await self._ask(lambda query_id: ListCheckpoints(query_id, session))
        return answer.rows if isinstance(answer, Checkpoints) else ()

    async def pin(self, session: str, checkpoint: str, pinned: bool) -> tuple[CheckpointRow, ...] | None:
        """Pin or release a session's checkpoint ("" = the deepest, or all to release); its list then. None: none such."""
        answer = await self._ask(lambda query_id: PinCheckpoint(query_id, session, checkpoint, pinned))
        return answer.rows if isinstance(answer, Checkpoints) and answer.found else None

    async def tiers(self, *, ram_bytes: int | None = None, disk_bytes: int | None = None) -> Tiers | None:
        """What the tiers hold, after their budgets were changed (None = not). None: no worker answers."""
        answer = await self._ask(lambda query_id: SetBudgets(query_id, ram_bytes, disk_bytes))
        if not isinstance(answer, Tiers):
            return None
        if not answer.refused:
            wanted = {"ram_cache_bytes": ram_bytes, "disk_cache_bytes": disk_bytes}
            self.budgets |= {name: value for name, value in wanted.items() if value is not None}
        return answer

    async def memory(self, slots: int | None = None) -> tuple[Memory | None, ...]:
        """How the device's memory is divided, after the expert slots were changed (None = not). None: no worker answers."""
        answer = await self._ask(lambda query_id: ResizeExperts(query_id, slots))
        return (answer if isinstance(answer, Memory) else None,)

    async def _ask(self, query: Callable[[int], ToWorker]) -> Checkpoints | Tiers | Memory | None:
        """None when no worker answers in time."""
        if not self.ready:
            return None
        self._expect_now()
        query_id = next(self._query_ids)
        answer = self._queries[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._try_send(query(query_id))
            return await asyncio.wait_for(answer, self._query_wait_s)
        except TimeoutError:
            return None
        finally:
            self._queries.pop(query_id, None)

    def forget(self, session: str) -> None:
        """Let a deleted session's checkpoints fall to normal eviction."""
        if self.ready:
            self._try_send(ForgetSession(session))

    def expect(self, key: str, ids: bytes, salt: bytes) -> None:
        """A turn whose context begins with `ids` (u32le) will probably come; does nothing while no worker is ready."""
        if self.ready:
            self._try_send(Expect(key, ids, salt))

    def unexpect(self, key: str) -> None:
        if self.ready:
            self._try_send(Unexpect(key))

    # ── for the supervisor ───────────────────────────────────────────────────────────────────────────────────────

    def attach(self, pipe: Sender) -> None:
        """A new worker process listens on `pipe`; it is not ready before its Hello."""
        self._pipe = pipe
        self.hello = self.load = self.loading = None
        self.draining = False
        self.heard_at = time.monotonic()

    def detach(self, failure: str | None = None) -> None:
        """The worker ended. failure: why no other will come, None if one will."""
        self._pipe = None
        self.hello = self.loading = None
        self.failure = failure
        message = WORKER_STOPPED if self.trouble is None else f"{WORKER_STOPPED} ({self.trouble})"
        for turn_id, inbox in self._turns.items():
            if inbox.sent:
                inbox.push(TurnFailed(turn_id, "server_error", message, unanswered=not inbox.answered))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_result(None)
        self._wake()

    def receive(self, frame: FromWorker) -> None:
        """Take one frame from the worker."""
        self.heard_at = time.monotonic()
        if isinstance(frame, _TURN_FRAMES):
            inbox = self._turns.get(frame.turn_id)
            # A turn whose reader has left goes on until its cancel arrives; its frames go nowhere.
            if inbox is not None:
                inbox.push(frame)
        elif isinstance(frame, Load):
            self.load = frame
            if self.on_load is not None:
                self.on_load(frame)
        elif isinstance(frame, Loading):
            self.loading = frame
            if self.on_loading is not None:
                self.on_loading(frame)
        elif isinstance(frame, Hello):
            self.hello, self.loading, self.failure, self.trouble = frame, None, None, None
            self._wake()
        elif isinstance(frame, Checkpoints | Tiers | Memory):
            answer = self._queries.get(frame.query_id)
            if answer is not None and not answer.done():
                answer.set_result(frame)
        elif isinstance(frame, Draining):
            self.draining = True
            self._wake()
        elif isinstance(frame, LoadFailed) and frame.permanent:
            self.failure = frame.message
            self._wake()
        elif isinstance(frame, LoadFailed):
            self.trouble = frame.message

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _send_when_ready(self, start: StartTurn, inbox: _Inbox) -> None:
        if not self.ready:
            until = time.monotonic() + self._start_wait_s
            while not self.ready and self.failure is None and not inbox.frames:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                inbox.waiter = asyncio.get_running_loop().create_future()
                await asyncio.wait({inbox.waiter}, timeout=left_s)
        if inbox.frames:
            return
        if not self.ready:
            why = self.failure or f"no worker became ready within {self._start_wait_s:.0f} s; retry"
            inbox.push(TurnFailed(start.turn_id, "server_error", why))
            return
        self._expect_now()
        inbox.sent = True
        if not self._try_send(start):
            inbox.sent = False
            inbox.push(TurnFailed(start.turn_id, "server_error", WORKER_STOPPED, unanswered=True))

    def _expect_now(self) -> None:
        """An idle worker says nothing; its silence counts from the first thing it is asked."""
        if not self.expecting:
            self.heard_at = time.monotonic()

    def _try_send(self, frame: ToWorker) -> bool:
        """False if the worker is gone; `detach` tells the turns."""
        if self._pipe is None:
            return False
        try:
            self._pipe.send(frame)
        except PipeClosed:
            return False
        return True

    def _wake(self) -> None:
        """Let everybody who waits for a worker look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self.on_change()
        for inbox in self._turns.values():
            if inbox.waiter is not None and not inbox.waiter.done():
                inbox.waiter.set_result(None)


def cancelled_before_start(turn_id: str) -> TurnFinished:
    return TurnFinished(
        turn_id=turn_id,
        reason="cancelled",
        prompt_tokens=0,
        output_tokens=0,
        reused_tokens=0,
        written_tokens=0,
        queue_s=0.0,
        restore_s=0.0,
        prefill_s=0.0,
        ttft_s=None,
        decode_s=0.0,
    )
