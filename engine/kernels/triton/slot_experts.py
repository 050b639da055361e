"""Routed experts of a few tokens, read where they lie in slots: gate · up · silu, then down and the weighted sum.

One token: no tensor cores. A block of the first kernel reads some gate and up rows of one expert; a block of the second reads
the same down rows of every expert and sums over experts in the order of the router's choices.
More tokens: a slot's rows are read once, by the block of the first pair that chose it, which computes all tokens with them; the
second kernel sums over slots in the order of those first pairs. Products of bf16, f32 sums; the inner vector is rounded to the
model's type; expert outputs are not rounded before they are weighted. No atomics: the result never depends on timing.

The same kernels compute a part of experts in host memory: the last inner rows of those that the CPU has, read over the link as
often as from slots, which is once, around the L1 cache. Blocks without a row of that part end at once,
so one graph serves every division. Blocks that wait for the link hold their registers meanwhile, so these have few.
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
def _begin(counts, shares, entries, inter, PART: tl.constexpr):
    """The first inner row that is computed: 0, or of a PART the first that the CPU leaves out (inter: none)."""
    first = inter * 0
    if PART:
        # Without the promise, masks that begin anywhere would forbid wide loads.
        taken = tl.multiple_of(tl.load(shares + tl.minimum(tl.load(counts + 3), entries - 1)), 16)
        first = tl.where(tl.load(counts + 1) > 0, inter - taken, inter)
    return first


@triton.jit
def _weights(pointers, inside, PART: tl.constexpr):
    if PART:
        return tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _gate_up_one(
    x, ids, gate_up, inner, counts, shares, entries, inter, slot_stride, row_stride, i_row,
    HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    slot = tl.load(ids + pair).to(tl.int64)
    if slot < 0:
        return
    begin = _begin(counts, shares, entries, inter, PART)
    if (tl.program_id(0) + 1) * COLUMNS <= begin:
        return
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    gate = gate_up + slot * slot_stride + n[:, None] * row_stride
    up = gate + inter * row_stride
    g, u = tl.zeros((COLUMNS, DEPTH), tl.float32), tl.zeros((COLUMNS, DEPTH), tl.float32)
    for block in tl.static_range((HIDDEN + DEPTH - 1) // DEPTH):
        at = block * DEPTH + tl.arange(0, DEPTH)
        inside = ((n >= begin) & (n < inter))[:, None] & (at < HIDDEN)[None, :]
        value = tl.load(x + at, mask=at < HIDDEN, other=0.0).to(tl.float32)[None, :]
        g += _weights(gate + at[None, :], inside, PART).to(tl.float32) * value
        u += _weights(up + at[None, :], inside, PART).to(tl.float32) * value
    total = tl.sum(g, 1)
    y = total * tl.sigmoid(total) * tl.sum(u, 1)
    tl.store(inner + pair * i_row + n, y.to(inner.dtype.element_ty), mask=n < inter)


@triton.jit
def _down_pair(
    total, ids, weights, down, inner, pair, n, begin, hidden, slot_stride, row_stride, i_row,
    INTER: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    slot = tl.load(ids + pair).to(tl.int64)
    limit = tl.where(slot >= 0, INTER, 0)
    weight = tl.load(weights + pair)
    rows = down + slot * slot_stride + n[:, None] * row_stride
    for block in tl.static_range((INTER + DEPTH - 1) // DEPTH):
        at = block * DEPTH + tl.arange(0, DEPTH)
        inside = (at >= begin) & (at < limit)
        w = _weights(rows + at[None, :], (n < hidden)[:, None] & inside[None, :], PART)
        h = tl.load(inner + pair * i_row + at, mask=inside, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * (h * weight)[None, :]
    return total


@triton.jit
def _down_one(
    ids, weights, down, inner, out, counts, shares, entries, hidden, slot_stride, row_stride, i_row,
    INTER: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ADD: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    begin = _begin(counts, shares, entries, INTER, PART)
    if begin >= INTER:
        return
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, DEPTH), tl.float32)
    if PART:
        # One expert after another: unrolled, a block would keep every other kernel off its multiprocessor while it waits.
        for pair in range(TOP_K):
            total = _down_pair(
                total, ids, weights, down, inner, pair, n, begin, hidden, slot_stride, row_stride, i_row, INTER, DEPTH, PART
            )
    else:
        for pair in tl.static_range(TOP_K):
            total = _down_pair(
                total, ids, weights, down, inner, pair, n, begin, hidden, slot_stride, row_stride, i_row, INTER, DEPTH, PART
            )
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
    x, ids, gate_up, inner, leaders, counts, shares, entries, tokens, inter, hidden, x_row, slot_stride, row_stride, i_row,
    TOP_K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr, PART: tl.constexpr,
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
    begin = _begin(counts, shares, entries, inter, PART)
    if (tl.program_id(0) + 1) * COLUMNS <= begin:
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
        inside = ((n >= begin) & (n < inter))[None, :] & deep[:, None]
        g = dot(a, _weights(gate + start, inside, PART), g, PRECISION)
        u = dot(a, _weights(up + start, inside, PART), u, PRECISION)
    pair = _members(ids, slot, token, tokens, TOP_K, KP)
    y = (g * tl.sigmoid(g) * u).to(inner.dtype.element_ty)
    tl.store(inner + pair.to(tl.int64)[:, None] * i_row + n[None, :], y, mask=(pair >= 0)[:, None] & (n < inter)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _down_few(
    ids, weights, leaders, down, inner, out, counts, shares, entries, tokens, hidden, slot_stride, row_stride, i_row, o_row,
    INTER: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    begin = _begin(counts, shares, entries, INTER, PART)
    if begin >= INTER:
        return
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
            deep = (at >= begin - block * DEPTH) & (at < tl.where(slot >= 0, INTER - block * DEPTH, 0))
            a = tl.load(
                inner + pair.to(tl.int64)[:, None] * i_row + block * DEPTH + at[None, :],
                mask=(pair >= 0)[:, None] & deep[None, :], other=0.0,
            )  # fmt: skip
            w = _weights(rows + block * DEPTH + at[:, None], (n < hidden)[None, :] & deep[:, None], PART)
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
    _launch(x, ids, weights, None, gate_up, down, inner, out, accumulate)


def bank_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inner: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out += Σ weight · what the last r inner rows give, over each token's experts that the CPU has.

    counts: int32 [4], of which [1] says how many of ids these are in all, and [3] the layer's misses m. shares: int32 [n]; r is
    shares[m] (its last entry serves every larger m), a multiple of 16. gate_up, down: of one layer, where they lie in pinned
    memory. The rest as in slot_experts; inner must not be shared with a call that may overlap.
    """
    _launch(x, ids, weights, (counts, shares), gate_up, down, inner, out, True)


def _launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    part: tuple[torch.Tensor, torch.Tensor] | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inner: torch.Tensor,
    out: torch.Tensor,
    accumulate: bool,
) -> None:
    (tokens, hidden), top_k, inter = x.shape, ids.shape[1], down.shape[2]
    fits = gate_up.shape[1:] == (2 * inter, hidden) and down.shape[1] == hidden and out.shape == x.shape
    if not fits or ids.shape != weights.shape or ids.shape[0] != tokens or inner.shape[0] < tokens * top_k:
        raise ShapeMismatch(f"experts of x {list(x.shape)}, ids {list(ids.shape)}, down {list(down.shape)}")
    if not (ids.is_contiguous() and weights.is_contiguous()) or out.dtype != torch.float32 or x.dtype != down.dtype:
        raise ShapeMismatch("experts want contiguous ids and weights, pools of x's type, f32 out")
    gate_strides, down_strides = gate_up.stride()[:2], down.stride()[:2]
    counts, shares = (ids, ids) if part is None else part  # nothing is read of them without a part
    division = (counts, shares, 1 if part is None else len(shares))
    if tokens == 1:
        first, second = config.experts_gemv(inter, hidden)
        launch(
            _gate_up_one, (config.blocks(inter, first.columns), top_k),
            x, ids, gate_up, inner, *division, inter, *gate_strides, inner.stride(0),
            HIDDEN=hidden, COLUMNS=first.columns, DEPTH=first.depth, PART=part is not None, num_warps=first.warps,
        )  # fmt: skip
        launch(
            _down_one, (config.blocks(hidden, second.columns),),
            ids, weights, down, inner, out, *division, hidden, *down_strides, inner.stride(0),
            INTER=inter, TOP_K=top_k, COLUMNS=second.columns, DEPTH=second.depth, ADD=accumulate,
            PART=part is not None, num_warps=second.warps,
        )  # fmt: skip
        return
    first, second = config.experts_few(inter, hidden, tokens, x.element_size())
    blocks, rows = config.blocks(tokens, first.rows), first.rows
    leaders = workspace("slot experts" if part is None else "bank experts", tokens * top_k, torch.int32, x)
    common = {"TOP_K": top_k, "KP": config.power(top_k), "ROWS": rows, "PRECISION": precision(x.dtype)}
    common["PART"] = part is not None
    launch(
        _gate_up_few, (config.blocks(inter, first.columns), min(rows, tokens) * top_k, blocks),
        x, ids, gate_up, inner, leaders, *division, tokens, inter, hidden, x.stride(0), *gate_strides, inner.stride(0),
        PAIRS=config.power(rows * top_k), COLUMNS=first.columns, DEPTH=first.depth, num_warps=first.warps,
        num_stages=first.stages, **common,
    )  # fmt: skip
    launch(
        _down_few, (config.blocks(hidden, second.columns), blocks),
        ids, weights, leaders, down, inner, out, *division, tokens, hidden, *down_strides, inner.stride(0), out.stride(0),
        INTER=inter, COLUMNS=second.columns, DEPTH=second.depth, ADD=accumulate, num_warps=second.warps,
        num_stages=second.stages, **common,
    )  # fmt: skip
