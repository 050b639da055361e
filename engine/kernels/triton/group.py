"""Sorts a batch's (token, choice) pairs by expert: counts, then places, stable, without atomics.

Pairs are cut into blocks of equal length; a block's first place for an expert is that expert's offset plus what earlier blocks
have of it. A small batch is one block and one launch.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import launch, workspace

_PAIRS = 32
_MOST_BLOCKS = 64
_ROWS = tl.constexpr(16)


@triton.jit
def _block_count(ids, begin, pairs, EP: tl.constexpr, SPAN: tl.constexpr, PAIRS: tl.constexpr):
    """How often each expert is chosen in the pairs begin … begin + SPAN."""
    e, p = tl.arange(0, EP), tl.arange(0, PAIRS)
    total = tl.zeros((EP,), tl.int32)
    for start in range(begin, begin + SPAN, PAIRS):
        chosen = tl.load(ids + start + p, mask=start + p < pairs, other=-1)
        total += tl.sum(tl.where(chosen[:, None] == e[None, :], 1, 0), 0)
    return total


@triton.jit
def sum_blocks(sums, blocks, experts, EP: tl.constexpr):
    """Counts of each expert over the first `blocks` rows of sums [blocks, experts]."""
    e, row = tl.arange(0, EP), tl.arange(0, _ROWS)[:, None]
    total = tl.zeros((EP,), tl.int32)
    for block in range(0, blocks, _ROWS):
        inside = (block + row < blocks) & (e < experts)[None, :]
        total += tl.sum(tl.load(sums + (block + row) * experts + e[None, :], mask=inside, other=0), 0)
    return total


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, sums, pairs, experts, EP: tl.constexpr, SPAN: tl.constexpr, PAIRS: tl.constexpr):
    e = tl.arange(0, EP)
    total = _block_count(ids, tl.program_id(0) * SPAN, pairs, EP, SPAN, PAIRS)
    tl.store(sums + tl.program_id(0) * experts + e, total, mask=e < experts)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _place(
    ids, sums, order, offsets, pairs, experts, blocks,
    ALONE: tl.constexpr, EP: tl.constexpr, SPAN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    e, p = tl.arange(0, EP), tl.arange(0, PAIRS)
    begin = tl.program_id(0) * SPAN
    if ALONE:
        total = _block_count(ids, begin, pairs, EP, SPAN, PAIRS)
        at = tl.cumsum(total, 0) - total
    else:
        total = sum_blocks(sums, blocks, experts, EP)
        at = tl.cumsum(total, 0) - total + sum_blocks(sums, tl.program_id(0), experts, EP)
    if tl.program_id(0) == 0:
        tl.store(offsets + 1 + e, tl.cumsum(total, 0), mask=e < experts)
        tl.store(offsets, 0)
    for start in range(begin, begin + SPAN, PAIRS):
        chosen = tl.load(ids + start + p, mask=start + p < pairs, other=-1)
        mine = chosen[:, None] == e[None, :]
        same = (chosen[:, None] == chosen[None, :]) & (p[None, :] < p[:, None])
        place = tl.sum(tl.where(mine, at[None, :], 0), 1) + tl.sum(tl.where(same, 1, 0), 1)
        tl.store(order + place, start + p, mask=chosen >= 0)
        at += tl.sum(tl.where(mine, 1, 0), 0)


def count_blocks(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, int, int]:
    """Launch the count of each block of pairs. Returns int32 [blocks, experts] (scratch), blocks, and a block's pairs."""
    pairs = ids.numel()
    span = max(512, config.power(config.blocks(pairs, _MOST_BLOCKS)))
    blocks = config.blocks(pairs, span)
    sums = workspace("expert counts", blocks * experts, torch.int32, ids)
    launch(
        _count, (blocks,), ids, sums, pairs, experts, EP=config.power(experts), SPAN=span, PAIRS=_PAIRS, num_warps=8
    )  # fmt: skip
    return sums, blocks, span


def group(ids: torch.Tensor, experts: int, order: torch.Tensor, offsets: torch.Tensor) -> None:
    """Pairs t · k + j sorted by expert, equal ones in rising order: those of e are order[offsets[e] : offsets[e + 1]].

    ids: int32 [T, k], −1 is left out. order: int32 [T · k], undefined behind the last. offsets: int32 [experts + 1].
    """
    pairs = ids.numel()
    if order.numel() < pairs or offsets.numel() != experts + 1 or not ids.is_contiguous():
        raise ShapeMismatch(
            f"group of {list(ids.shape)} ids over {experts} experts into {list(order.shape)}, {list(offsets.shape)}"
        )
    sums, blocks, span = (ids, 1, config.power(pairs)) if pairs <= 512 else count_blocks(ids, experts)
    launch(
        _place, (blocks,), ids, sums, order, offsets, pairs, experts, blocks,
        ALONE=pairs <= 512, EP=config.power(experts), SPAN=max(_PAIRS, span), PAIRS=_PAIRS, num_warps=8,
    )  # fmt: skip
