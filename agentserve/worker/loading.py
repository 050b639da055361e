"""What a worker makes at its start: its device, the engine, the saved states of that engine, the tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from agentserve.paths import sqlite_at
from agentserve.session.database import upgrade
from agentserve.text.tokenizer import Tokenizer
from agentserve.worker.messages import Loading
from agentserve.worker.naming import namespace_of
from agentserve.worker.pipe import WorkerPipe
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.shares import visible_device
from statecache.durable import DiskSettings, SavedStates, open_states
from statecache.tiers.base import Take, ordinary

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.kvcache.arena import PinnedArena

log = logging.getLogger("agentserve.worker")


def take_gpu(settings: WorkerSettings) -> str:
    """Let CUDA see this worker's device only, as its first one. Returns what is wrong with it, "" if nothing is."""
    if settings.gpu is not None and settings.device != "cpu":
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(settings.gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except ValueError as error:
            return str(error)
    return ""


def load_engine(settings: WorkerSettings, pipe: WorkerPipe):
    """The engine for `settings`; progress goes out as Loading frames. Raises EngineError, or PipeClosed if the server left."""
    from engine.config import EngineConfig, Machine
    from engine.engine import Engine
    from engine.errors import InvalidRequest

    known = {field.name for field in fields(EngineConfig)} - {"model_dir", "digests", "rates"}
    for name in settings.engine:
        if name not in known:
            raise InvalidRequest(f"engine.{name}", settings.engine[name], ", ".join(sorted(known)))

    progress = _telling(pipe)
    progress(0.0, "starting")
    backend = "cpu"
    if "backend" not in settings.engine and settings.device != "cpu":
        backend = "cuda" if settings.device == "cuda" or _device_fits() else "cpu"
    chosen: dict[str, object] = {"backend": backend}
    sharers = max(1, len(settings.beside))
    if settings.threads:
        chosen["threads"] = settings.threads
    if sharers > 1:
        # What an engine chooses by itself is all that the machine has.
        machine = Machine.here()
        chosen.setdefault("threads", max(1, machine.cores // sharers))
        chosen["memory_bytes"] = machine.available_bytes // 4 // sharers
    if backend == "cuda" and settings.gpu_sharers > 1:
        chosen["vram_bytes"] = _device_bytes() // settings.gpu_sharers
    state = Path(settings.state_dir) if settings.state_dir else None
    if state is not None and backend == "cuda":
        chosen["rates"] = state / "rates.json"
    digests = None if state is None else state / "weights.json"
    config = EngineConfig(model_dir=Path(settings.model_dir), digests=digests, **{**chosen, **settings.engine})  # pyright: ignore[reportArgumentType]
    return Engine.load(config, progress)


def _telling(pipe: WorkerPipe) -> Callable[[float, str], None]:
    def progress(fraction: float, what: str) -> None:
        pipe.send(Loading(fraction, what))
        pipe.flush()

    return progress


def _device_fits() -> bool:
    """Whether there is a device that the engine can use; says why not, where there is one."""
    import torch

    if not torch.cuda.is_available():
        return False
    from engine.gpu.load import unusable

    reason = unusable()
    if reason is not None:
        log.warning("the CPU is used reason=%r", reason)
    return reason is None


def _device_bytes() -> int:
    """Of the whole device, less what a driver takes: what is free changes while others load."""
    import torch

    return torch.cuda.mem_get_info()[1] * 9 // 10


BESIDE_SHARE = 8
"""One part in so many of the memory tier may be pinned beside it: for what is read from disk and restored at once."""


def load_memory(settings: WorkerSettings, engine: Engine) -> PinnedArena | None:
    """Where the memory tier lies, if it should be pinned for a device. From now on a thread pins it."""
    memory = engine.memory_for_copies(pinned_limit(settings.ram_cache_bytes))
    if memory is not None:
        memory.start()
    return memory


def pinned_limit(ram_cache_bytes: int) -> int:
    """What may be pinned for a memory tier of that size."""
    return ram_cache_bytes + ram_cache_bytes // BESIDE_SHARE


def load_states(settings: WorkerSettings, engine: Engine, pipe: WorkerPipe, take: Take = ordinary) -> SavedStates:
    """The saved states of this engine, found again on disk; progress goes out as Loading frames. take: memory for the tier."""
    from engine.kvcache.spans import joined

    namespace, layout = namespace_of(engine.info, engine.layout)
    disk = DiskSettings(
        Path(settings.state_dir) / "checkpoints",
        settings.disk_cache_bytes,
        settings.disk_reserve_bytes,
        settings.disk_bytes_per_hour,
        index_url=settings.checkpoints_url or sqlite_at(Path(settings.state_dir) / "checkpoints.db"),
        worker=settings.worker,
        beside=settings.beside,
    )
    return open_states(
        namespace,
        layout,
        settings.ram_cache_bytes,
        disk,
        model=settings.model_name,
        prepare=lambda database: upgrade(database, "statecache"),
        progress=_telling(pipe),
        take=take,
        join=joined,
    )


def load_tokenizer(settings: WorkerSettings) -> Tokenizer:
    return Tokenizer.load(Path(settings.model_dir))


def token_table(settings: WorkerSettings, vocab_size: int) -> Sequence[bytes]:
    """Bytes of every token id, for stop strings."""
    tokenizer = load_tokenizer(settings)
    return [tokenizer.token_bytes(token) for token in range(vocab_size)]
