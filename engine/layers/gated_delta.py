"""What a gated-delta-net layer holds (linear attention of Qwen3-Next, Qwen3.5 and Qwen3.6; the rule is arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One layer's weights.

    project: q, k, v (conv_dim rows), z (H_v · d_v), b (H_v), a (H_v) of the same input in one matrix.
    conv: [conv_dim, K]. a_log, dt_bias: f32 [H_v]. norm: over d_v, gated by z. ordinal: index into the recurrent pools.
    """

    ordinal: int
    project: Linear
    out: Linear
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: RmsNorm
    k_heads: int
    v_heads: int
    d_k: int
    d_v: int

    @property
    def key_dim(self) -> int:
        return self.k_heads * self.d_k

    @property
    def value_dim(self) -> int:
        return self.v_heads * self.d_v

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim
