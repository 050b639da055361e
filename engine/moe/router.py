"""Chooses experts for tokens: scores, softmax, top-k, and the shared expert's gate that rides in the same matrix."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from engine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Router:
    """weight: [experts (+ 1), hidden]; the extra row, if `shared_gate`, scores the shared expert.

    normalize: chosen weights are divided by their sum.
    """

    scores: Linear
    experts: int
    top_k: int
    normalize: bool
    shared_gate: bool


def choose(ops: ModuleType, x: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x: [tokens, hidden]. Returns ids int32 [tokens, top_k], weights f32 [tokens, top_k], shared gate [tokens, 0 or 1]."""
    scores = ops.linear(x, router.scores.weight, router.scores.bias)
    ids, weights = ops.route(scores[:, : router.experts], router.top_k, router.normalize)
    return ids, weights, scores[:, router.experts :]
