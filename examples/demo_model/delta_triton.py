"""Triton kernels of delta.py. One program walks the chunks of one row and head; imported only on CUDA."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
# (a kernel is launched with a grid in brackets and keywords of the compiler, which type checkers do not know)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _inverse_kernel(source, target, C: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * C * C
    rows = tl.arange(0, C)
    offsets = base + rows[:, None] * C + rows[None, :]
    lower = tl.load(source + offsets)
    eye = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    inverse = eye
    for i in range(1, C):
        row = tl.sum(tl.where(rows[:, None] == i, lower, 0.0), axis=0)  # lower[i, :]
        known = tl.sum(row[:, None] * inverse, axis=0)
        inverse = tl.where(rows[:, None] == i, eye - known[None, :], inverse)
    tl.store(target + offsets, inverse)


@triton.jit
def _forward_kernel(u, w, q, k, attn, decay, out, states, chunks, H, C: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0) // H
    head = tl.program_id(0) % H
    rc = tl.arange(0, C)
    rd = tl.arange(0, D)
    cd = rc[:, None] * D + rd[None, :]
    cc = rc[:, None] * C + rc[None, :]
    dd = rd[:, None] * D + rd[None, :]
    state = tl.zeros([D, D], dtype=tl.float32)
    for c in range(chunks):
        block = ((row * chunks + c) * H + head).to(tl.int64)
        tl.store(states + block * D * D + dd, state)
        at = block * C * D + cd
        fresh = tl.load(u + at) - tl.dot(tl.load(w + at), state, input_precision="tf32")
        here = tl.dot(tl.load(q + at), state, input_precision="tf32")
        here += tl.dot(tl.load(attn + block * C * C + cc), fresh, input_precision="tf32")
        tl.store(out + at, here)
        state = state * tl.load(decay + block)
        state += tl.dot(tl.trans(tl.load(k + at)), fresh, input_precision="tf32")


@triton.jit
def _backward_kernel(
    grad,
    u,
    w,
    q,
    k,
    attn,
    decay,
    states,
    du,
    dw,
    dq,
    dk,
    dattn,
    ddecay,
    chunks,
    H,
    C: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.program_id(0) // H
    head = tl.program_id(0) % H
    rc = tl.arange(0, C)
    rd = tl.arange(0, D)
    cd = rc[:, None] * D + rd[None, :]
    cc = rc[:, None] * C + rc[None, :]
    dd = rd[:, None] * D + rd[None, :]
    dstate = tl.zeros([D, D], dtype=tl.float32)
    for back in range(chunks):
        c = chunks - 1 - back
        block = ((row * chunks + c) * H + head).to(tl.int64)
        at = block * C * D + cd
        state = tl.load(states + block * D * D + dd)
        w_ = tl.load(w + at)
        k_ = tl.load(k + at)
        g_ = tl.load(grad + at)
        a_ = tl.load(attn + block * C * C + cc)
        fresh = tl.load(u + at) - tl.dot(w_, state, input_precision="tf32")
        dfresh = tl.dot(tl.trans(a_), g_, input_precision="tf32") + tl.dot(k_, dstate, input_precision="tf32")
        turned = tl.trans(state)
        tl.store(dq + at, tl.dot(g_, turned, input_precision="tf32"))
        tl.store(dattn + block * C * C + cc, tl.dot(g_, tl.trans(fresh), input_precision="tf32"))
        tl.store(dk + at, tl.dot(fresh, tl.trans(dstate), input_precision="tf32"))
        tl.store(du + at, dfresh)
        tl.store(dw + at, -tl.dot(dfresh, turned, input_precision="tf32"))
        tl.store(ddecay + block, tl.sum(tl.sum(dstate * state, axis=1), axis=0))
        dstate = dstate * tl.load(decay + block)
        dstate += tl.dot(tl.trans(tl.load(q + at)), g_, input_precision="tf32")
        dstate -= tl.dot(tl.trans(w_), dfresh, input_precision="tf32")


def unit_inverse(lower: Tensor) -> Tensor:
    out = torch.empty_like(lower)
    size = lower.shape[-1]
    _inverse_kernel[(lower.numel() // (size * size),)](lower, out, C=size, num_warps=1)
    return out


def scan_forward(u, w, q, k, attn, decay, chunks: int) -> tuple[Tensor, Tensor]:
    u, w, q, k, attn, decay = (x.contiguous() for x in (u, w, q, k, attn, decay))
    blocks, heads, size, dim = u.shape
    out = torch.empty_like(u)
    states = u.new_empty(blocks, heads, dim, dim)
    grid = (blocks // chunks * heads,)
    _forward_kernel[grid](u, w, q, k, attn, decay, out, states, chunks, heads, C=size, D=dim, num_warps=4)
    return out, states


def scan_backward(grad, u, w, q, k, attn, decay, states, chunks: int):
    u, w, q, k, attn, decay = (x.contiguous() for x in (u, w, q, k, attn, decay))
    blocks, heads, size, dim = u.shape
    grads = [torch.empty_like(x) for x in (u, w, q, k, attn, decay)]
    grid = (blocks // chunks * heads,)
    _backward_kernel[grid](grad, u, w, q, k, attn, decay, states, *grads, chunks, heads, C=size, D=dim, num_warps=4)
    du, dw, dq, dk, dattn, ddecay = grads
    return du, dw, dq, dk, dattn, ddecay
