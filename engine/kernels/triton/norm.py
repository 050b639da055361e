"""Root-mean-square norms: alone, after a residual sum, and gated.

Squares are summed in f32 by one tree over the row; the product is rounded once, to the output's type.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import launch


@triton.jit
def _add_norm(residual, delta, weight, out, eps, n, r_row, d_row, o_row, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(residual + row * r_row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row * d_row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * r_row + at, x.to(residual.dtype.element_ty), mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps) * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * o_row + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _gated_norm(
    x, gate, weight, out, eps, tokens, heads, n, x_row, x_head, g_row, g_head, o_row, o_head,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // heads, row % heads
    at = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens)[:, None] & (at < n)
    wide = tl.load(x + (token * x_row + head * x_head)[:, None] + at, mask=inside, other=0.0).to(gate.dtype.element_ty)
    wide = wide.to(tl.float32)
    z = tl.load(gate + (token * g_row + head * g_head)[:, None] + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=at < n, other=0.0)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 1) / n + eps)[:, None] * w * (z * tl.sigmoid(z))
    tl.store(out + (token * o_row + head * o_head)[:, None] + at, y.to(out.dtype.element_ty), mask=inside)


def add_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """residual += delta (if given); out = residual · weight / rms(residual).

    residual: f32 or the model's dtype [T, n], updated in place. delta: [T, n]. weight: f32 [n]. out: [T, n], any dtype.
    """
    tokens, n = residual.shape
    if out.shape != residual.shape or weight.shape != (n,) or (delta is not None and delta.shape != residual.shape):
        raise ShapeMismatch(f"add_norm of {list(residual.shape)} into {list(out.shape)} with weight {list(weight.shape)}")
    given = residual if delta is None else delta
    launch(_add_norm, (tokens,), 
        residual, given, weight, out, eps, n, residual.stride(0), given.stride(0), out.stride(0),
        ADD=delta is not None, BLOCK=config.power(n), num_warps=config.row_warps(n),
    )  # fmt: skip


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x · weight / rms(x) · silu(gate) over the last dimension, x first rounded to the gate's dtype.

    x: f32 or the model's dtype [T, H, n]. gate, out: [T, H, n]. weight: f32 [n].
    """
    tokens, heads, n = x.shape
    if gate.shape != x.shape or out.shape != x.shape or weight.shape != (n,):
        raise ShapeMismatch(f"gated_norm of {list(x.shape)} by {list(gate.shape)} into {list(out.shape)}")
    rows = 1 if tokens <= 4 else 8
    launch(_gated_norm, (config.blocks(tokens * heads, rows),), 
        x, gate, weight, out, eps, tokens, heads, n, *x.stride()[:2], *gate.stride()[:2], *out.stride()[:2],
        ROWS=rows, BLOCK=config.power(n), num_warps=1 if rows == 1 else 4,
    )  # fmt: skip
