"""Rows of tensors: embeddings, norms, products, and where a layer's outputs meet."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import reference

Tensor = torch.Tensor


def gather(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """Rows of table [V, H] in f32, zeros for a negative id. ids: int32 [T]."""
    out.copy_(table[ids.clamp(min=0).long()])
    out[ids < 0] = 0


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual f32 [T, H] += delta; out = rms norm of it."""
    if delta is not None:
        residual += delta.float()
    out.copy_(residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + eps) * weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [T, K] · weight [N, K]ᵀ + bias; out [T, N] may be f32."""
    out.copy_(F.linear(x, weight, bias))


def silu_mul(both: Tensor, out: Tensor) -> None:
    """both: [T, 2 I], gate beside up."""
    half = both.shape[1] // 2
    out.copy_(F.silu(both[:, :half].float()) * both[:, half:].float())


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """rms norm over the last dimension, times silu(gate). All [T, heads, n]."""
    out.copy_(reference.rms_norm(x.float(), weight, eps, gate))


def begin(told: Tensor, guesses: Tensor, turn: Tensor, tables: Tensor, found: Tensor) -> None:
    """What a decode step begins with: turn += 1; tables int32 [n, R] = told[turn & 1], where a token ([0]) of −1 − r becomes
    guesses[r]; found[turn & 1, R] = turn. See gpu/tables.py."""
    turn += 1
    now = int(turn)
    tables.copy_(told[now & 1])
    tokens = tables[0]
    tokens.copy_(torch.where(tokens < 0, guesses[torch.where(tokens < 0, -1 - tokens, 0).long()], tokens))
    found[now & 1, -1] = now


def merge(
    residual: Tensor,
    out: Tensor,
    box_out: Tensor | None,
    counts: Tensor | None,
    status: Tensor | None,
    shared: Tensor | None,
    gate: Tensor | None,
) -> None:
    """residual f32 [T, H] += out (+ box_out where the CPU had work: counts[1] > 0, and status[0] is 0) (+ sigmoid(gate) ·
    shared).

    gate: f32 [T, 1]."""
    residual += out
    if box_out is not None and counts is not None and status is not None and int(counts[1]) and not int(status[0]):
        residual += box_out
    if shared is not None and gate is not None:
        residual += torch.sigmoid(gate) * shared.float()
