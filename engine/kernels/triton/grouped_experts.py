"""Routed experts of many tokens: matrix products over tokens grouped by expert, weights read in place from slots.

Three kernels: gate · up · silu, then down, whose blocks take some rows of one expert's tokens; then a sum over each token's
choices in the router's order. f32 sums in rising blocks of `depth`; the inner vector and each expert's output are rounded to
the model's type, as the plain path does; the weighted sum is f32. No atomics. Only experts that have a slot in slot_of take
part, so a pass may run in rounds as slots are filled.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import dot, launch, precision, workspace


@triton.jit(do_not_specialize=["most"])
def _tiles(offsets, slot_of, tiles, experts, most, EP: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr):
    """tiles[i] = (slot, first place in the order, rows) of each block of rows; slot −1 behind the last."""
    e, t = tl.arange(0, EP), tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    slot = tl.load(slot_of + e, mask=e < experts, other=-1)
    begin = tl.load(offsets + e, mask=e < experts, other=0)
    rows = tl.where(slot >= 0, tl.load(offsets + e + 1, mask=e < experts, other=0) - begin, 0)
    blocks = (rows + ROWS - 1) // ROWS
    behind = tl.cumsum(blocks, 0)
    before = behind - blocks
    mine = (before[None, :] <= t[:, None]) & (t[:, None] < behind[None, :])
    found = tl.sum(tl.where(mine, 1, 0), 1) > 0
    done = (t - tl.sum(tl.where(mine, before[None, :], 0), 1)) * ROWS
    first = tl.sum(tl.where(mine, begin[None, :], 0), 1) + done
    left = tl.sum(tl.where(mine, rows[None, :], 0), 1) - done
    inside = t < most
    tl.store(tiles + 3 * t, tl.where(found, tl.sum(tl.where(mine, slot[None, :], 0), 1), -1), mask=inside)
    tl.store(tiles + 3 * t + 1, first, mask=inside)
    tl.store(tiles + 3 * t + 2, tl.minimum(left, ROWS), mask=inside)


@triton.jit
def _gate_up(
    x, order, tiles, gate_up, inner, inter, hidden, x_row, slot_stride, row_stride, i_row,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(1)
    slot = tl.load(tile).to(tl.int64)
    if slot < 0:
        return
    first, count = tl.load(tile + 1), tl.load(tile + 2)
    m, at = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = (tl.load(order + first + m, mask=m < count, other=0) // TOP_K).to(tl.int64)
    xs = x + token[:, None] * x_row + at[None, :]
    gate = gate_up + slot * slot_stride + n[None, :] * row_stride + at[:, None]
    up = gate + inter * row_stride
    g, u = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, DEPTH):
        deep = at < hidden - start
        a = tl.load(xs + start, mask=(m < count)[:, None] & deep[None, :], other=0.0)
        inside = (n < inter)[None, :] & deep[:, None]
        g = dot(a, tl.load(gate + start, mask=inside, other=0.0), g, PRECISION)
        u = dot(a, tl.load(up + start, mask=inside, other=0.0), u, PRECISION)
    y = g * tl.sigmoid(g) * u
    to = inner + (first + m).to(tl.int64)[:, None] * i_row + n[None, :]
    tl.store(to, y.to(inner.dtype.element_ty), mask=(m < count)[:, None] & (n < inter)[None, :])


@triton.jit
def _down(
    inner, order, tiles, down, outputs, inter, hidden, slot_stride, row_stride, i_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(1)
    slot = tl.load(tile).to(tl.int64)
    if slot < 0:
        return
    first, count = tl.load(tile + 1), tl.load(tile + 2)
    m, at = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = inner + (first + m).to(tl.int64)[:, None] * i_row + at[None, :]
    ws = down + slot * slot_stride + n[None, :] * row_stride + at[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inter, DEPTH):
        deep = at < inter - start
        a = tl.load(rows + start, mask=(m < count)[:, None] & deep[None, :], other=0.0)
        w = tl.load(ws + start, mask=(n < hidden)[None, :] & deep[:, None], other=0.0)
        total = dot(a, w, total, PRECISION)
    pair = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    to = outputs + pair[:, None] * hidden + n[None, :]
    tl.store(to, total.to(outputs.dtype.element_ty), mask=(m < count)[:, None] & (n < hidden)[None, :])


@triton.jit
def _combine(outputs, ids, slot_of, weights, out, hidden, o_row, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        chosen = tl.load(ids + pair)
        slot = tl.load(slot_of + chosen, mask=chosen >= 0, other=-1)
        limit = tl.where(slot >= 0, hidden, 0)
        y = tl.load(outputs + pair * hidden + n, mask=n < limit, other=0.0).to(tl.float32)
        total += y * tl.load(weights + pair)
    to = out + token * o_row + n
    tl.store(to, tl.load(to, mask=n < hidden, other=0.0) + total, mask=n < hidden)


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    slot_of: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inner: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out += Σ weight · expert(x) over each token's experts that have a slot in slot_of.

    x: [T, H]. ids: int32 [T, k]. order, offsets: of `group.group(ids, …)`. slot_of: int32 [experts], −1 = not in this round.
    weights: f32 [T, k]. gate_up: [slots, 2 · I, H] and down: [slots, H, I], any stride between slots. inner: scratch [T · k, I]
    of x's type. out: f32 [T, H]. Scratch of its own: T · k · H values of x's type.
    """
    (tokens, hidden), (top_k, inter), experts = x.shape, (ids.shape[1], down.shape[2]), len(slot_of)
    pairs = tokens * top_k
    fits = gate_up.shape[1:] == (2 * inter, hidden) and down.shape[1] == hidden and out.shape == x.shape
    if (
        not fits
        or ids.shape != weights.shape
        or ids.shape[0] != tokens
        or inner.shape[0] < pairs
        or len(offsets) != experts + 1
    ):
        raise ShapeMismatch(f"grouped_experts of x {list(x.shape)}, ids {list(ids.shape)}, down {list(down.shape)}")
    if not (ids.is_contiguous() and weights.is_contiguous()) or out.dtype != torch.float32 or x.dtype != down.dtype:
        raise ShapeMismatch("grouped_experts wants contiguous ids and weights, pools of x's type, f32 out")
    first, second = config.grouped(pairs, experts, x.element_size())
    # Each expert's last block may be short, so there may be as many more blocks as there are experts.
    most = pairs // first.rows + min(experts, pairs)
    tiles = workspace("expert tiles", 3 * most, torch.int32, x)
    outputs = workspace("expert outputs", pairs * hidden, x.dtype, x)
    launch(
        _tiles, (config.blocks(most, 32),), offsets, slot_of, tiles, experts, most,
        EP=config.power(experts), ROWS=first.rows, SPAN=32, num_warps=4,
    )  # fmt: skip
    launch(
        _gate_up, (config.blocks(inter, first.columns), most),
        x, order, tiles, gate_up, inner, inter, hidden, x.stride(0), *gate_up.stride()[:2], inner.stride(0),
        TOP_K=top_k, ROWS=first.rows, COLUMNS=first.columns, DEPTH=first.depth, PRECISION=precision(x.dtype),
        num_warps=first.warps, num_stages=first.stages,
    )  # fmt: skip
    launch(
        _down, (config.blocks(hidden, second.columns), most),
        inner, order, tiles, down, outputs, inter, hidden, *down.stride()[:2], inner.stride(0),
        ROWS=second.rows, COLUMNS=second.columns, DEPTH=second.depth, PRECISION=precision(x.dtype),
        num_warps=second.warps, num_stages=second.stages,
    )  # fmt: skip
    columns = min(1024, config.power(hidden))
    launch(
        _combine, (tokens, config.blocks(hidden, columns)), outputs, ids, slot_of, weights, out, hidden, out.stride(0),
        TOP_K=top_k, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
