"""What attention needs before it can attend, in one launch: per-head norms of q and k, rotation, keys and values into pages.

Rounds where the plain path rounds: after the norm and after the rotation, to the model's dtype.
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
def _normed(source, weight, at, inside, rstd):
    x = tl.load(source + at, mask=inside, other=0.0)
    return (x.to(tl.float32) * rstd * tl.load(weight + at, mask=inside, other=0.0)).to(x.dtype).to(tl.float32)


@triton.jit
def _attend_prepare(
    projected, q_weight, k_weight, eps, cos, sin, positions, slots, k_pool, v_pool, q_out,
    p_row, c_row, page, k_page, v_page, q_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DP)
    inside = at < D
    row = projected + token * p_row
    is_q = head < HEADS
    kv_head = tl.maximum(head - HEADS, 0)
    source = row + tl.where(is_q, head * PER_HEAD, HEADS * PER_HEAD + kv_head * D)
    weight = q_weight
    if not is_q:
        weight = k_weight
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    mine = _normed(source, weight, at, inside, rstd)
    # Dimension i < R turns with i + R; what lies behind 2·R stays.
    turned = at < 2 * R
    partner = tl.where(at < R, at + R, tl.where(turned, at - R, at))
    other = _normed(source, weight, partner, inside, rstd)
    position = tl.maximum(tl.load(positions + token), 0).to(tl.int64)
    angle = tl.where(at < R, at, at - R)
    c = tl.load(cos + position * c_row + angle, mask=turned, other=1.0)
    s = tl.load(sin + position * c_row + angle, mask=turned, other=0.0)
    y = mine * c + tl.where(at < R, -other, other) * s
    if is_q:
        tl.store(q_out + token * q_row + head * D + at, y.to(q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        stored = at < tl.where(slot >= 0, D, 0)
        place = ((slot % page) * KV_HEADS + kv_head) * D + at
        tl.store(k_pool + (slot // page) * k_page + place, y.to(k_pool.dtype.element_ty), mask=stored)
        v = tl.load(row + HEADS * PER_HEAD + (KV_HEADS + kv_head) * D + at, mask=inside, other=0.0)
        tl.store(v_pool + (slot // page) * v_page + place, v.to(v_pool.dtype.element_ty), mask=stored)


def attend_prepare(
    projected: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    q_out: torch.Tensor,
    gated: bool,
) -> None:
    """q_out = rope(norm(q)); rope(norm(k)) and v into the pools.

    projected: [T, n], per head q (then its gate if gated), then key heads, then value heads. q_weight, k_weight: f32 [d].
    cos, sin: f32 [positions, r], 2·r ≤ d. positions: int32 [T], negative = padding, taken as 0. slots: int32 [T], page ·
    page_size + offset, negative = stored nowhere. pools: [pages, page_size, kv_heads, d], any stride of the pages.
    q_out: [T, heads, d].
    """
    tokens, heads, d = q_out.shape
    kv_heads, per_head = k_pool.shape[2], 2 * d if gated else d
    if projected.shape != (tokens, heads * per_head + 2 * kv_heads * d) or k_pool.shape[1:] != v_pool.shape[1:]:
        raise ShapeMismatch(f"attend_prepare: projected {list(projected.shape)} for {heads}+{kv_heads} heads of {d}")
    launch(_attend_prepare, (tokens, heads + kv_heads), 
        projected, q_weight, k_weight, eps, cos, sin, positions, slots, k_pool, v_pool, q_out,
        projected.stride(0), cos.stride(0), k_pool.shape[1], k_pool.stride(0), v_pool.stride(0), q_out.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, D=d, DP=config.power(d), R=cos.shape[1], PER_HEAD=per_head,
        num_warps=config.row_warps(d),
    )  # fmt: skip
