"""The router's choice: softmax over all experts, the best k of them, their weights.

One block a token: f32 softmax by one tree over the experts, then k rounds of arg max. Equal scores: the lower expert first.
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
def _route(
    scores, live, ids, weights, experts, s_row, TOP_K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr,
    NORMALIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, EP), tl.arange(0, KP)
    x = tl.load(scores + token * s_row + e, mask=e < experts, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 0))
    p = p / tl.sum(p, 0)
    # A weight may underflow to zero; a number below that marks experts that are taken or absent.
    left = tl.where(e < experts, p, -1.0)
    chosen = tl.zeros((KP,), tl.int32)
    weight = tl.zeros((KP,), tl.float32)
    for j in tl.static_range(TOP_K):
        top = tl.argmax(left, 0, tie_break_left=True)
        chosen = tl.where(k == j, top, chosen)
        weight = tl.where(k == j, tl.max(left, 0), weight)
        left = tl.where(e == top, -1.0, left)
    if NORMALIZE:
        weight = weight / tl.sum(weight, 0)
    if PADDED:
        dead = tl.load(live + token) < 0
        chosen = tl.where(dead, -1, chosen)
        weight = tl.where(dead, 0.0, weight)
    tl.store(ids + token * TOP_K + k, chosen, mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, weight, mask=k < TOP_K)


def route(
    scores: torch.Tensor, experts: int, normalize: bool, live: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    """The top experts of each token, best first.

    scores: [T, ≥ experts]; what lies behind the experts' columns is ignored. live: int32 [T] or None; where negative, ids are
    −1 and weights zero. ids: int32 [T, k]. weights: f32 [T, k], their sum one if `normalize`.
    """
    tokens, top_k = ids.shape
    if scores.shape[0] != tokens or weights.shape != ids.shape or not top_k <= experts <= scores.shape[1]:
        raise ShapeMismatch(f"route of {list(scores.shape)} over {experts} experts into {list(ids.shape)}")
    if not (ids.is_contiguous() and weights.is_contiguous()):
        raise ShapeMismatch("route writes contiguous ids and weights")
    launch(
        _route, (tokens,), scores, ids if live is None else live, ids, weights, experts, scores.stride(0),
        TOP_K=top_k, KP=config.power(top_k), EP=config.power(experts), NORMALIZE=normalize, PADDED=live is not None,
        num_warps=1 if experts <= 256 else 4,
    )  # fmt: skip
