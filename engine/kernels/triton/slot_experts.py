"""Routed experts of a few tokens, read where they lie in slots: gate · up · silu, then down and the weighted sum.

One token: no tensor cores. A block of the first kernel reads some gate and up rows of one expert; a block of the second reads
the same down rows of every expert and sums over experts in the order of the router's choices.
More tokens: a slot's rows are read once, by the block of the first pair that chose it, which computes all tokens with them; the
second kernel sums over slots in the order of those first pairs. Products of bf16, f32 sums; the inner vector is rounded to the
model's type; expert outputs are not rounded before they are weighted. No atomics: the result never depends on timing.
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


@triton.jit
def _gate_up_one(
    x, ids, gate_up, inner, inter, slot_stride, row_stride, i_row,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    slot = tl.load(ids + pair).to(tl.int64)
    if slot < 0:
        return
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    gate = gate_up + slot * slot_stride + n[:, None] * row_stride
    up = gate + inter * row_stride
    g, u = tl.zeros((COLUMNS, DEPTH), tl.float32), tl.zeros((COLUMNS, DEPTH), tl.float32)
    for block in tl.static_range((HIDDEN + DEPTH - 1) // DEPTH):
        at = block * DEPTH + tl.arange(0, DEPTH)
        inside = (n < inter)[:, None] & (at < HIDDEN)[None, :]
        value = tl.load(x + at, mask=at < HIDDEN, other=0.0).to(tl.float32)[None, :]
        g += tl.load(gate + at[None, :], mask=inside, other=0.0).to(tl.float32) * value
        u += tl.load(up + at[None, :], mask=inside, other=0.0).to(tl.float32) * value
    total = tl.sum(g, 1)
    y = total * tl.sigmoid(total) * tl.sum(u, 1)
    tl.store(inner + pair * i_row + n, y.to(inner.dtype.element_ty), mask=n < inter)


@triton.jit
def _down_one(
    ids, weights, down, inner, out, hidden, slot_stride, row_stride, i_row,
    INTER: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, DEPTH), tl.float32)
    for pair in tl.static_range(TOP_K):
        slot = tl.load(ids + pair).to(tl.int64)
        limit = tl.where(slot >= 0, INTER, 0)
        weight = tl.load(weights + pair)
        rows = down + slot * slot_stride + n[:, None] * row_stride
        for block in tl.static_range((INTER + DEPTH - 1) // DEPTH):
            at = block * DEPTH + tl.arange(0, DEPTH)
            w = tl.load(rows + at[None, :], mask=(n < hidden)[:, None] & (at < limit)[None, :], other=0.0)
            h = tl.load(inner + pair * i_row + at, mask=at < limit, other=0.0).to(tl.float32)
            total += w.to(tl.float32) * (h * weight)[None, :]
    y = tl.sum(total, 1)
    if ADD:
        y += tl.load(out + n, mask=n < hidden, other=0.0)
    tl.store(out + n, y, mask=n < hidden)


@triton.jit
def _members(ids, slot, token, tokens, TOP_K: tl.constexpr, KP: tl.constexpr):
    """For each token: the pair that chose the slot, −1 if none did."""
    k = tl.arange(0, KP)[None, :]
    pair = token[:, None] * TOP_K + k
    chosen = tl.load(ids + pair, mask=(token < tokens)[:, None] & (k < TOP_K), other=-1)
    return tl.max(tl.where((chosen == slot) & (chosen >= 0), pair, -1), 1)


@triton.jit(do_not_specialize=["tokens"])
def _gate_up_few(
    x, ids, gate_up, inner, leaders, tokens, inter, hidden, x_row, slot_stride, row_stride, i_row,
    TOP_K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(2) * ROWS * TOP_K
    mine, limit = first + tl.program_id(1), tl.minimum(first + ROWS * TOP_K, tokens * TOP_K)
    slot = tl.load(ids + mine, mask=mine < limit, other=-1)
    # Only the first pair of this block of tokens that chose the slot computes.
    before = first + tl.arange(0, PAIRS)
    same = tl.load(ids + before, mask=before < tl.minimum(mine, limit), other=-1) == slot
    leads = (slot >= 0) & (tl.sum(tl.where(same, 1, 0), 0) == 0)
    if tl.program_id(0) == 0:
        tl.store(leaders + mine, tl.where(leads, slot, -1), mask=mine < limit)
    if not leads:
        return
    token = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    gate = gate_up + slot.to(tl.int64) * slot_stride + n[None, :] * row_stride + at[:, None]
    up = gate + inter * row_stride
    xs = x + token.to(tl.int64)[:, None] * x_row + at[None, :]
    g, u = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, DEPTH):
        deep = at < hidden - start
        a = tl.load(xs + start, mask=(token < tokens)[:, None] & deep[None, :], other=0.0)
        inside = (n < inter)[None, :] & deep[:, None]
        g = dot(a, tl.load(gate + start, mask=inside, other=0.0), g, PRECISION)
        u = dot(a, tl.load(up + start, mask=inside, other=0.0), u, PRECISION)
    pair = _members(ids, slot, token, tokens, TOP_K, KP)
    y = (g * tl.sigmoid(g) * u).to(inner.dtype.element_ty)
    tl.store(inner + pair.to(tl.int64)[:, None] * i_row + n[None, :], y, mask=(pair >= 0)[:, None] & (n < inter)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _down_few(
    ids, weights, leaders, down, inner, out, tokens, hidden, slot_stride, row_stride, i_row, o_row,
    INTER: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * ROWS
    token = first + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for lead in range(first * TOP_K, tl.minimum(first + ROWS, tokens) * TOP_K):
        # A pair that leads nothing reads nothing: masks, no branch, so that the next pairs' rows are under way already.
        slot = tl.load(leaders + lead)
        pair = _members(ids, slot, token, tokens, TOP_K, KP)
        rows = down + tl.maximum(slot, 0).to(tl.int64) * slot_stride + n[None, :] * row_stride
        y = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in tl.static_range((INTER + DEPTH - 1) // DEPTH):
            deep = at < tl.where(slot >= 0, INTER - block * DEPTH, 0)
            a = tl.load(
                inner + pair.to(tl.int64)[:, None] * i_row + block * DEPTH + at[None, :],
                mask=(pair >= 0)[:, None] & deep[None, :], other=0.0,
            )  # fmt: skip
            w = tl.load(rows + block * DEPTH + at[:, None], mask=(n < hidden)[None, :] & deep[:, None], other=0.0)
            y = dot(a, w, y, PRECISION)
        total += y * tl.load(weights + pair, mask=pair >= 0, other=0.0)[:, None]
    to = out + token.to(tl.int64)[:, None] * o_row + n[None, :]
    inside = (token < tokens)[:, None] & (n < hidden)[None, :]
    if ADD:
        total += tl.load(to, mask=inside, other=0.0)
    tl.store(to, total, mask=inside)


def slot_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inner: torch.Tensor,
    out: torch.Tensor,
    accumulate: bool,
) -> None:
    """Σ weight · expert(x) over each token's experts in slots.

    x: [T, H]. ids: int32 [T, k], rows of the pools, −1 = someone else's. weights: f32 [T, k]. gate_up: [slots, 2 · I, H], gate
    above up, and down: [slots, H, I], any stride between slots. inner: scratch [T · k, I] of x's type. out: f32 [T, H],
    added to if `accumulate`. For few tokens; see grouped.py for many.
    """
    (tokens, hidden), top_k, inter = x.shape, ids.shape[1], down.shape[2]
    fits = gate_up.shape[1:] == (2 * inter, hidden) and down.shape[1] == hidden and out.shape == x.shape
    if not fits or ids.shape != weights.shape or ids.shape[0] != tokens or inner.shape[0] < tokens * top_k:
        raise ShapeMismatch(f"slot_experts of x {list(x.shape)}, ids {list(ids.shape)}, down {list(down.shape)}")
    if not (ids.is_contiguous() and weights.is_contiguous()) or out.dtype != torch.float32 or x.dtype != down.dtype:
        raise ShapeMismatch("slot_experts wants contiguous ids and weights, pools of x's type, f32 out")
    gate_strides, down_strides = gate_up.stride()[:2], down.stride()[:2]
    if tokens == 1:
        first, second = config.experts_gemv(inter, hidden)
        launch(
            _gate_up_one, (config.blocks(inter, first.columns), top_k),
            x, ids, gate_up, inner, inter, *gate_strides, inner.stride(0),
            HIDDEN=hidden, COLUMNS=first.columns, DEPTH=first.depth, num_warps=first.warps,
        )  # fmt: skip
        launch(
            _down_one, (config.blocks(hidden, second.columns),),
            ids, weights, down, inner, out, hidden, *down_strides, inner.stride(0),
            INTER=inter, TOP_K=top_k, COLUMNS=second.columns, DEPTH=second.depth, ADD=accumulate, num_warps=second.warps,
        )  # fmt: skip
        return
    first, second = config.experts_few(inter, hidden, tokens, x.element_size())
    blocks, rows = config.blocks(tokens, first.rows), first.rows
    leaders = workspace("slot experts", tokens * top_k, torch.int32, x)
    common = {"TOP_K": top_k, "KP": config.power(top_k), "ROWS": rows, "PRECISION": precision(x.dtype)}
    launch(
        _gate_up_few, (config.blocks(inter, first.columns), min(rows, tokens) * top_k, blocks),
        x, ids, gate_up, inner, leaders, tokens, inter, hidden, x.stride(0), *gate_strides, inner.stride(0),
        PAIRS=config.power(rows * top_k), COLUMNS=first.columns, DEPTH=first.depth, num_warps=first.warps,
        num_stages=first.stages, **common,
    )  # fmt: skip
    launch(
        _down_few, (config.blocks(hidden, second.columns), blocks),
        ids, weights, leaders, down, inner, out, tokens, hidden, *down_strides, inner.stride(0), out.stride(0),
        INTER=inter, COLUMNS=second.columns, DEPTH=second.depth, ADD=accumulate, num_warps=second.warps,
        num_stages=second.stages, **common,
    )  # fmt: skip
