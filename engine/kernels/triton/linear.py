"""Dense products of few rows, where weights are read once and nothing else matters.

One row: matrix-vector, f32 products, a lane sums every `depth`-th column in rising order, then one tree per weight row. Up to
64 rows: tensor cores, f32 accumulation in rising blocks of `depth`. More: cuBLAS (f32 output from bf16 stays here).
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import dot, launch, precision


@triton.jit
def _gemv(x, weight, bias, out, n, w_row, K: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < n
    start = weight + row.to(tl.int64)[:, None] * w_row
    total = tl.zeros((COLUMNS, DEPTH), tl.float32)
    for block in tl.static_range((K + DEPTH - 1) // DEPTH):
        at = block * DEPTH + tl.arange(0, DEPTH)
        w = tl.load(start + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0)
        total += w.to(tl.float32) * tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m"])
def _matmul(
    x, weight, bias, out, m, n, k, x_row, w_row, o_row,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    xs = x + row.to(tl.int64)[:, None] * x_row + at[None, :]
    ws = weight + column.to(tl.int64)[None, :] * w_row + at[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        deep = at < k - start
        a = tl.load(xs + start, mask=(row < m)[:, None] & deep[None, :], other=0.0)
        b = tl.load(ws + start, mask=(column < n)[None, :] & deep[:, None], other=0.0)
        total = dot(a, b, total, PRECISION)
    if BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * o_row + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out = x · weightᵀ + bias. x: [T, k]. weight: [n, k], x's dtype. bias: [n] or None. out: [T, n], x's dtype or f32."""
    (m, k), n = x.shape, weight.shape[0]
    if weight.shape[1] != k or out.shape != (m, n) or weight.dtype != x.dtype:
        raise ShapeMismatch(
            f"linear of {list(x.shape)} {x.dtype} by {list(weight.shape)} {weight.dtype} into {list(out.shape)}"
        )
    given = weight if bias is None else bias
    if m == config.GEMV_ROWS:
        tile = config.gemv(n, k)
        launch(_gemv, (config.blocks(n, tile.columns),), 
            x, weight, given, out, n, weight.stride(0),
            K=k, BIAS=bias is not None, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps,
        )  # fmt: skip
    elif m <= config.SKINNY_ROWS or out.dtype != x.dtype:
        tile = config.skinny(m, n, k, x.element_size())
        launch(_matmul, (config.blocks(n, tile.columns), config.blocks(m, tile.rows)), 
            x, weight, given, out, m, n, k, x.stride(0), weight.stride(0), out.stride(0),
            BIAS=bias is not None, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            PRECISION=precision(x.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
