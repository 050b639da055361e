"""Depthwise causal convolution and silu, with the last inputs kept as a tail; taps are summed in f32, oldest first.

Decode (one token a sequence) is one kernel. Otherwise one computes outputs, blocks of tokens in any order, and a second then
moves the tails: a block that reads the old tail must never meet the new one.
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
def _input(x, tails, tail_row, context, start, position, c, inside, x_row, t_row, TAIL: tl.constexpr):
    """The input at `position` of a sequence's slice, f32; negative positions lie in the tail (zeros in a fresh sequence)."""
    new = tl.load(x + (start + position).to(tl.int64) * x_row + c, mask=inside & (position >= 0), other=0.0).to(tl.float32)
    old = tails + tail_row * t_row + c * TAIL + position + TAIL
    return new + tl.load(old, mask=inside & (position < 0) & (context > 0), other=0.0).to(tl.float32)


@triton.jit
def _outputs(
    x, weight, tails, starts, contexts, rows, out, channels, x_row, t_row, o_row,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(2)
    start = tl.load(starts + seq)
    length, context = tl.load(starts + seq + 1) - start, tl.load(contexts + seq)
    row = tl.load(rows + seq).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    length = tl.where((row >= 0) & (context >= 0), length, 0)
    if tl.program_id(0) * TOKENS >= length:
        return
    c = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    inside = (token < length)[:, None] & (c < channels)
    context = context + tl.zeros((TOKENS, 1), tl.int32)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for j in tl.static_range(K):
        tap = tl.load(weight + c * K + j, mask=c < channels, other=0.0).to(tl.float32)
        total += tap * _input(x, tails, row, context, start, token[:, None] + j - (K - 1), c, inside, x_row, t_row, K - 1)
    y = total * tl.sigmoid(total)
    tl.store(out + (start + token).to(tl.int64)[:, None] * o_row + c, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep(x, tails, source, dest, context, start, length, c, channels, x_row, t_row, TAIL: tl.constexpr, TP: tl.constexpr):
    """Write the tail after `length` tokens. Every value is read before one is written: old and new tail may be the same."""
    j = tl.arange(0, TP)[:, None]
    inside = (c < channels)[None, :] & (j < TAIL)
    context = context + tl.zeros((TP, 1), tl.int32)
    value = _input(x, tails, source, context, start, length - TAIL + j, c[None, :], inside, x_row, t_row, TAIL)
    tl.debug_barrier()
    tl.store(tails + dest * t_row + c[None, :] * TAIL + j, value.to(tails.dtype.element_ty), mask=inside)


@triton.jit
def _tails(
    x, tails, starts, contexts, rows, rows_out, channels, x_row, t_row,
    TAIL: tl.constexpr, TP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(1)
    start = tl.load(starts + seq)
    length, context = tl.load(starts + seq + 1) - start, tl.load(contexts + seq)
    row, row_out = tl.load(rows + seq).to(tl.int64), tl.load(rows_out + seq).to(tl.int64)
    if (row < 0) | (context < 0) | (length <= 0):
        return
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    _keep(x, tails, row, row_out, context, start, length, c, channels, x_row, t_row, TAIL, TP)


@triton.jit
def _step(
    x, weight, tails, starts, contexts, rows, rows_out, out, channels, x_row, t_row, o_row,
    K: tl.constexpr, TP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One token of each sequence: output and tail at once."""
    seq = tl.program_id(1)
    start, context = tl.load(starts + seq), tl.load(contexts + seq)
    row, row_out = tl.load(rows + seq).to(tl.int64), tl.load(rows_out + seq).to(tl.int64)
    if (row < 0) | (context < 0) | (tl.load(starts + seq + 1) <= start):
        return
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    j = tl.arange(0, TP)[:, None]
    inside = (c < channels)[None, :] & (j < K)
    known = context + tl.zeros((TP, 1), tl.int32)
    value = _input(x, tails, row, known, start, j - (K - 1), c[None, :], inside, x_row, t_row, K - 1)
    tap = tl.load(weight + c[None, :] * K + j, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(value * tap, 0)
    y = total * tl.sigmoid(total)
    tl.store(out + start.to(tl.int64) * o_row + c, y.to(out.dtype.element_ty), mask=c < channels)
    tl.debug_barrier()
    moved, kept = c[None, :] * (K - 1) + j - 1, inside & (j > 0)
    tl.store(tails + row_out * t_row + moved, value.to(tails.dtype.element_ty), mask=kept)


def conv(
    mixed: torch.Tensor,
    weight: torch.Tensor,
    tails: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    rows: torch.Tensor,
    longest: int,
    out: torch.Tensor,
    rows_out: torch.Tensor | None = None,
) -> None:
    """out = silu(convolution of each sequence's slice); its tail is read from `rows` and written to `rows_out`.

    mixed, out: [T, C]. weight: [C, K]. tails: [pool rows, C, K − 1], the last inputs, oldest first. starts: int32 [S + 1].
    contexts: int32 [S]; where 0 the tail counts as zeros. rows: int32 [S]; −1 (or a context of −1) skips the sequence.
    longest: most tokens of one sequence. rows_out: default `rows`.
    """
    channels, kernel = weight.shape
    if mixed.shape != out.shape or mixed.shape[1] != channels or tails.shape[1:] != (channels, kernel - 1):
        raise ShapeMismatch(f"conv of {list(mixed.shape)} by {list(weight.shape)} with tails {list(tails.shape)}")
    if not (weight.is_contiguous() and tails[0].is_contiguous()):
        raise ShapeMismatch("conv needs contiguous weights and tail rows")
    written = rows if rows_out is None else rows_out
    strides = (mixed.stride(0), tails.stride(0))
    block = min(config.CONV_CHANNELS, config.power(channels))
    grid, options = (config.blocks(channels, block), len(rows)), {"CHANNELS": block}
    if longest == 1:
        launch(
            _step, grid, mixed, weight, tails, starts, contexts, rows, written, out, channels, *strides, out.stride(0),
            K=kernel, TP=config.power(kernel), num_warps=4, **options,
        )  # fmt: skip
        return
    tokens = min(config.CONV_TOKENS, config.power(longest))
    launch(
        _outputs, (config.blocks(longest, tokens), grid[0], len(rows)),
        mixed, weight, tails, starts, contexts, rows, out, channels, *strides, out.stride(0),
        K=kernel, TOKENS=tokens, CHANNELS=block, num_warps=4,
    )  # fmt: skip
    launch(
        _tails, grid, mixed, tails, starts, contexts, rows, written, channels, *strides,
        TAIL=kernel - 1, TP=config.power(kernel - 1), num_warps=4, **options,
    )  # fmt: skip
