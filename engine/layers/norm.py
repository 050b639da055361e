"""Root-mean-square norms, as models hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.weights.loader import Weights


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x · weight / rms(x). weight: f32 [n], the factor itself."""

    weight: torch.Tensor
    eps: float


def load_norm(weights: Weights, name: str, size: int, eps: float, zero_centred: bool = False) -> RmsNorm:
    """zero_centred: the checkpoint stores factor − 1 (as Gemma and Qwen3.5 do)."""
    weight = weights.get(f"{name}.weight", size, dtype=torch.float32)
    return RmsNorm(weight + 1.0 if zero_centred else weight, eps)
