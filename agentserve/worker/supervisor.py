"""Keeps one worker process alive: spawn, watch, restart with back-off, drain. Runs in the server's event loop.

Holds no turns; see client.py. A worker that says its model cannot be served (`LoadFailed(permanent)`) is not started again:
the server keeps answering and reports why it is not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Protocol

import msgspec

from agentserve.worker import pipe
from agentserve.worker.client import WorkerClient
from agentserve.worker.messages import PROTOCOL_VERSION, Drain, FromWorker, Hello
from agentserve.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class WorkerState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class Process(Protocol):
    """What the supervisor needs of a child process (asyncio.subprocess.Process has it)."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int) -> None: ...
    def kill(self) -> None: ...


STUCK_S = 120.0
Spawn = Callable[[WorkerSettings, socket.socket], Awaitable[Process]]


async def spawn_worker(settings: WorkerSettings, sock: socket.socket) -> Process:
    """Start `python -m agentserve.worker.main` with `sock` inherited; its stderr is the server's.

    In a session of its own: Ctrl-C on the server's terminal is the server's business, also before the worker could ignore it.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agentserve.worker.main",
        "--fd",
        str(sock.fileno()),
        "--settings",
        settings.to_json(),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(sock.fileno(),),
        start_new_session=True,
    )


def backoff_ms(failures: int, first_ms: int, most_ms: int, jitter_permille: int) -> int:
    """Pause before the next start after `failures` ends in a row (≥ 1): doubles up to most_ms, minus up to half as jitter.

    jitter_permille: 0…1000, from a random source. Integers only.
    """
    full = min(most_ms, first_ms << min(failures - 1, 20))
    return full - full * jitter_permille // 2000


class Supervisor:
    """Starts workers for `client` until told to stop.

    first_backoff_s, most_backoff_s: pause after a worker ended by itself. healthy_s: a worker that lived this long resets
    the back-off. stuck_s: silence of a worker that owes an answer, after which it is killed (a step of a large prefill may take
    many seconds). load_stuck_s: likewise while it loads. kill_s: from asking a worker to end to killing it.
    """

    def __init__(
        self,
        client: WorkerClient,
        settings: WorkerSettings,
        *,
        first_backoff_s: float = 0.25,
        most_backoff_s: float = 30.0,
        healthy_s: float = 60.0,
        stuck_s: float = STUCK_S,
        load_stuck_s: float = 900.0,
        watch_s: float = 1.0,
        kill_s: float = 5.0,
        spawn: Spawn = spawn_worker,
    ) -> None:
        self.client = client
        self.restarts = 0
        self.pid: int | None = None
        self._settings = settings
        self._first_backoff_ms = round(first_backoff_s * 1000)
        self._most_backoff_ms = round(most_backoff_s * 1000)
        self._healthy_s = healthy_s
        self._stuck_s = stuck_s
        self._load_stuck_s = load_stuck_s
        self._watch_s = watch_s
        self._kill_s = kill_s
        self._spawn = spawn
        self._become(WorkerState.STOPPED, "no worker was started yet")
        self._stopping = False
        self._pipe: pipe.ServerPipe | None = None
        self._task: asyncio.Task[None] | None = None

    def _become(self, state: WorkerState, reason: str) -> None:
        self._state = state
        self._reason = self.client.reason = reason

    @property
    def state(self) -> WorkerState:
        if self._state is WorkerState.STARTING and self.client.loading is not None:
            return WorkerState.LOADING
        if self._state is WorkerState.STARTING and self.client.draining:
            return WorkerState.DRAINING
        if self._state is WorkerState.STARTING and self.client.ready:
            return WorkerState.READY
        return self._state

    @property
    def reason(self) -> str:
        """Why the state is not READY, in words for /readyz; empty when it is."""
        loading = self.client.loading
        if self.state is WorkerState.LOADING and loading is not None:
            return f"{loading.what} ({loading.fraction:.0%})"
        if self.state is WorkerState.DRAINING:
            return "the worker ends after its running turns; another is started then"
        return "" if self.state is WorkerState.READY else self._reason

    def start(self) -> None:
        """Begin to supervise; returns at once. See `client.wait_ready`."""
        assert self._task is None
        self._stopping = False
        self._task = asyncio.create_task(self._supervise(), name="worker-supervisor")

    async def stop(self, drain_s: float = 30.0) -> None:
        """Let running turns finish for up to `drain_s`, then end the worker. Safe to call twice."""
        self._stopping = True
        if self._task is None:
            return
        if self._pipe is not None:
            with contextlib.suppress(pipe.PipeClosed):
                self._pipe.send(Drain())
            done, _ = await asyncio.wait({self._task}, timeout=drain_s)
        else:
            done = set()
        if not done:
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        self._become(WorkerState.STOPPED, "stopped")

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _supervise(self) -> None:
        failures = 0
        while not self._stopping:
            self._become(WorkerState.STARTING, "the worker is starting")
            started_at = time.monotonic()
            how = await self._run_once()
            if self.client.failure is not None:
                self._become(WorkerState.FAILED, self.client.failure)
                log.error("worker gave up reason=%s", self.client.failure)
                return
            if self._stopping:
                return
            healthy = how == ENDED_WELL or time.monotonic() - started_at > self._healthy_s
            failures = 1 if healthy else failures + 1
            pause_ms = backoff_ms(failures, self._first_backoff_ms, self._most_backoff_ms, random.randrange(1001))
            self.restarts += 1
            self._become(WorkerState.RESTARTING, f"the worker {how}; it starts again in {pause_ms} ms")
            log.warning("worker ended how=%r failures=%d restart_in_ms=%d", how, failures, pause_ms)
            await asyncio.sleep(pause_ms / 1000)

    async def _run_once(self) -> str:
        """Start a worker and stay with it to its end. Returns how it ended, in words."""
        ours, theirs = socket.socketpair()
        closed = asyncio.Event()
        process: Process | None = None
        try:
            with theirs:
                settings = msgspec.structs.replace(self._settings, **self.client.budgets)
                process = await self._spawn(settings, theirs)
            self.pid = process.pid
            self._pipe = await pipe.connect(ours, self._receive, lambda _error: closed.set())
            self.client.attach(self._pipe)
            how = await self._watch(process, closed)
            if self.client.trouble is not None:
                how = f"{how}: {self.client.trouble}"
        except OSError as error:
            how = f"could not be started: {error}"
        finally:
            if self._pipe is not None:
                self._pipe.close()
            else:
                ours.close()
            self._pipe = None
            if process is not None:
                await self._end(process)
            self.pid = None
            self.client.detach(self.client.failure)
        return how

    async def _watch(self, process: Process, closed: asyncio.Event) -> str:
        end = asyncio.create_task(process.wait())
        hangup = asyncio.create_task(closed.wait())
        try:
            while True:
                await asyncio.wait({end, hangup}, timeout=self._watch_s, return_when=asyncio.FIRST_COMPLETED)
                if hangup.done() and not end.done():
                    # The process usually closes its end by dying: give it a moment to be reaped, so that we can say how.
                    await asyncio.wait({end}, timeout=self._kill_s)
                if end.done():
                    await asyncio.wait({hangup}, timeout=self._kill_s)  # frames that it wrote last are still read
                    return _describe(end.result())
                if hangup.done():
                    return "closed its pipe"
                silent_s = time.monotonic() - self.client.heard_at
                limit_s = self._stuck_s if self.client.ready else self._load_stuck_s
                if silent_s > limit_s and (self.client.expecting or not self.client.ready):
                    log.error("worker is stuck pid=%d silent_s=%.0f", process.pid, silent_s)
                    process.kill()
                    return f"was silent for {silent_s:.0f} s and was killed"
        finally:
            end.cancel()
            hangup.cancel()

    async def _end(self, process: Process) -> None:
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._kill_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _receive(self, frame: FromWorker) -> None:
        if type(frame) is Hello and frame.version != PROTOCOL_VERSION:
            self.client.failure = f"worker speaks pipe version {frame.version}, this server {PROTOCOL_VERSION}"
            if self._pipe is not None:
                self._pipe.close()
            return
        self.client.receive(frame)


ENDED_WELL = "ended with status 0"


def _describe(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
