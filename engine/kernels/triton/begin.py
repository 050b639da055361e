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
def _begin(told, guesses, turn, tables, found, rows, words, WORDS: tl.constexpr):
    at = tl.arange(0, WORDS)
    now = tl.load(turn) + 1
    # Host memory, rewritten by the CPU between replays: never from a cache. All at once, as each load takes a microsecond.
    word = tl.load(told + (now & 1) * words + at, mask=at < words, other=0, volatile=True)
    behind = (at < rows) & (word < 0)
    guess = tl.load(guesses + tl.where(behind, -1 - word, 0), mask=behind, other=0)
    tl.store(tables + at, tl.where(behind, guess, word), mask=at < words)
    tl.debug_barrier()
    tl.store(turn, now)
    tl.store(found + (now & 1) * (rows + 1) + rows, now)


def begin(told: torch.Tensor, guesses: torch.Tensor, turn: torch.Tensor, tables: torch.Tensor, found: torch.Tensor) -> None:
    """turn += 1; tables = told[turn & 1]; a token of −1 − r becomes guesses[r]; found[turn & 1, R] = turn.

    told: int32 [2, n, R], of which [:, 0] are tokens, and found: int32 [2, R + 1]: mapped host memory. guesses: int32 [R].
    turn: int32 [1]. tables: int32 [n, R]. All contiguous.
    """
    count, rows = tables.shape
    if told.shape != (2, count, rows) or guesses.shape != (rows,) or found.shape != (2, rows + 1):
        raise ShapeMismatch(f"begin of {list(told.shape)} and {list(guesses.shape)} into {list(tables.shape)}")
    words = count * rows
    launch(_begin, (1,), told, guesses, turn, tables, found, rows, words, WORDS=config.power(words), num_warps=1)
