"""What a worker process is told at its start, as one JSON argument. The server writes it, worker/main.py reads it."""

from __future__ import annotations

from typing import Literal

import msgspec


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one worker.

    model_dir: directory of a Hugging Face checkpoint. model_name: what clients call it.
    state_dir: where the worker may keep digests and checkpoints; created if absent.
    threads: CPU threads for the engine, 0 = choose.
    ram_cache_bytes: budget of the RAM tier; 0 turns saving off.
    device_residency: let saved states stay in the engine's pools until a turn needs the room.
    disk_cache_bytes: budget of the disk tier in state_dir, over all models; 0 = none.
    disk_reserve_bytes: free space that is left to others. disk_bytes_per_hour: most that is written, 0 = no limit.
    checkpoints_url: SQL address of the checkpoint index, "" = one file in state_dir.
    worker: number among the workers of this model. gpu: index of the device that it takes, None = `device` decides.
    beside: labels (statecache.directory.label_of) of all workers of this machine, this one among them; none = it is alone. What
    is chosen by itself, and the disk, is divided by their number. gpu_sharers: those that use the same device.
    engine: fields of `engine.config.EngineConfig` by name, e.g. {"chunk_tokens": 256}.
    """

    model_dir: str
    model_name: str
    state_dir: str
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    ram_cache_bytes: int = 1 << 30
    device_residency: bool = True
    disk_cache_bytes: int = 0
    disk_reserve_bytes: int = 2 << 30
    disk_bytes_per_hour: int = 0
    checkpoints_url: str = ""
    log_level: str = "INFO"
    worker: int = 0
    gpu: int | None = None
    beside: tuple[str, ...] = ()
    gpu_sharers: int = 1
    engine: dict[str, int | float | str | bool] = {}

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        """Raises msgspec.ValidationError, which names the field."""
        return msgspec.json.decode(text, type=cls)
