"""What a weight format is: how matrices are stored, and what they are in memory. One file per format; see registry.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format of matrices.

    name: the stem that is the same in quant/, kernels/, csrc/ and tests/. stored: safetensors' dtype names that it reads.
    dtype: of activations, and of the tensors in memory. bits: per weight, with everything that belongs to it.
    """

    name: str
    stored: tuple[str, ...]
    dtype: torch.dtype
    bits: float

    def record_bytes(self, hidden: int, inter: int) -> int:
        """Bytes of one expert (gate, up, down)."""
        return int(3 * hidden * inter * self.bits) // 8
