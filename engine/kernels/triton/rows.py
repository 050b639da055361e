"""Row-wise odds and ends: gather, silu · mul, and the sum that ends a layer of experts."""

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
def _gather(table, ids, out, n, t_row, o_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row).to(tl.int64)
    x = tl.load(table + source * t_row + at, mask=at < tl.where(source >= 0, n, 0), other=0.0)
    tl.store(out + row * o_row + at, x.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _silu_mul(both, out, n, b_row, o_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(both + row * b_row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * b_row + n + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * o_row + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge(
    residual, out, box, counts, status, shared, gate, n, r_row, o_row, b_row, s_row, g_row,
    SHARED: tl.constexpr, BOX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(residual + row * r_row + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(out + row * o_row + at, mask=inside, other=0.0)
    if BOX:
        arrived = tl.where(tl.load(status) == 0, tl.load(counts + 1), 0)
        # Host memory, rewritten by the CPU between replays: never from a cache.
        total += tl.load(box + row * b_row + at, mask=at < tl.where(arrived > 0, n, 0), other=0.0, volatile=True)
    if SHARED:
        weight = tl.sigmoid(tl.load(gate + row * g_row).to(tl.float32))
        total += weight * tl.load(shared + row * s_row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + row * r_row + at, total.to(residual.dtype.element_ty), mask=inside)


def gather(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = table[ids[t]] in out's dtype; a negative id gives zeros. table: [V, n]. ids: int [T]. out: [T, n]."""
    n = table.shape[1]
    if out.shape != (ids.shape[0], n):
        raise ShapeMismatch(f"gather of {ids.shape[0]} rows of {n} into {list(out.shape)}")
    block = min(1024, config.power(n))
    launch(_gather, (ids.shape[0], config.blocks(n, block)), table, ids, out, n, table.stride(0), out.stride(0), BLOCK=block)


def silu_mul(both: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(first half) · second half, in f32, rounded once. both: [T, 2·n]. out: [T, n]."""
    tokens, n = out.shape
    if both.shape != (tokens, 2 * n):
        raise ShapeMismatch(f"silu_mul of {list(both.shape)} into {list(out.shape)}")
    block = min(512, config.power(n))
    launch(_silu_mul, (tokens, config.blocks(n, block)), both, out, n, both.stride(0), out.stride(0), BLOCK=block)


def merge(
    residual: torch.Tensor,
    out: torch.Tensor,
    box_out: torch.Tensor | None,
    counts: torch.Tensor | None,
    status: torch.Tensor | None,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> None:
    """residual += out (+ box_out where the CPU had work and answered) (+ sigmoid(gate) · shared), summed in that order in f32.

    residual, out: f32 [T, n]. box_out: f32 [T, n] in mapped host memory, or None: then counts and
    status, as in handoff.py, may be None too.
    shared: [T, n] or None. gate: [T, 1].
    """
    tokens, n = residual.shape
    for name, part in (("out", out), ("box_out", box_out), ("shared", shared)):
        if part is not None and part.shape != residual.shape:
            raise ShapeMismatch(f"merge: {name} is {list(part.shape)}, the residual {list(residual.shape)}")
    if (shared is None) != (gate is None):
        raise ShapeMismatch("merge: a shared expert needs its gate, and the reverse")
    if box_out is not None and (counts is None or status is None):
        raise ShapeMismatch("merge: the CPU's part needs counts and status")
    box = out if box_out is None else box_out
    used, fault = (out, out) if counts is None or status is None else (counts, status)
    dense, weight = (out, out) if shared is None or gate is None else (shared, gate)
    block = min(512, config.power(n))
    launch(_merge, (tokens, config.blocks(n, block)), 
        residual, out, box, used, fault, dense, weight, n,
        residual.stride(0), out.stride(0), box.stride(0), dense.stride(0), weight.stride(0),
        SHARED=shared is not None, BOX=box_out is not None, BLOCK=block,
    )  # fmt: skip
