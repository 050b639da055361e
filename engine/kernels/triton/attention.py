"""Attention over paged keys and values: decode and prefill are one kernel, and one that joins its parts.

A block handles some queries of one sequence times the heads of a group that shares a key head, over one part of the keys, in
rising tiles: softmax online in f32, base 2; products of bf16 with f32 sums; probabilities rounded to the values' type. Parts
are joined by one tree over them. Pages are found through the table on the device; a key beyond the last position is never read
(pages hold anything there, NaN included).
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import dot, launch, precision, shared_bytes, workspace

_LOG2_E = 1.4426950408889634


@triton.jit
def _tile(
    queries, best, weight, mixed, k_pool, v_pool, table, page, at, high, limit, kv_head, scale, k_page, v_page,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest score, sum of weights and weighted values after one more tile of keys.

    page: that of the first key, which is that of all where tiles divide pages. WHOLE: every row sees all of the tile.
    """
    d, n = tl.arange(0, DP), tl.arange(0, KEYS)
    position = at + n
    if PAGE % KEYS == 0:
        page = page.to(tl.int64) + tl.zeros((KEYS,), tl.int64)
        offset = at % PAGE + n
    elif WHOLE:
        page = tl.load(table + position // PAGE).to(tl.int64)
        offset = position % PAGE
    else:
        page = tl.load(table + position // PAGE, mask=position < high, other=0).to(tl.int64)
        offset = position % PAGE
    inner = (offset * KV_HEADS + kv_head) * D
    keys, values = (
        k_pool + (page * k_page + inner)[None, :] + d[:, None],
        v_pool + (page * v_page + inner)[:, None] + d[None, :],
    )
    if WHOLE and D == DP:
        k = tl.load(keys)
    else:
        k = tl.load(keys, mask=(position < high)[None, :] & (d < D)[:, None], other=0.0)
    score = dot(queries, k, tl.zeros((ROWS, KEYS), tl.float32), PRECISION)
    if not WHOLE:
        score = tl.where((position < high)[None, :] & (position[None, :] <= limit[:, None]), score, float("-inf"))
    now = tl.maximum(best, tl.max(score, 1) * scale)
    # A row that has seen no key yet keeps −inf; subtracting it from itself would be NaN.
    base = now if WHOLE else tl.where(now == float("-inf"), 0.0, now)
    p = tl.exp2(score * scale - base[:, None])
    fade = tl.exp2(best - base)
    if WHOLE and D == DP:
        v = tl.load(values)
    else:
        v = tl.load(values, mask=(position < high)[:, None] & (d < D)[None, :], other=0.0)
    weight = weight * fade + tl.sum(p, 1)
    return now, weight, dot(p.to(v.dtype), v, mixed * fade[:, None], PRECISION)


@triton.jit(do_not_specialize=["blocks", "max_pages"])
def _attend(
    q, k_pool, v_pool, pages, starts, contexts, gate, out, sums, limits, scale, blocks, max_pages,
    q_row, q_head, k_page, v_page, g_row, g_head, o_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, DECODE: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GP
    seq, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    kv_head, split = tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + seq)
    if DECODE:
        start, length = seq, tl.where(context >= 0, 1, 0)
    else:
        # Those that see most keys begin first, so that no long one is left over at the end.
        block = blocks - 1 - block
        start = tl.load(starts + seq)
        length = tl.load(starts + seq + 1) - start
    first = block * TOKENS
    m = tl.arange(0, ROWS)
    token, member = m // GP, m % GP
    live = (first + token < length) & (member < GROUP)
    # Wide numbers for the block's first row only: those of every row would have to be kept in registers through the loops.
    row, head = (start + first).to(tl.int64), kv_head * GROUP
    d = tl.arange(0, DP)
    # Keys that any query of this block sees, divided evenly over the parts in whole tiles.
    total = tl.where(first < length, context + tl.minimum(first + TOKENS, length), 0)
    share = tl.cdiv(tl.cdiv(total, KEYS), SPLITS) * KEYS
    low = split * share
    high = tl.minimum(low + share, total)
    # A dead row of decode is written all the same: zeros, so that nothing behind it meets NaN.
    written = (first + token < (tl.maximum(length, 1) if DECODE else length)) & (member < GROUP)
    inside = written[:, None] & (d < D)[None, :]
    part = (row * (KV_HEADS * GROUP) + head) * SPLITS + split
    parts = (token * (KV_HEADS * GROUP) + member) * SPLITS
    if high <= low:
        if SPLITS == 1 and not DECODE:
            return  # no row is left here
        if SPLITS == 1:
            to = out + row * o_row + head * D + (token * o_row + member * D)[:, None] + d[None, :]
            tl.store(to, tl.zeros((ROWS, DP), out.dtype.element_ty), mask=inside)
        else:
            tl.store(limits + part * 2 + parts * 2, tl.full((ROWS,), float("-inf"), tl.float32), mask=written)
            tl.store(limits + part * 2 + 1 + parts * 2, tl.zeros((ROWS,), tl.float32), mask=written)
        return
    source = q + row * q_row + head * q_head + (token * q_row + member * q_head)[:, None] + d[None, :]
    queries = tl.load(source, mask=live[:, None] & (d < D)[None, :], other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DP), tl.float32)
    table = pages + seq.to(tl.int64) * max_pages
    limit = context + first + token
    plain = low
    if not DECODE:
        # Tiles that even the first query sees whole, so that nothing in them has to be compared.
        plain = tl.maximum(low, low + (tl.minimum(high, context + first + 1) - low) // KEYS * KEYS)
        # A tile's page is looked up while the one before is computed, so that no copy of keys has to wait for it.
        page = tl.load(table + low // PAGE)
        for at in range(low, plain, KEYS):
            later = tl.load(table + tl.minimum(at + KEYS, high - 1) // PAGE)
            best, weight, mixed = _tile(
                queries, best, weight, mixed, k_pool, v_pool, table, page, at, high, limit, kv_head, scale, k_page, v_page,
                KV_HEADS, D, DP, PAGE, ROWS, KEYS, True, PRECISION,
            )  # fmt: skip
            page = later
    for at in range(plain, high, KEYS):
        page = tl.load(table + at // PAGE)
        best, weight, mixed = _tile(
            queries, best, weight, mixed, k_pool, v_pool, table, page, at, high, limit, kv_head, scale, k_page, v_page,
            KV_HEADS, D, DP, PAGE, ROWS, KEYS, False, PRECISION,
        )  # fmt: skip
    if SPLITS == 1:
        y = mixed / tl.where(weight > 0, weight, 1.0)[:, None]
        if GATED:
            source = gate + row * g_row + head * g_head + (token * g_row + member * g_head)[:, None] + d[None, :]
            z = tl.load(source, mask=inside, other=0.0)
            y = y.to(out.dtype.element_ty).to(tl.float32) * tl.sigmoid(z.to(tl.float32))
        to = out + row * o_row + head * D + (token * o_row + member * D)[:, None] + d[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(limits + part * 2 + parts * 2, best, mask=written)
        tl.store(limits + part * 2 + 1 + parts * 2, weight, mask=written)
        tl.store(sums + part * D + (parts * D)[:, None] + d[None, :], mixed, mask=inside)


@triton.jit
def _join(
    sums, limits, gate, out, g_row, g_head, o_row,
    HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    part = (row * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    best, weight = tl.load(limits + part * 2), tl.load(limits + part * 2 + 1)
    top = tl.max(best, 0)
    factor = tl.exp2(best - tl.where(top == float("-inf"), 0.0, top))
    used = (weight > 0)[:, None] & (d < D)[None, :]
    x = tl.load(sums + part[:, None] * D + d[None, :], mask=used, other=0.0)
    total = tl.sum(weight * factor, 0)
    y = tl.sum(x * factor[:, None], 0) / tl.where(total > 0, total, 1.0)
    if GATED:
        z = tl.load(gate + row * g_row + head * g_head + d, mask=d < D, other=0.0).to(tl.float32)
        y = y.to(out.dtype.element_ty).to(tl.float32) * tl.sigmoid(z)
    tl.store(out + row * o_row + head * D + d, y.to(out.dtype.element_ty), mask=d < D)


def decode_scratch(batch: int, heads: int, head_dim: int) -> int:
    """f32 elements that decode_attention wants for a batch of this size."""
    return batch * heads * config.decode_splits(batch) * (head_dim + 2)


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pages: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
    gate: torch.Tensor | None,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """One new token a sequence over everything up to it, times sigmoid(gate) if given.

    q, gate: [B, heads, d]. pools: [pages, page_size, kv_heads, d], the token's own key and value stored already. pages: int32
    [B, P]. contexts: int32 [B], tokens before this one, −1 for padding, whose output is zeros. out: [B, heads · d].
    scratch: f32, decode_scratch(B, heads, d) elements.
    """
    batch, heads, d = q.shape
    if scratch.numel() < decode_scratch(batch, heads, d):
        raise ShapeMismatch(f"{scratch.numel()} floats of scratch, {decode_scratch(batch, heads, d)} are needed")
    _launch(q, k_pool, v_pool, pages, None, contexts, 1, batch, config.decode_splits(batch), scale, gate, out, scratch)


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pages: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    longest: int,
    scale: float,
    gate: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Causal attention of each sequence's new tokens over its history and themselves, times sigmoid(gate) if given.

    q, gate: [T, heads, d]; sequence s has rows starts[s] … starts[s + 1], the first at position contexts[s]. starts: int32
    [S + 1]. contexts: int32 [S]. longest: most rows of one sequence. The rest as in decode_attention. Few queries over a long
    history are divided over the keys too, with scratch of its own.
    """
    seqs, (tokens, heads, d) = len(contexts), q.shape
    tile = config.attention(d, heads // k_pool.shape[2], longest, q.element_size(), shared_bytes())
    blocks = config.blocks(longest * config.power(heads // k_pool.shape[2]), tile.rows)
    splits = config.prefill_splits(blocks * seqs * k_pool.shape[2] * max(1, tile.rows // 64))
    scratch = None
    if splits > 1:
        scratch = workspace("prefill attention", tokens * heads * splits * (d + 2), torch.float32, q)
    _launch(q, k_pool, v_pool, pages, starts, contexts, longest, seqs, splits, scale, gate, out, scratch)


def _launch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pages: torch.Tensor,
    starts: torch.Tensor | None,
    contexts: torch.Tensor,
    longest: int,
    seqs: int,
    splits: int,
    scale: float,
    gate: torch.Tensor | None,
    out: torch.Tensor,
    scratch: torch.Tensor | None,
) -> None:
    tokens, heads, d = q.shape
    page, kv_heads = k_pool.shape[1:3]
    group = heads // kv_heads
    if out.shape != (tokens, heads * d) or heads % kv_heads or k_pool.shape[1:] != v_pool.shape[1:] or k_pool.shape[3] != d:
        raise ShapeMismatch(f"attention of q {list(q.shape)} over pools {list(k_pool.shape)} into {list(out.shape)}")
    if pages.shape[0] != seqs or contexts.shape[0] != seqs or (gate is not None and gate.shape != q.shape):
        raise ShapeMismatch(f"attention of {seqs} sequences with {list(pages.shape)} pages and {list(contexts.shape)} contexts")
    tile = config.attention(d, group, longest, q.element_size(), shared_bytes())
    group_power = config.power(group)
    blocks = config.blocks(longest * group_power, tile.rows)
    given = q if gate is None else gate
    sums = out if scratch is None else scratch
    limits = out if scratch is None else scratch[tokens * heads * splits * d :]
    launch(
        _attend, (seqs * blocks, kv_heads, splits),
        q, k_pool, v_pool, pages, contexts if starts is None else starts, contexts, given, out, sums, limits,
        scale * _LOG2_E, blocks, pages.stride(0),
        *q.stride()[:2], k_pool.stride(0), v_pool.stride(0), *given.stride()[:2], out.stride(0),
        KV_HEADS=kv_heads, GROUP=group, GP=group_power, D=d, DP=config.power(d), PAGE=page, ROWS=tile.rows, KEYS=tile.columns,
        SPLITS=splits, DECODE=starts is None, GATED=gate is not None, PRECISION=precision(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        columns = min(64, config.power(d))
        launch(
            _join, (tokens, heads, config.blocks(d, columns)),
            sums, limits, given, out, *given.stride()[:2], out.stride(0),
            HEADS=heads, D=d, COLUMNS=columns, SPLITS=splits, GATED=gate is not None, num_warps=2,
        )  # fmt: skip
