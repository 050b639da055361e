"""Rotary position embedding: reads the parameters of a config, gives cosines and sines by position.

Kinds: default, linear, yarn. Others are refused by name. Multimodal section parameters (mrope) need no code: text tokens have
the same position in all three sections, for which mrope is plain rope.
Source: modeling_rope_utils in transformers; YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import CheckpointError, Unsupported

_BLOCK = 1024


class RopeTable:
    """cos and sin, f32 [positions, r], grown in whole blocks so that an entry never depends on how far the table reaches."""

    def __init__(self, inverse_frequencies: torch.Tensor, scale: float, description: str) -> None:
        self.description = description
        self._inverse = inverse_frequencies
        self._scale = scale
        self._cos: list[torch.Tensor] = []
        self._sin: list[torch.Tensor] = []
        self.cos = torch.empty(0, len(inverse_frequencies))
        self.sin = torch.empty(0, len(inverse_frequencies))

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated, 2·r."""
        return 2 * len(self._inverse)

    def reach(self, positions: int) -> None:
        """Make the table cover positions 0 … positions − 1."""
        if positions <= len(self.cos):
            return
        while _BLOCK * len(self._cos) < positions:
            start = _BLOCK * len(self._cos)
            angles = torch.arange(start, start + _BLOCK, dtype=torch.float32)[:, None] * self._inverse
            self._cos.append(angles.cos() * self._scale)
            self._sin.append(angles.sin() * self._scale)
        device = self.cos.device
        self.cos, self.sin = torch.cat(self._cos).to(device), torch.cat(self._sin).to(device)

    def move(self, device: torch.device) -> None:
        """Keep cos and sin there from now on."""
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)


def rope_table(config: Mapping[str, Any], head_dim: int, partial_default: float = 1.0) -> RopeTable:
    """Build the table that `config` (config.json's text part) describes.

    Reads rope_parameters (transformers ≥ 5) or rope_scaling with rope_theta and partial_rotary_factor beside it.
    Raises Unsupported for a kind not listed above, CheckpointError for a missing parameter.
    """
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(given.get("rope_type") or given.get("type") or "default")
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotated = int(head_dim * float(partial_default if partial is None else partial))
    powers = theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    scale = 1.0
    if kind in ("default", "mrope"):
        inverse = 1.0 / powers
    elif kind == "linear":
        inverse = 1.0 / powers / _factor(given, kind)
    elif kind == "yarn":
        original = int(given.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 0)
        inverse, scale = _yarn(given, powers, rotated, theta, original)
    else:
        raise Unsupported(f"rope kind {kind!r}; supported: default, linear, yarn")
    keys = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale")
    details = "".join(f" {key}={given[key]}" for key in keys if given.get(key) is not None)
    return RopeTable(inverse, scale, f"{kind} theta={theta} rotated={rotated}{details}")


def _factor(given: Mapping[str, Any], kind: str) -> float:
    if given.get("factor") is None:
        raise CheckpointError(f"config.json: rope kind {kind!r} needs a factor")
    return float(given["factor"])


def _yarn(
    given: Mapping[str, Any], powers: torch.Tensor, rotated: int, theta: float, original: int
) -> tuple[torch.Tensor, float]:
    factor = _factor(given, "yarn")

    def correction(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = correction(given.get("beta_fast") or 32), correction(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(rotated // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = interpolated / (factor * powers) + (1 - interpolated) / powers
    scale = given.get("attention_factor")
    if scale is None:
        mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
        scale = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return inverse, float(scale)
