"""Settings of one engine. `resolve` decides every "auto" and returns a copy; nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.errors import InvalidRequest

Backend = Literal["cpu", "reference"]
SlotPolicy = Literal["lru", "lru_floor", "frequency"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a checkpoint is run.

    backend: "cpu" is fast; "reference" computes in f32 with results that depend on nothing but the token prefix.
    dtype: "auto" keeps the checkpoint's (always f32 on the reference backend), or "bfloat16" / "float32".
    threads: CPU threads of one forward pass; 0 = as many as torch would use.
    slots: expert slots shared by all MoE layers; None keeps every expert in place (nothing is copied).
    slot_policy: who leaves when a slot is needed. slot_floor: slots each layer keeps under "lru_floor".
    fetch_limit: misses of a decode step that are fetched into slots; the rest run from the host bank. −1 = all that fit.
    kernels: False keeps to plain torch even where the C++ library is present.
    """

    backend: Backend = "cpu"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: int = 0
    slots: int | None = None
    slot_policy: SlotPolicy = "lru_floor"
    slot_floor: int = 0
    fetch_limit: int = -1
    kernels: bool = True


def resolve(config: EngineConfig) -> EngineConfig:
    """Decide what was left to us. Raises InvalidRequest naming the field that is out of range."""
    if config.backend not in ("cpu", "reference"):
        raise InvalidRequest("backend", config.backend, "cpu, reference")
    if config.dtype not in ("auto", "bfloat16", "float32"):
        raise InvalidRequest("dtype", config.dtype, "auto, bfloat16, float32")
    if config.slot_policy not in ("lru", "lru_floor", "frequency"):
        raise InvalidRequest("slot_policy", config.slot_policy, "lru, lru_floor, frequency")
    if config.slots is not None and config.slots < 1:
        raise InvalidRequest("slots", config.slots, "at least 1, or None")
    if config.threads < 0:
        raise InvalidRequest("threads", config.threads, "0 (automatic) or more")
    if config.backend == "reference":
        if config.dtype == "bfloat16":
            raise InvalidRequest("dtype", config.dtype, "auto or float32 on the reference backend")
        config = replace(config, dtype="float32", kernels=False)
    return replace(config, threads=config.threads or torch.get_num_threads())
