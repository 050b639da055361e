"""The recurrent parts: causal convolution and gated delta net, over each sequence's slice."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.kernels import reference

Tensor = torch.Tensor


def conv(
    mixed: Tensor,
    weight: Tensor,
    tails: Tensor,
    starts: Tensor,
    contexts: Tensor,
    rows: Tensor,
    longest: int,
    out: Tensor,
    rows_out: Tensor | None = None,
) -> None:
    """Depthwise causal convolution and silu; tails[rows[s]] is read (zeros where contexts[s] is 0), and what it becomes is
    written to tails[rows_out[s]], by default the same.

    mixed, out: [T, C]. weight: [C, K]. tails: [pool rows, C, K − 1]. A row of −1: the sequence is skipped.
    """
    edges = starts.tolist()
    for s, (context, source, row) in enumerate(_where(contexts, rows, rows_out)):
        part = slice(edges[s], edges[s + 1])
        if source < 0 or context < 0 or part.start == part.stop:
            continue
        tails[row] = tails[source] if context else 0
        out[part] = reference.causal_conv(mixed[part], weight, tails[row])


def delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    starts: Tensor,
    contexts: Tensor,
    rows: Tensor,
    longest: int,
    k_heads: int,
    out: Tensor,
    rows_out: Tensor | None = None,
) -> None:
    """The gated delta rule over each sequence. mixed: [T, q | k | v] after the convolution. states: f32
    [pool rows, H_v, d_k, d_v], as tails in `conv`. out: [T, H_v, d_v]."""
    _, v_heads, d_v = out.shape
    d_k = states.shape[2]
    q, k, v = mixed.split([k_heads * d_k, k_heads * d_k, v_heads * d_v], dim=1)
    g, beta = reference.delta_gates(a, b, a_log, dt_bias)
    edges = starts.tolist()
    for s, (context, source, row) in enumerate(_where(contexts, rows, rows_out)):
        part = slice(edges[s], edges[s + 1])
        if source < 0 or context < 0 or part.start == part.stop:
            continue
        states[row] = states[source] if context else 0
        out[part] = reference.gated_delta_chunk(
            q[part].reshape(-1, k_heads, d_k),
            k[part].reshape(-1, k_heads, d_k),
            v[part].reshape(-1, v_heads, d_v),
            g[part],
            beta[part],
            states[row],
        )


def _where(contexts: Tensor, rows: Tensor, rows_out: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """Of each sequence: context, row that is read, row that is written."""
    written = rows if rows_out is None else rows_out
    return zip(contexts.tolist(), rows.tolist(), written.tolist(), strict=True)
