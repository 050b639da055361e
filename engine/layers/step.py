"""The operations that a model is written in. A model calls them in order; a step decides how they run.

Two kinds of step: eager.py computes at once with torch; program.py records them once and replays them as one native call.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.attention.base import Attention
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.moe.layer import Mlp, Moe


class Step(Protocol):
    """One forward pass over a flat batch. Values (`x`, results) are [tokens, n] and belong to the step: opaque to models."""

    def embed(self, table: torch.Tensor) -> Any:
        """Rows of table [vocab, hidden] for the batch's tokens."""
        ...

    def norm(self, x: Any, norm: RmsNorm) -> Any: ...

    def attention(self, x: Any, layer: Attention) -> Any:
        """Project, store keys and values, attend, project back: [tokens, hidden] to [tokens, hidden]."""
        ...

    def delta(self, x: Any, layer: GatedDelta) -> Any:
        """Likewise for a gated-delta layer; advances the state rows and fills the cuts."""
        ...

    def mlp(self, x: Any, layer: Mlp) -> Any: ...

    def moe(self, x: Any, layer: Moe) -> Any: ...

    def add(self, x: Any, y: Any) -> Any:
        """Residual sum. x is not used again."""
        ...

    def outputs(self, x: Any) -> Any:
        """Keep only the rows whose logits are wanted; later operations run on those alone."""
        ...

    def logits(self, x: Any, head: Linear) -> torch.Tensor:
        """f32 [rows, vocab]. Ends the step."""
        ...
