"""Where each row of logits is largest, and whether all of it is finite: what most steps want of them, in four bytes a row."""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import launch, workspace


@triton.jit
def _best_of_blocks(logits, tops, firsts, n, blocks, l_row, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(logits + row * l_row + at, mask=inside, other=0.0)
    finite = tl.abs(x) < float("inf")  # not so for NaN
    x = tl.where(inside & finite, x, float("-inf"))
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, at, n), 0)
    broken = tl.max(tl.where(finite, 0, 1), 0)
    tl.store(tops + row * blocks + block, top)
    tl.store(firsts + row * blocks + block, tl.where(broken > 0, -1, first))


@triton.jit
def _best_of_rows(tops, firsts, turn, best, found, n, blocks, f_row, BLOCKS: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    top = tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf"))
    first = tl.load(firsts + row * blocks + block, mask=block < blocks, other=n)
    lowest = tl.min(tl.where(top == tl.max(top, 0), first, n), 0)
    chosen = tl.where(tl.min(first, 0) < 0, -1, lowest)
    tl.store(best + row, chosen)
    tl.store(found + (tl.load(turn) & 1) * f_row + row, chosen)


def greedy(logits: torch.Tensor, turn: torch.Tensor, best: torch.Tensor, found: torch.Tensor) -> None:
    """best[r] = found[turn & 1, r] = the index of the largest of logits[r], the lowest of several; -1 where a value is NaN or
    infinite.

    logits: f32 [R, n]. turn: int32 [1]. best: int32 [≥ R]. found: int32 [2, ≥ R], may be mapped host memory.
    """
    rows, n = logits.shape
    if len(best) < rows or found.shape[0] != 2 or found.shape[1] < rows:
        raise ShapeMismatch(f"greedy of {list(logits.shape)} into {list(best.shape)} and {list(found.shape)}")
    block = min(config.GREEDY_BLOCK, config.power(n))
    blocks = config.blocks(n, block)
    tops = workspace("greedy", rows * blocks, torch.float32, logits)
    firsts = workspace("greedy", rows * blocks, torch.int32, logits)
    launch(_best_of_blocks, (rows, blocks), logits, tops, firsts, n, blocks, logits.stride(0), BLOCK=block)
    launch(
        _best_of_rows, (rows,), tops, firsts, turn, best, found, n, blocks, found.stride(0), BLOCKS=config.power(blocks),
    )  # fmt: skip
