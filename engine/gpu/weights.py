"""Moves what every token reads to the device. Routed experts stay where they are: see experts.py."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from engine.layers.rope import RopeTable
from engine.models.decoder import Decoder
from engine.moe.banks import ExpertBank

T = TypeVar("T")


def to_device(decoder: Decoder, device: torch.device) -> Decoder:
    """The same decoder with every tensor but the banks' and the rope table's on `device`; shared ones stay shared."""
    return _moved(decoder, device, {})


def _moved(value: Any, device: torch.device, done: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        key = value.data_ptr()
        if key not in done or done[key].shape != value.shape:
            done[key] = value.to(device)
        return done[key]
    if isinstance(value, ExpertBank | RopeTable):
        return value
    if isinstance(value, tuple):
        return tuple(_moved(item, device, done) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _moved(getattr(value, f.name), device, done) for f in fields(value) if f.name != "spec"}
        return replace(value, **changes)
    return value


def device_bytes(decoder: Decoder) -> int:
    """What to_device will take, each shared tensor counted once."""
    sizes: dict[int, int] = {}
    _measure(decoder, sizes)
    return sum(sizes.values())


def _measure(value: Any, sizes: dict[int, int]) -> None:
    if isinstance(value, torch.Tensor):
        sizes[value.data_ptr()] = value.numel() * value.element_size()
    elif isinstance(value, tuple):
        for item in value:
            _measure(item, sizes)
    elif is_dataclass(value) and not isinstance(value, type | ExpertBank):
        for f in fields(value):
            if f.name != "spec":
                _measure(getattr(value, f.name), sizes)
