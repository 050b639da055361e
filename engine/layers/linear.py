"""A weight matrix with its bias, as models hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.weights.loader import Weights


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x · weightᵀ + bias. weight: [n, k]. bias: [n] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


def load_linear(weights: Weights, name: str, rows: int, columns: int, bias: bool = False) -> Linear:
    return Linear(weights.get(f"{name}.weight", rows, columns), weights.get(f"{name}.bias", rows) if bias else None)


def load_stacked(weights: Weights, prefix: str, parts: tuple[tuple[str, int], ...], columns: int, bias: bool = False) -> Linear:
    """Several projections of the same input as one matrix, in the order given. parts: (name, rows)."""
    weight = torch.cat([weights.get(f"{prefix}.{name}.weight", rows, columns) for name, rows in parts])
    if not bias:
        return Linear(weight)
    return Linear(weight, torch.cat([weights.get(f"{prefix}.{name}.bias", rows) for name, rows in parts]))
