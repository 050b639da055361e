"""What tests of the offloaded engine share: tiny checkpoints, both backends over the same weights, whole engines, and the
slots' fingerprints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.experts import ExpertPool
from engine.gpu.model import GpuModel
from engine.models.base import Model, ModelSpec
from tests.engine.checkpoints import Lane, Pools, load, make, pools, save, step

TYPES = ["qwen3_moe", "qwen3_5_moe"]
PAGES = [3, 9, 1, 7, 5, 11, 2, 13]
DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
_directories: dict[tuple[str, torch.dtype], Path] = {}
_references: dict[tuple[str, torch.dtype], Model] = {}


def directory(model_type: str, place: Any, dtype: torch.dtype = torch.float32) -> Path:
    """A saved checkpoint, made once. place: tmp_path_factory."""
    key = (model_type, dtype)
    if key not in _directories:
        _directories[key] = save(make(model_type, dtype=dtype), place.mktemp(model_type))
    return _directories[key]


def reference(model_type: str, place: Any, dtype: torch.dtype = torch.float32) -> Model:
    key = (model_type, dtype)
    if key not in _references:
        _references[key] = load(directory(model_type, place, dtype), backend="reference").model
    return _references[key]


@contextmanager
def offloaded(where: Path, device: str = "host", **options: Any) -> Iterator[GpuModel]:
    """The cuda backend over a checkpoint, on host memory or a real device."""
    defaults = {"max_rows": 4, "max_context": 512, "pass_tokens": 96, "vram_bytes": 1 << 28}
    if device == "host":
        defaults |= {"host_device": True}
    model = load(where, backend="cuda", **(defaults | options)).model
    assert isinstance(model, GpuModel)
    try:
        yield model
    finally:
        model.close()


@contextmanager
def engine_on(directory: Path, device: str = "host", **changes: Any) -> Iterator[Engine]:
    """A whole engine, poisoned."""
    fields: dict[str, Any] = {
        "model_dir": directory,
        "backend": "cuda",
        "threads": 1,
        "page_size": 16,
        "pass_tokens": 64,
        "kv_tokens": 2048,
        "snapshot_rows": 16,
        "max_rows": 6,
        "vram_bytes": 1 << 28,
        "rehearse_tokens": 0,
        "poison_freed": True,
        "host_device": device == "host",
        "host_seed": 5,
    }
    engine = Engine.load(EngineConfig(**(fields | changes)))
    model = engine.model
    assert isinstance(model, GpuModel)
    try:
        yield engine
    finally:
        model.close()


def golden(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    """What transformers generates greedily."""
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def device_pools(model: GpuModel, **sizes: int) -> Pools:
    """NaN everywhere, as checkpoints.pools, on the model's device."""
    made = pools(model.spec, **sizes)
    place = model.device.torch_device
    lists = ([t.to(place) for t in part] for part in (made.k, made.v, made.delta, made.conv))
    return Pools(made.page_size, *lists)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return ((got.cpu() - want).abs().max() / want.abs().max()).item() <= tolerance


def check_slots(experts: ExpertPool | None) -> None:
    """The maps are inverses, and every owned slot holds its owner's bytes, to the last one."""
    assert experts is not None
    slots = experts.state.pull()
    forward = {i: s for i, s in enumerate(slots.slot_for_id) if s >= 0}
    backward = {i: s for s, i in enumerate(slots.id_of_slot) if i >= 0}
    assert forward == backward
    assert slots.residents == [sum(i // experts.experts == layer for i in forward) for layer in range(experts.layers)]
    for flat_id, slot in forward.items():
        assert torch.equal(experts.memory[slot].cpu(), experts.bank.bytes[flat_id]), (flat_id, slot)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


__all__ = ["Lane", "ModelSpec", "Pools", "step"]
