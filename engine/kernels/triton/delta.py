"""The gated delta rule over sequences' slices: which of the two forms runs."""

from __future__ import annotations

import torch

from engine.errors import ShapeMismatch
from engine.kernels.triton.delta_chunk import delta_chunk
from engine.kernels.triton.delta_step import delta_step


def delta(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    rows: torch.Tensor,
    longest: int,
    k_heads: int,
    out: torch.Tensor,
    rows_out: torch.Tensor | None = None,
) -> None:
    """As reference.delta_gates and reference.gated_delta_chunk on each sequence's slice.

    mixed: [T, 2 · k_heads · d_k + H_v · d_v], q | k | v after the convolution. a, b: [T, H_v]. a_log, dt_bias: f32 [H_v].
    states: f32 [pool rows, H_v, d_k, d_v], read from `rows` (zeros where the context is 0) and written to `rows_out`, by
    default the same. starts, contexts, rows, longest: as in conv.conv. out: [T, H_v, d_v], f32 or mixed's type.
    """
    tokens, v_heads, d_v = out.shape
    d_k = states.shape[2]
    if (
        mixed.shape != (tokens, 2 * k_heads * d_k + v_heads * d_v)
        or v_heads % k_heads
        or states.shape[1:] != (v_heads, d_k, d_v)
    ):
        raise ShapeMismatch(f"delta of {list(mixed.shape)} with states {list(states.shape)} into {list(out.shape)}")
    if out.stride(1) != d_v or not states[0].is_contiguous():
        raise ShapeMismatch("delta writes contiguous rows of heads and states")
    shared = (mixed, a, b, a_log, dt_bias, states, starts, contexts, rows, rows if rows_out is None else rows_out)
    if longest == 1:
        delta_step(*shared, k_heads, out)
    else:
        delta_chunk(*shared, longest, k_heads, out)
