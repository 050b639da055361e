"""Routing, and the experts that have a slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import reference
from engine.kernels.reference import route as choose_experts
from engine.moe.slots import NONE

Tensor = torch.Tensor


def route(scores: Tensor, experts: int, normalize: bool, live: Tensor | None, ids: Tensor, weights: Tensor) -> None:
    """The best experts of each token. scores: f32 [T, experts (+ 1)]. live: int32 [T] or None; where negative, ids := −1."""
    chosen, w = choose_experts(scores[:, :experts], ids.shape[1], normalize)
    ids.copy_(chosen)
    weights.copy_(w)
    if live is not None:
        ids[live < 0] = NONE
        weights[live < 0] = 0


def slot_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: Tensor,
    out: Tensor,
    accumulate: bool,
) -> None:
    """Σ weight · expert(x) over each token's experts in slots; −1 is skipped. ids: int32 [T, k], rows of gate_up and down (any
    stride between rows). inner: scratch [T · k, I]. out: f32 [T, H], added to if `accumulate`."""
    total = reference.experts_forward(x, ids, weights, gate_up, down)
    if accumulate:
        out += total
    else:
        out.copy_(total)


def bank_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    shares: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: Tensor,
    out: Tensor,
) -> None:
    """out f32 [T, H] += what the last shares[m] inner rows of the CPU's experts give, read from the host bank where they lie.

    ids: int32 [T, k], rows of gate_up and down; counts[1] of them in all, of m = counts[3] misses. shares: int32 [n], its last
    entry serves every larger m; multiples of 16. inner: scratch [T · k, I]."""
    inter, taken = down.shape[2], int(shares[min(int(counts[3]), len(shares) - 1)])
    if int(counts[1]) and taken:
        out += reference.experts_forward(x, ids, weights, gate_up, down, slice(inter - taken, inter))


def group(ids: Tensor, experts: int, order: Tensor, offsets: Tensor) -> None:
    """Pairs t · k + j sorted by expert: those of e are order[offsets[e] : offsets[e + 1]]. −1 is left out."""
    flat = ids.flatten().long()
    key = torch.where(flat < 0, experts, flat)
    order.copy_(torch.argsort(key, stable=True))
    torch.cumsum(torch.bincount(key, minlength=experts + 1)[:experts], 0, out=offsets[1:])
    offsets[0] = 0


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    order: Tensor,
    offsets: Tensor,
    slot_of: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: Tensor,
    out: Tensor,
) -> None:
    """out f32 [T, H] += Σ weight · expert(x) over the experts that have a slot in slot_of; others are skipped.

    order, offsets: from `group` of ids. weights: f32 [T, k]. inner: scratch [T · k, I]."""
    k = ids.shape[1]
    edges, slots = offsets.tolist(), slot_of.tolist()
    half = down.shape[2]
    for e, slot in enumerate(slots):
        pairs = order[edges[e] : edges[e + 1]].long()
        if slot < 0 or not len(pairs):
            continue
        token = pairs // k
        both = F.linear(x[token], gate_up[slot])
        hidden = (F.silu(both[:, :half].float()) * both[:, half:].float()).to(x.dtype)
        out.index_add_(0, token, F.linear(hidden, down[slot]).float() * weights.flatten()[pairs][:, None])
