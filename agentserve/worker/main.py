"""The worker process: `python -m agentserve.worker.main --fd N --settings JSON`. Loads a model, then runs turns.

N is an inherited end of a socket pair. Ends by itself when the server is gone. SIGTERM and a Drain frame let running turns
finish first; SIGINT is the server's business.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentserve.garbage import keep_loaded, put_off

if __name__ == "__main__":
    put_off()  # the imports below are most of a start

from agentserve import logs
from agentserve.worker.forecast import Forecast, learned_file, load_learned, save_learned
from agentserve.worker.grammars import Grammars
from agentserve.worker.loading import (
    load_engine,
    load_memory,
    load_states,
    load_tokenizer,
    pinned_limit,
    take_gpu,
    token_table,
)
from agentserve.worker.messages import (
    PROTOCOL_VERSION,
    CancelTurn,
    Drain,
    Draining,
    Expect,
    ForgetSession,
    Hello,
    ListCheckpoints,
    LoadFailed,
    PinCheckpoint,
    ResizeExperts,
    SetBudgets,
    StartTurn,
    Tiers,
    ToWorker,
    TurnFailed,
    Unexpect,
)
from agentserve.worker.pipe import PipeClosed, WorkerPipe
from agentserve.worker.ports import EnginePort
from agentserve.worker.requests import memory_answer
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from engine.errors import DeviceError, EngineError
from statecache.prefetch import Prefetcher
from statecache.reader import Reader
from statecache.tiers.base import ordinary

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger("agentserve.worker")
REPORT_S = 1.0
"""Between load reports while there is work; an idle worker says nothing."""
KEEP_S = 60.0
DRAIN_FLUSH_S = 4.0
"""For writing saved states at the end; the supervisor kills after five seconds."""
ELSEWHERE_POLL_S = 0.25
"""While a grammar compiles or a state is read and the engine has nothing to do: for deadlines. Their end wakes the loop."""
MEMORY_POLL_S = 1.0
"""How often an idle worker looks whether another program wants the device's memory."""
CRASH_FLUSH_S = 2.0
"""The same when the server is gone: only what was to be written anyway, since another server may be starting."""
PASSES_THAT_MAY_FAIL = 3
"""Failed forward passes in a row, after which the engine counts as broken and the process ends to be started anew."""


class Worker:
    """One loop over pipe and engine. `drain` may be called from a signal handler."""

    def __init__(
        self,
        pipe: WorkerPipe,
        engine: EnginePort,
        turns: TurnLoop,
        bridge: StateBridge,
        keep: Callable[[], None] = lambda: None,
        set_budgets: Callable[[int | None, int | None], str] = lambda ram_bytes, disk_bytes: "",
    ) -> None:
        """keep(): called every KEEP_S while there is work, to write down what was learned. set_budgets: see SavedStates."""
        self._set_budgets = set_budgets
        self._pipe = pipe
        self._engine = engine
        self._turns = turns
        self._bridge = bridge
        self._keep = keep
        self._draining = False
        self._told = False
        self._report_now = False
        self._failed_passes = 0
        self._chored = False
        engine.set_beside(self._beside)
        # Other programs come and go while nothing runs here, too.
        self._idle_s = None if engine.memory is None else MEMORY_POLL_S

    def drain(self) -> None:
        """Take no more turns; `run` returns when the running ones have ended."""
        self._draining = True

    def report_soon(self) -> None:
        """Send a load report at the next opportunity; to be followed by waking the pipe. From any thread."""
        self._report_now = True

    def run(self) -> None:
        """Serve until drained. Raises PipeClosed when the server is gone."""
        report_at = 0.0
        keep_at = time.monotonic() + KEEP_S
        while not (self._draining and self._turns.running == 0):
            idle_s = ELSEWHERE_POLL_S if self._turns.elsewhere else self._idle_s
            # In pauses until something arrives, and between steps in which there was no time for it: a piece of what leaves the
            # engine's pools.
            chores, self._chored = self._chored or self._bridge.chore(), False
            for frame in self._pipe.receive(0.0 if chores or self._engine.has_work else idle_s):
                self._take(frame)
            if self._draining:
                self._tell_draining()
            # What was found and when its first token will come is told before the next step, which may take long.
            self._pipe.flush()
            if self._turns.elsewhere:
                self._turns.poll()
            ended = self._step() if self._engine.has_work else False
            if self._idle_s is not None and not self._engine.has_work:
                self._tend()
            now = time.monotonic()
            if ended or self._report_now or now >= report_at:
                self._report_now = False
                self._turns.tick()
                self._pipe.send(self._turns.load())
                report_at = now + REPORT_S
                if now >= keep_at:
                    self._keep()
                    keep_at = now + KEEP_S
            self._pipe.flush()
        self._tell_draining()
        self._pipe.flush()

    def _beside(self) -> None:
        """The device computes, and the step would only wait for it."""
        self._chored = True
        self._bridge.chore()

    def _tell_draining(self) -> None:
        """Once, so that no turn is sent here any more."""
        if not self._told:
            self._told = True
            self._pipe.send(Draining())

    def _step(self) -> bool:
        try:
            ended = self._turns.step()
        except PipeClosed:
            raise
        except DeviceError as error:
            self._device_failed(error)
            raise
        except Exception:
            # The engine ends the requests of a failed pass with an error and can go on; unless it fails again and again.
            self._failed_passes += 1
            log.exception("forward pass failed in_a_row=%d", self._failed_passes)
            if self._failed_passes >= PASSES_THAT_MAY_FAIL:
                raise
            return False
        self._failed_passes = 0
        return ended

    def _device_failed(self, error: DeviceError) -> None:
        """What the device held is lost, and so is every running turn: say why, and be started anew."""
        log.exception("the device failed")
        self._pipe.send(LoadFailed(str(error), permanent=False))
        self._pipe.flush()

    def _tend(self) -> None:
        try:
            self._engine.tend_memory()
        except DeviceError as error:
            self._device_failed(error)
            raise

    def _take(self, frame: ToWorker) -> None:
        match frame:
            case StartTurn() if self._draining:
                self._pipe.send(
                    TurnFailed(frame.turn_id, "server_error", "the worker is shutting down; retry", unanswered=True)
                )
            case StartTurn():
                self._turns.start(frame)
            case CancelTurn():
                self._turns.cancel(frame.turn_id)
            case ListCheckpoints():
                self._turns.list_checkpoints(frame)
            case PinCheckpoint():
                self._turns.pin_checkpoint(frame)
            case ForgetSession():
                self._bridge.forget(frame.session)
            case Expect():
                self._bridge.expect(frame.key, frame.ids, frame.salt)
            case Unexpect():
                self._bridge.unexpect(frame.key)
            case SetBudgets():
                refused = self._set_budgets(frame.ram_bytes, frame.disk_bytes)
                self._bridge.budgets_changed()
                self._pipe.send(Tiers(frame.query_id, self._bridge.tiers(), refused))
            case ResizeExperts():
                self._pipe.send(memory_answer(self._engine, frame))
            case Drain():
                self.drain()


def serve(
    pipe: WorkerPipe,
    wake: socket.socket,
    settings: WorkerSettings,
    load: Callable[[WorkerSettings, WorkerPipe], Engine] | None = None,
) -> int:
    """Load and run. Returns the exit status. load: makes the engine, instead of `load_engine`."""
    from engine.errors import CheckpointError, EngineError, InvalidRequest, Unsupported

    started = time.monotonic()
    try:
        engine = (load or load_engine)(settings, pipe)
        memory = load_memory(settings, engine)
        states = load_states(settings, engine, pipe, ordinary if memory is None else memory.take)
    except (CheckpointError, Unsupported, InvalidRequest) as error:
        return _refuse(pipe, str(error), permanent=True)
    except (EngineError, MemoryError, OSError) as error:
        return _refuse(pipe, f"{type(error).__name__}: {error}", permanent=False)
    info = engine.info
    pipe.send(
        Hello(
            version=PROTOCOL_VERSION,
            model=settings.model_name,
            model_type=info.model_type,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            max_context=info.max_context,
            backend=info.backend,
            namespace=states.cache.namespace.hex(),
            pid=os.getpid(),
            rows=engine.config.max_rows,
            kv_token_bytes=engine.layout.kv_token_bytes,
            sessions=states.cache.sessions(),
        )
    )
    pipe.flush()
    log.info("worker ready model=%s backend=%s load_s=%.1f", settings.model_name, info.backend, time.monotonic() - started)
    learned_at = learned_file(Path(settings.state_dir), states.cache.namespace, settings.threads)
    learned = load_learned(learned_at)
    if learned is not None:
        engine.scheduler.pace.recall(learned.pace)
    prefetcher = Prefetcher(states.cache)
    reader = None
    if (writer := states.writer) is not None:  # there is a disk
        reader = Reader(prefetcher, writing=lambda: writer.writing)
        reader.start()
    bridge = StateBridge(engine, states.cache, states.want, stays=settings.device_residency, prefetch=prefetcher, reader=reader)
    bridge.on_read = lambda: _wake(wake)
    grammars = Grammars(lambda: load_tokenizer(settings), info.vocab_size, lambda: _wake(wake))
    turns = TurnLoop(
        engine,
        bridge,
        pipe.send,
        flush=pipe.flush,
        token_bytes=lambda: token_table(settings, info.vocab_size),
        grammars=grammars,
        forecast=Forecast(engine.config.chunk_tokens, learned, engine.config.decode_gap_ms * 1000),
    )

    def keep() -> None:
        save_learned(learned_at, turns.forecast.learned())

    def set_budgets(ram_bytes: int | None, disk_bytes: int | None) -> str:
        refused = states.set_budgets(ram_bytes, disk_bytes)
        if memory is not None and ram_bytes is not None and not refused:
            memory.set_limit(pinned_limit(ram_bytes))
        return refused

    worker = Worker(pipe, engine, turns, bridge, keep, set_budgets)

    def on_terminate(_signal: int, _frame: object) -> None:
        worker.drain()
        wake.send(b"x")

    def on_idle_disk() -> None:
        worker.report_soon()
        wake.send(b"x")

    states.on_written(on_idle_disk)
    signal.signal(signal.SIGTERM, on_terminate)
    keep_loaded()
    try:
        worker.run()
    except PipeClosed:
        keep()
        grammars.close()
        if reader is not None:
            reader.close()
        bridge.drain(CRASH_FLUSH_S / 2, everything=False)
        states.close(CRASH_FLUSH_S / 2, everything=False)
        _forget_memory(engine)
        raise
    keep()
    grammars.close()
    if reader is not None:
        reader.close()
    bridge.drain(DRAIN_FLUSH_S / 2, everything=True)
    states.close(DRAIN_FLUSH_S / 2)
    _forget_memory(engine)
    return 0


def _forget_memory(engine: Engine) -> None:
    """Before the process ends, so that no thread is inside the driver then."""
    try:
        engine.forget_memory()
    except EngineError as error:
        log.warning("the device did not end what it was told reason=%r", str(error))


def _wake(wake: socket.socket) -> None:
    """End the loop's wait. From any thread, also while the process ends."""
    with contextlib.suppress(OSError):
        wake.send(b"x")


def _refuse(pipe: WorkerPipe, message: str, *, permanent: bool) -> int:
    log.error("model not served permanent=%s reason=%s", permanent, message)
    pipe.send(LoadFailed(message, permanent))
    pipe.flush()
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agentserve.worker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    parser.add_argument("--settings", type=WorkerSettings.from_json, required=True, help="WorkerSettings as JSON")
    options = parser.parse_args(argv)
    settings: WorkerSettings = options.settings
    logs.setup(settings.log_level)
    wrong = take_gpu(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wake = socket.socketpair()
    with woken, wake, socket.socket(fileno=options.fd) as sock:
        pipe = WorkerPipe(sock, woken)
        try:
            if wrong:
                return _refuse(pipe, wrong, permanent=True)
            return serve(pipe, wake, settings)
        except PipeClosed:
            log.info("server is gone, worker ends")
            return 0


if __name__ == "__main__":
    sys.exit(main())
