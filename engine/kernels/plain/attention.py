"""Attention over pages of keys and values."""

from __future__ import annotations

import torch

from engine.kernels import reference

Tensor = torch.Tensor


def attend_prepare(
    projected: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_out: Tensor,
    gated: bool,
) -> None:
    """Norm and rotate queries and keys; keys and values go to their pages.

    projected: [T, n]: per head its query (and gate, if gated), then key heads, then value heads. positions, slots: int32 [T];
    slot = page · page_size + offset, −1 = stored nowhere. pools: [pages, page_size, kv_heads, d], any stride between pages.
    """
    tokens, heads, d = q_out.shape
    kv_heads = k_pool.shape[2]
    q, k, v = projected.split([heads * d * (1 + gated), kv_heads * d, kv_heads * d], dim=1)
    at = positions.long().clamp(min=0)
    q = q.reshape(tokens, heads, -1)[..., :d]
    q_out.copy_(reference.rope(reference.rms_norm(q, q_weight, eps), cos[at], sin[at]))
    k = reference.rope(reference.rms_norm(k.reshape(tokens, kv_heads, d), k_weight, eps), cos[at], sin[at])
    stored = slots >= 0
    page, offset = slots[stored].long() // k_pool.shape[1], slots[stored].long() % k_pool.shape[1]
    k_pool[page, offset] = k[stored].to(k_pool.dtype)
    v_pool[page, offset] = v.reshape(tokens, kv_heads, d)[stored].to(v_pool.dtype)


def decode_scratch(rows: int, heads: int, d: int) -> int:
    """Floats that decode_attention wants."""
    return 1


def decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Tensor,
    contexts: Tensor,
    scale: float,
    gate: Tensor | None,
    out: Tensor,
    scratch: Tensor,
) -> None:
    """One new token a row, at position contexts[b], whose key is stored. q: [B, heads, d]. pages: int32 [B, P]."""
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    prefill_attention(q, k_pool, v_pool, pages, starts, contexts, 1, scale, gate, out)


def prefill_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pages: Tensor,
    starts: Tensor,
    contexts: Tensor,
    longest: int,
    scale: float,
    gate: Tensor | None,
    out: Tensor,
) -> None:
    """Causal attention of each sequence's rows starts[s] … starts[s + 1], the first at position contexts[s]; times
    sigmoid(gate) [T, heads, d] if given. out: [T, heads · d]; rows of a sequence with context −1 become zeros."""
    edges = starts.tolist()
    for s, context in enumerate(contexts.tolist()):
        rows = slice(edges[s], edges[s + 1])
        if rows.start == rows.stop:
            continue
        if context < 0:
            out[rows] = 0
            continue
        mixed = reference.paged_attention(q[rows], k_pool, v_pool, pages[s], context, scale)
        if gate is not None:
            mixed = reference.sigmoid_gate(mixed, gate[rows])
        out[rows] = mixed.reshape(mixed.shape[0], -1)
