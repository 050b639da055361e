"""What a weight format is: how matrices are stored, and what they are in memory. One file per format; see registry.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Format(Protocol):
    """A storage format of matrices.

    name: the stem that is the same in quant/, kernels/, csrc/ and tests/. stored: safetensors' dtype names that it reads.
    dtype: of activations. bits: per weight, with everything that belongs to it.
    tolerance: of an expert's output against the same expert in f32, mean absolute error relative to the largest value.
    """

    @property
    def name(self) -> str: ...
    @property
    def stored(self) -> tuple[str, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def bits(self) -> float: ...
    @property
    def tolerance(self) -> float: ...

    def pack(self, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """matrix f32 [..., n, k] as the tensors that kernels read, by role ("weight", "scale" …)."""
        ...

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The f32 matrix that the tensors stand for."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """A format that keeps one number per weight."""

    name: str
    stored: tuple[str, ...]
    dtype: torch.dtype
    tolerance: float

    @property
    def bits(self) -> float:
        return 8.0 * self.dtype.itemsize

    def pack(self, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"weight": matrix.to(self.dtype)}

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float()


def record_bytes(form: Format, hidden: int, inter: int) -> int:
    """Bytes of one expert (gate, up, down)."""
    return int(3 * hidden * inter * form.bits) // 8
