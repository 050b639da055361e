"""The gated delta rule over many tokens, 64 at a time (the chunked form of arXiv 2412.06464).

With G the running sum of log decays inside a chunk, S the state before it, q̂ and k̂ the normalized queries and keys, token t
adds k̂_t ⊗ u_t to the decayed state, where
    u_t = β_t (v_t − e^{G_t} Sᵀk̂_t) − Σ_{i<t} A_ti u_i,        A_ti = β_t e^{G_t − G_i} (k̂_t · k̂_i)
so U = T (β v) − T (β e^G k̂) S = U0 − W S with T = (I + A)⁻¹. The first kernel makes U0, −W and P_ti = e^{G_t − G_i} (q̂_t · k̂_i)
of every chunk at once; the second walks the chunks of a sequence:
    out_t = e^{G_t} Sᵀq̂_t + Σ_{i≤t} P_ti u_i,                  S ← e^{G_64} S + Σ_i e^{G_64 − G_i} k̂_i ⊗ u_i.
All that is left to walk are four products with some columns of one head's state. They are turned round, Uᵀ = U0ᵀ − SᵀWᵀ: so
state and U are the left operands, small, and what lies in memory anyway (W, q, k, P) is copied ahead of time as the right ones.

T starts as the inverse of blocks of 2 × 2 and is doubled: of a block [[I − N₁, 0], [−B, I − N₂]] with N = −A the inverse is
[[T₁, 0], [T₂ B T₁, T₂]], so nothing larger than T's own values ever occurs; a power series would cancel.

Numbers: f32 sums and an f32 state; W, U0, P and what is multiplied in the inputs' type; T in f16, whose values are at most one
and which has the same 11 bits as tf32. A second bf16 part of state and U would take up to 7% off the outputs' error and a fifth
off the state's (simulated, 1,024 tokens against f64). f32 inputs: all in f32.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.kernels.triton import config
from engine.kernels.triton.base import dot, launch, precision, shared_bytes, workspace
from engine.kernels.triton.delta_step import gates

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _summed(g, beta, g_next, beta_next):
    return g + g_next, beta_next


@triton.jit
def _decays(a, b, a_log, dt_bias, token, live, head, a_row, b_row):
    """Running log decay G, base 2, and write strength beta of a chunk's tokens; a dead token neither decays nor writes.

    beta goes through the sum unchanged: as a result of it, it is not computed anew for each way its values are laid out.
    """
    g, beta = gates(
        tl.load(a + token * a_row + head, mask=live, other=0.0),
        tl.load(b + token * b_row + head, mask=live, other=0.0),
        tl.load(a_log + head),
        tl.load(dt_bias + head),
    )
    return tl.associative_scan((tl.where(live, g * LOG2_E, 0.0), tl.where(live, beta, 0.0)), 0, _summed)


@triton.jit
def _lengths(x):
    """1 / length of each row."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _doubled(T, N, apart, LEVEL: tl.constexpr, PRECISION: tl.constexpr):
    """(I − N)⁻¹ in blocks of 2 ** (LEVEL + 1), from that in half as large ones."""
    known = T.to(N.dtype)
    below = dot(known, tl.where(apart >> LEVEL == 1, N, 0.0), tl.zeros_like(T), PRECISION)
    return dot(below.to(N.dtype), known, T, PRECISION)


@triton.jit
def _inverse(N, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I − N)⁻¹ of N [64, 64], of which only what lies below the diagonal is not zero, or on it, where it is not read."""
    # The bits in which row and column differ: below 2 within a block of 2 × 2, and so on.
    apart = tl.arange(0, 64)[:, None] ^ tl.arange(0, 64)[None, :]
    T = tl.where(apart == 0, 1.0, tl.where(apart == 1, N, 0.0))
    N = N.to(TYPE)
    for level in tl.static_range(1, 6):
        T = _doubled(T, N, apart, level, PRECISION)
    return T


@triton.jit
def _slot(start, seq, C: tl.constexpr):
    """Where the scratch of a sequence's first chunk lies: no two sequences meet, whatever their lengths."""
    return (start // C + seq).to(tl.int64)


@triton.jit(do_not_specialize=["slots"])
def _prepare(
    mixed, a, b, a_log, dt_bias, starts, contexts, rows, parts, factors, slots, m_row, a_row, b_row,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(2), tl.program_id(1)
    start = tl.load(starts + seq)
    length = tl.where((tl.load(rows + seq) >= 0) & (tl.load(contexts + seq) >= 0), tl.load(starts + seq + 1) - start, 0)
    n, done = tl.arange(0, C), tl.program_id(0) * C
    if done >= length:
        return
    live, first = n < length - done, (start + done).to(tl.int64)
    k_head = head // (V_HEADS // K_HEADS)
    i, j = tl.arange(0, KP), tl.arange(0, VP)
    source = mixed + first * m_row + n[:, None] * m_row
    in_k, in_v = live[:, None] & (i < D_K)[None, :], live[:, None] & (j < D_V)[None, :]
    k = tl.load(source + (K_HEADS + k_head) * D_K + i[None, :], mask=in_k, other=0.0)
    q = tl.load(source + k_head * D_K + i[None, :], mask=in_k, other=0.0)
    v = tl.load(source + 2 * K_HEADS * D_K + head * D_V + j[None, :], mask=in_v, other=0.0)
    G, beta = _decays(a + first * a_row, b + first * b_row, a_log, dt_bias, n, live, head, a_row, b_row)
    row, column = n[:, None], n[None, :]
    # Decays are at most one below the diagonal; above it the exponent could overflow.
    fade = tl.exp2(tl.where(row >= column, G[:, None] - G[None, :], float("-inf")))
    rk, rq = _lengths(k), _lengths(q) * (D_K**-0.5)
    zero = tl.zeros((C, C), tl.float32)
    kt = tl.trans(k)
    tile = (_slot(start, seq, C) + tl.program_id(0)) * V_HEADS + head
    # Dead tokens behind the last do not decay, so the chunk's last G is the sequence's.
    total = tl.sum(tl.where(n == C - 1, G, 0.0), 0)
    tl.store(factors + tile * (2 * C) + n, tl.exp2(G) * rq)
    tl.store(factors + tile * (2 * C) + C + n, tl.exp2(total - G) * rk)
    tl.store(factors + slots.to(tl.int64) * (2 * C * V_HEADS) + tile, tl.exp2(total))
    fade *= rk[None, :]
    P = dot(q, kt, zero, PRECISION) * rq[:, None] * fade
    to = parts + tile * (C * (KP + VP + C))
    tl.store(to + C * (KP + VP) + row * C + column, P.to(parts.dtype.element_ty))
    T = _inverse(
        dot(k, kt, zero, PRECISION) * (beta * -rk)[:, None] * fade,
        tl.float16 if k.dtype == tl.bfloat16 else tl.float32,
        PRECISION,
    )
    W = dot((T * (beta * tl.exp2(G) * -rk)[None, :]).to(k.dtype), k, tl.zeros((C, KP), tl.float32), PRECISION)
    tl.store(to + row * KP + i[None, :], W.to(parts.dtype.element_ty))
    U = dot((T * beta[None, :]).to(v.dtype), v, tl.zeros((C, VP), tl.float32), PRECISION)
    tl.store(to + C * KP + j[:, None] * C + column, tl.trans(U).to(parts.dtype.element_ty))


@triton.jit(do_not_specialize=["slots"])
def _scan(
    mixed, states, starts, contexts, rows, rows_out, parts, factors, out, slots, m_row, s_row, o_row,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    COLUMNS: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(2), tl.program_id(1)
    start, context = tl.load(starts + seq), tl.load(contexts + seq)
    length = tl.load(starts + seq + 1) - start
    row, row_out = tl.load(rows + seq).to(tl.int64), tl.load(rows_out + seq).to(tl.int64)
    if (row < 0) | (context < 0) | (length <= 0):
        return
    i, j, n = tl.arange(0, KP), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, C)
    place = head * (D_K * D_V) + i[:, None] * D_V + j[None, :]
    whole = (i < D_K)[:, None] & (j < D_V)[None, :]
    old = whole & (context + tl.zeros((KP, 1), tl.int32) > 0)
    state = tl.trans(tl.load(states + row * s_row + place, mask=old, other=0.0))
    first = _slot(start, seq, C)
    queries = mixed + head // (V_HEADS // K_HEADS) * D_K + i[None, :]
    for chunk in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        tile = (first + chunk) * V_HEADS + head
        here = parts + tile * (C * (KP + VP + C))
        left, at_row = length - chunk * C, (start + chunk * C).to(tl.int64)
        # Rows behind the last are the last again: what is multiplied by them is zero or not stored.
        source = queries + at_row * m_row + (tl.minimum(n, left - 1) * m_row)[:, None]
        W = tl.load(here + n[:, None] * KP + i[None, :])
        U = tl.load(here + C * KP + j[:, None] * C + n[None, :])
        P = tl.load(here + C * (KP + VP) + n[:, None] * C + n[None, :])
        if KP == D_K:
            q = tl.load(source)
            k = tl.load(source + K_HEADS * D_K)
        else:
            q = tl.load(source, mask=(i < D_K)[None, :], other=0.0)
            k = tl.load(source + K_HEADS * D_K, mask=(i < D_K)[None, :], other=0.0)
        q_factor = tl.load(factors + tile * (2 * C) + n)
        k_factor = tl.load(factors + tile * (2 * C) + C + n)
        fade = tl.load(factors + slots.to(tl.int64) * (2 * C * V_HEADS) + tile)
        seen = state.to(W.dtype)
        u = dot(seen, tl.trans(W), U.to(tl.float32), PRECISION)
        y = dot(seen, tl.trans(q), tl.zeros((COLUMNS, C), tl.float32), PRECISION) * q_factor[None, :]
        y = dot(u.to(P.dtype), tl.trans(P), y, PRECISION)
        state = dot((u * k_factor[None, :]).to(k.dtype), k, state * fade, PRECISION)
        to = out + at_row * o_row + head * D_V + (n * o_row)[:, None] + j[None, :]
        tl.store(to, tl.trans(y).to(out.dtype.element_ty), mask=(n < left)[:, None] & (j < D_V)[None, :])
    tl.store(states + row_out * s_row + place, tl.trans(state), mask=whole)


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

    Scratch: for every 64 tokens and value head, and once more for every sequence, 64 · (d_k + d_v + 64) values of mixed's
    type and 129 of f32.
    """
    tokens, v_heads, d_v = out.shape
    d_k, chunk, seqs = states.shape[2], config.DELTA_CHUNK, len(rows)
    kp, vp = max(16, config.power(d_k)), max(16, config.power(d_v))
    slots = tokens // chunk + seqs
    parts = workspace("delta chunks", slots * v_heads * chunk * (kp + vp + chunk), mixed.dtype, mixed)
    factors = workspace("delta factors", slots * v_heads * (2 * chunk + 1), torch.float32, mixed)
    kind = precision(mixed.dtype)
    shape = {"K_HEADS": k_heads, "V_HEADS": v_heads, "D_K": d_k, "D_V": d_v, "KP": kp, "VP": vp}
    launch(
        _prepare, (config.blocks(longest, chunk), v_heads, seqs),
        mixed, a, b, a_log, dt_bias, starts, contexts, rows, parts, factors, slots,
        mixed.stride(0), a.stride(0), b.stride(0),
        **shape, C=chunk, PRECISION=kind, num_warps=config.DELTA_PREPARE_WARPS, num_stages=1,
    )  # fmt: skip
    tile = config.delta_scan(vp, mixed.element_size(), shared_bytes())
    launch(
        _scan, (config.blocks(d_v, tile.columns), v_heads, seqs),
        mixed, states, starts, contexts, rows, rows_out, parts, factors, out, slots,
        mixed.stride(0), states.stride(0), out.stride(0),
        **shape, COLUMNS=tile.columns, C=chunk, STAGES=tile.stages, PRECISION=kind, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
