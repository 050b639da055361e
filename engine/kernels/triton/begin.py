"""What a decode step begins with: it takes what the host has told it, and tokens that only the device knows yet."""

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
def _begin(told, best, turn, tables, found, rows, TABLES: tl.constexpr, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    inside = at < rows
    now = tl.load(turn) + 1
    # Host memory, rewritten by the CPU between replays: never from a cache.
    source = told + (now & 1) * (TABLES * rows)
    token = tl.load(source + at, mask=inside, other=0, volatile=True)
    chosen = tl.load(best + tl.where(token < 0, -1 - token, 0), mask=inside, other=0)
    tl.store(tables + at, tl.where(token < 0, chosen, token), mask=inside)
    for table in tl.static_range(1, TABLES):
        tl.store(tables + table * rows + at, tl.load(source + table * rows + at, mask=inside, volatile=True), mask=inside)
    tl.debug_barrier()
    tl.store(turn, now)
    tl.store(found + (now & 1) * (rows + 1) + rows, now)


def begin(told: torch.Tensor, best: torch.Tensor, turn: torch.Tensor, tables: torch.Tensor, found: torch.Tensor) -> None:
    """turn += 1; tables = told[turn & 1]; a token of −1 − r becomes best[r]; found[turn & 1, R] = turn.

    told: int32 [2, n, R], of which [:, 0] are tokens, and found: int32 [2, R + 1]: mapped host memory. best: int32 [R]. turn:
    int32 [1]. tables: int32 [n, R]. All contiguous.
    """
    count, rows = tables.shape
    if told.shape != (2, count, rows) or best.shape != (rows,) or found.shape != (2, rows + 1):
        raise ShapeMismatch(f"begin of {list(told.shape)} and {list(best.shape)} into {list(tables.shape)}")
    launch(_begin, (1,), told, best, turn, tables, found, rows, TABLES=count, ROWS=config.power(rows), num_warps=1)
