"""Writes safetensors files fast: tensors are made piece by piece, on the device if any, and written by many threads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

PIECE_BYTES = 256 << 20
Pieces = Callable[[], Iterator[torch.Tensor]]
"""Gives a tensor's content in order, in pieces of any size, each contiguous."""
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Pieces

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def whole(make: Callable[[], torch.Tensor], *shape: int, dtype: torch.dtype = torch.bfloat16) -> Planned:
    """A tensor that is made at once."""

    def pieces() -> Iterator[torch.Tensor]:
        tensor = make()
        assert tuple(tensor.shape) == shape, (tuple(tensor.shape), shape)
        yield tensor.to(dtype)

    return Planned(dtype, shape, pieces)


def normal(seed: int, std: float, device: torch.device, *shape: int) -> Planned:
    """bf16, normally distributed."""

    def pieces() -> Iterator[torch.Tensor]:
        generator = torch.Generator(device=device).manual_seed(seed)
        row = 2 * math.prod(shape[1:])
        step = max(1, PIECE_BYTES // row)
        for first in range(0, shape[0], step):
            part = torch.empty(min(step, shape[0] - first), *shape[1:], dtype=torch.bfloat16, device=device)
            yield part.normal_(0.0, std, generator=generator)

    return Planned(torch.bfloat16, shape, pieces)


def header(tensors: Mapping[str, Planned]) -> bytes:
    """The format's head: length, then JSON, padded so that data begins at a multiple of 4096."""
    about, at = {}, 0
    for name, planned in tensors.items():
        about[name] = {
            "dtype": _NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [at, at + planned.nbytes],
        }
        at += planned.nbytes
    text = json.dumps(about).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: Mapping[str, Planned]) -> int:
    """One file, complete or not there. Returns its bytes. Raises ValueError if pieces give another number of bytes."""
    unfinished = path.with_name(path.name + ".part")
    head = header(tensors)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _put(file, memoryview(head), 0)
        at = len(head)
        for name, planned in tensors.items():
            end = at + planned.nbytes
            for piece in planned.pieces():
                data = piece.contiguous().cpu().flatten().view(torch.uint8).numpy().data
                _put(file, data, at)
                at += len(data)
            if at != end:
                raise ValueError(f"{name}: {planned.nbytes - (end - at)} bytes were made of {planned.nbytes}")
    finally:
        os.close(file)
    unfinished.rename(path)
    return at


def _put(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data[: 1 << 30], at)
        data, at = data[done:], at + done
