"""Routed experts computed where their weights lie, on the CPU: the C++ library if it is there, plain torch if not.

Knows banks and activations. Which experts run here is decided elsewhere (dispatch.py).
"""

from __future__ import annotations

import torch

from engine.errors import ShapeMismatch
from engine.kernels import cpu, reference
from engine.moe.banks import ExpertBank


class CpuExecutor:
    """Runs one layer's bank. `native` says whether the C++ library does the work; numbers agree up to float rounding."""

    def __init__(self, bank: ExpertBank) -> None:
        self.bank = bank
        self.native = cpu.available()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Σ weight · expert(x) of each token's experts on this bank; ids of −1 are someone else's.

        x: [tokens, hidden], the bank's dtype. ids: int32 [tokens, top_k], rows of the bank. weights: f32 [tokens, top_k].
        Returns f32 [tokens, hidden]. Raises ShapeMismatch if the shapes do not fit.
        """
        if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
            raise ShapeMismatch(f"x {list(x.shape)}, ids {list(ids.shape)} and weights {list(weights.shape)} do not fit")
        ops = cpu if self.native else reference
        return ops.experts_forward(x, ids, weights, self.bank.gate_up, self.bank.down)
