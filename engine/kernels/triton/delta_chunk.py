"""The gated delta rule over many tokens, 64 at a time (the chunked form of arXiv 2412.06464).

With G the running sum of log decays inside a chunk, S the state before it, q̂ and k̂ the normalized queries and keys, token t
adds k̂_t ⊗ u_t to the decayed state, where
    u_t = β_t (v_t − e^{G_t} Sᵀk̂_t) − Σ_{i<t} A_ti u_i,        A_ti = β_t e^{G_t − G_i} (k̂_t · k̂_i)
so U = T (β v) − T (β e^G k̂) S = U0 − W S with T = (I + A)⁻¹. The first kernel makes U0, W and P_ti = e^{G_t − G_i} (q̂_t · k̂_i)
of every chunk at once; the second walks the chunks of a sequence with some columns of one head's state in registers:
    out_t = e^{G_t} Sᵀq̂_t + Σ_{i≤t} P_ti u_i,                  S ← e^{G_64} S + Σ_i e^{G_64 − G_i} k̂_i ⊗ u_i.
T is made of 16 × 16 blocks by substitution, which are then joined; a power series would cancel.

Numbers: f32 sums everywhere; products of the inputs themselves in their own type; W, U0 and P are kept in the inputs' type;
the state enters products as two bf16 parts; the join of T is in tf32. f32 inputs: all in f32.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.kernels.triton import config
from engine.kernels.triton.base import dot, launch, precision, workspace
from engine.kernels.triton.delta_step import gates


@triton.jit
def _decays(a, b, a_log, dt_bias, token, live, head, a_row, b_row):
    """Running log decay G and write strength beta of a chunk's tokens; a dead token neither decays nor writes."""
    g, beta = gates(
        tl.load(a + token * a_row + head, mask=live, other=0.0),
        tl.load(b + token * b_row + head, mask=live, other=0.0),
        tl.load(a_log + head),
        tl.load(dt_bias + head),
    )
    return tl.cumsum(tl.where(live, g, 0.0), 0), tl.where(live, beta, 0.0)


@triton.jit
def _lengths(x):
    """1 / length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of a strictly lower triangular A [C, C], C a multiple of 16."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    near = row // 16 == column // 16
    diagonal = tl.where(near, A, 0.0)
    T = tl.where(row == column, 1.0, 0.0)
    for i in range(1, 16):
        # Row i of every diagonal block at once: column j belongs to one block, so a sum over rows picks that block's entry.
        coefficient = tl.sum(tl.where(row % 16 == i, diagonal, 0.0), 0)
        new = tl.sum(coefficient[:, None] * T, 0)
        T = tl.where((row % 16 == i) & near, T - new[None, :], T)
    zero = tl.zeros((C, C), tl.float32)
    # What is left, M = −T · (A below the diagonal blocks), has M⁴ = 0: (I − M)⁻¹ = (I + M)(I + M²).
    M = -dot(T, A - diagonal, zero, PRECISION)
    T = T + dot(M, T, zero, PRECISION)
    return T + dot(dot(M, M, zero, PRECISION), T, zero, PRECISION)


@triton.jit
def _prepare(
    mixed, a, b, a_log, dt_bias, starts, contexts, rows, w_out, u_out, p_out, m_row, a_row, b_row,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(2), tl.program_id(1)
    start = tl.load(starts + seq)
    length = tl.where((tl.load(rows + seq) >= 0) & (tl.load(contexts + seq) >= 0), tl.load(starts + seq + 1) - start, 0)
    t = tl.program_id(0) * C + tl.arange(0, C)
    if tl.program_id(0) * C >= length:
        return
    live, token = t < length, (start + t).to(tl.int64)
    k_head = head // (V_HEADS // K_HEADS)
    i, j = tl.arange(0, KP), tl.arange(0, VP)
    source = mixed + token[:, None] * m_row
    in_k, in_v = live[:, None] & (i < D_K)[None, :], live[:, None] & (j < D_V)[None, :]
    q = tl.load(source + k_head * D_K + i[None, :], mask=in_k, other=0.0)
    k = tl.load(source + (K_HEADS + k_head) * D_K + i[None, :], mask=in_k, other=0.0)
    G, beta = _decays(a, b, a_log, dt_bias, token, live, head, a_row, b_row)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # Decays are at most one below the diagonal; above it the exponent could overflow, so it is cut first.
    fade = tl.exp(tl.where(row >= column, G[:, None] - G[None, :], 0.0))
    rk, rq = _lengths(k), _lengths(q) * (D_K**-0.5)
    zero = tl.zeros((C, C), tl.float32)
    kt = tl.trans(k)
    P = dot(q, kt, zero, PRECISION) * rq[:, None] * rk[None, :] * fade
    P = tl.where(row >= column, P, 0.0)
    at = (token * V_HEADS + head)[:, None]
    tl.store(p_out + at * C + column, P.to(p_out.dtype.element_ty), mask=live[:, None] & (column < C))
    A = dot(k, kt, zero, PRECISION) * (beta * rk)[:, None] * rk[None, :] * fade
    T = _inverse(tl.where(row > column, A, 0.0), C, PRECISION)
    v = tl.load(source + 2 * K_HEADS * D_K + head * D_V + j[None, :], mask=in_v, other=0.0)
    U = dot((T * beta[None, :]).to(v.dtype), v, tl.zeros((C, VP), tl.float32), PRECISION)
    tl.store(u_out + at * D_V + j[None, :], U.to(u_out.dtype.element_ty), mask=in_v)
    W = dot((T * (beta * tl.exp(G) * rk)[None, :]).to(k.dtype), k, tl.zeros((C, KP), tl.float32), PRECISION)
    tl.store(w_out + at * D_K + i[None, :], W.to(w_out.dtype.element_ty), mask=in_k)


@triton.jit
def _dot_wide(x, y, total, PRECISION: tl.constexpr):
    """total + x · y for f32 y. With bf16 x, y is the sum of two bf16: 16 of its bits count, and x needs no widening."""
    if x.dtype == tl.bfloat16:
        high = y.to(tl.bfloat16)
        low = (y - high.to(tl.float32)).to(tl.bfloat16)
        return dot(x, low, dot(x, high, total, PRECISION), PRECISION)
    else:
        return dot(x, y, total, PRECISION)


@triton.jit
def _scan(
    mixed, a, b, a_log, dt_bias, states, starts, contexts, rows, rows_out, w_in, u_in, p_in, out,
    m_row, a_row, b_row, s_row, o_row,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KP: tl.constexpr,
    COLUMNS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    start, context = tl.load(starts + seq), tl.load(contexts + seq)
    length = tl.load(starts + seq + 1) - start
    row, row_out = tl.load(rows + seq).to(tl.int64), tl.load(rows_out + seq).to(tl.int64)
    if (row < 0) | (context < 0) | (length <= 0):
        return
    k_head = head // (V_HEADS // K_HEADS)
    i, j = tl.arange(0, KP), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = head * (D_K * D_V) + i[:, None] * D_V + j[None, :]
    whole = (i < D_K)[:, None] & (j < D_V)[None, :]
    old = whole & (context + tl.zeros((KP, 1), tl.int32) > 0)
    state = tl.load(states + row * s_row + place, mask=old, other=0.0)
    n = tl.arange(0, C)
    for done in range(0, length, C):
        t = done + n
        live, token = t < length, (start + t).to(tl.int64)
        in_k, in_v = live[:, None] & (i < D_K)[None, :], live[:, None] & (j < D_V)[None, :]
        source = mixed + token[:, None] * m_row
        q = tl.load(source + k_head * D_K + i[None, :], mask=in_k, other=0.0)
        k = tl.load(source + (K_HEADS + k_head) * D_K + i[None, :], mask=in_k, other=0.0)
        at = (token * V_HEADS + head)[:, None]
        W = tl.load(w_in + at * D_K + i[None, :], mask=in_k, other=0.0)
        U = tl.load(u_in + at * D_V + j[None, :], mask=in_v, other=0.0).to(tl.float32)
        P = tl.load(p_in + at * C + n[None, :], mask=live[:, None] & (n < C)[None, :], other=0.0)
        G, _ = _decays(a, b, a_log, dt_bias, token, live, head, a_row, b_row)
        U -= _dot_wide(W, state, tl.zeros((C, COLUMNS), tl.float32), PRECISION)
        seen = _dot_wide(q, state, tl.zeros((C, COLUMNS), tl.float32), PRECISION)
        y = seen * (tl.exp(G) * _lengths(q) * (D_K**-0.5))[:, None]
        y = dot(P, U.to(P.dtype), y, PRECISION)
        tl.store(out + token[:, None] * o_row + head * D_V + j[None, :], y.to(out.dtype.element_ty), mask=in_v)
        kt = tl.trans(k)
        rk = _lengths(k)
        # Dead tokens behind the last do not decay, so the chunk's last G is the sequence's.
        total = tl.sum(tl.where(n == C - 1, G, 0.0), 0)
        state = _dot_wide(kt, U * (tl.exp(total - G) * rk)[:, None], state * tl.exp(total), PRECISION)
    tl.store(states + row_out * s_row + place, state, mask=whole)


def delta_chunk(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    rows: torch.Tensor,
    rows_out: torch.Tensor,
    longest: int,
    k_heads: int,
    out: torch.Tensor,
) -> None:
    """`delta.delta` for slices of any length. Shapes were checked there.

    Scratch: (d_k + d_v + 64) values of mixed's type for every token and value head.
    """
    tokens, v_heads, d_v = out.shape
    d_k, chunk = states.shape[2], config.DELTA_CHUNK
    sizes = [tokens * v_heads * width for width in (d_k, d_v, chunk)]
    parts = workspace("delta chunks", sum(sizes), mixed.dtype, mixed)[: sum(sizes)].split(sizes)
    kind = precision(mixed.dtype)
    shape = {"K_HEADS": k_heads, "V_HEADS": v_heads, "D_K": d_k, "D_V": d_v, "KP": max(16, config.power(d_k)), "C": chunk}
    launch(
        _prepare, (config.blocks(longest, chunk), v_heads, len(rows)),
        mixed, a, b, a_log, dt_bias, starts, contexts, rows, *parts, mixed.stride(0), a.stride(0), b.stride(0),
        VP=max(16, config.power(d_v)), PRECISION=kind, num_warps=8, num_stages=2, **shape,
    )  # fmt: skip
    columns = max(16, min(config.DELTA_CHUNK_COLUMNS, config.power(d_v)))
    launch(
        _scan, (len(rows), v_heads, config.blocks(d_v, columns)),
        mixed, a, b, a_log, dt_bias, states, starts, contexts, rows, rows_out, *parts, out,
        mixed.stride(0), a.stride(0), b.stride(0), states.stride(0), out.stride(0),
        COLUMNS=columns, PRECISION=kind, num_warps=8, num_stages=2, **shape,
    )  # fmt: skip
