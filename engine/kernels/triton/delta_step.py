"""One token of the gated delta rule for each sequence: S ← e^g S; S ← S + k ⊗ beta (v − Sᵀk); out = Sᵀq.

A block owns some columns of one head's state, all of it f32 in registers: read once, written once. Sums over d_k are one tree.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.kernels.triton import config
from engine.kernels.triton.base import launch


@triton.jit
def unit(x, axis: tl.constexpr):
    """x divided by its length over an axis, as f32."""
    return x * tl.rsqrt(tl.expand_dims(tl.sum(x * x, axis), axis) + 1e-6)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Log decay −exp(a_log) · softplus(a + dt_bias), and write strength sigmoid(b). f32."""
    x = a.to(tl.float32) + dt_bias
    # As torch: softplus is the identity beyond 20, where exp would lose what log1p should find.
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(a_log) * soft, tl.sigmoid(b.to(tl.float32))


@triton.jit
def _delta_step(
    mixed, a, b, a_log, dt_bias, states, starts, contexts, rows, rows_out, out,
    m_row, a_row, b_row, s_row, o_row,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KP: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    start, context = tl.load(starts + seq), tl.load(contexts + seq)
    row, row_out = tl.load(rows + seq).to(tl.int64), tl.load(rows_out + seq).to(tl.int64)
    if (row < 0) | (context < 0) | (tl.load(starts + seq + 1) <= start):
        return
    token = start.to(tl.int64)
    k_head = head // (V_HEADS // K_HEADS)
    i = tl.arange(0, KP)[:, None]
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = head * (D_K * D_V) + i * D_V + j
    inside = (i < D_K) & (j < D_V)
    state = tl.load(states + row * s_row + place, mask=inside & (context + tl.zeros_like(i) > 0), other=0.0)
    source = mixed + token * m_row
    q = tl.load(source + k_head * D_K + i, mask=i < D_K, other=0.0).to(tl.float32)
    k = tl.load(source + K_HEADS * D_K + k_head * D_K + i, mask=i < D_K, other=0.0).to(tl.float32)
    v = tl.load(source + 2 * K_HEADS * D_K + head * D_V + j, mask=j < D_V, other=0.0).to(tl.float32)
    g, beta = gates(
        tl.load(a + token * a_row + head), tl.load(b + token * b_row + head), tl.load(a_log + head), tl.load(dt_bias + head)
    )
    q, k = unit(q, 0) * (D_K**-0.5), unit(k, 0)
    state = state * tl.exp(g)
    change = (v - tl.sum(state * k, 0)[None, :]) * beta
    state += k * change
    tl.store(states + row_out * s_row + place, state, mask=inside)
    y = tl.sum(state * q, 0)[None, :]
    tl.store(out + token * o_row + head * D_V + j, y.to(out.dtype.element_ty), mask=j < D_V)


def delta_step(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    rows: torch.Tensor,
    rows_out: torch.Tensor,
    k_heads: int,
    out: torch.Tensor,
) -> None:
    """`delta.delta` where no sequence has more than one token. Shapes were checked there."""
    _, v_heads, d_v = out.shape
    d_k = states.shape[2]
    columns = min(config.DELTA_STEP_COLUMNS, config.power(d_v))
    launch(
        _delta_step, (len(rows), v_heads, config.blocks(d_v, columns)),
        mixed, a, b, a_log, dt_bias, states, starts, contexts, rows, rows_out, out,
        mixed.stride(0), a.stride(0), b.stride(0), states.stride(0), out.stride(0),
        K_HEADS=k_heads, V_HEADS=v_heads, D_K=d_k, D_V=d_v, KP=config.power(d_k), COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
