"""A stack of decoder layers: what an architecture's file fills in, and the one order in which a step runs it.

Every architecture here is "norm, mix tokens, add, norm, mix channels, add"; which mixers, which norms and how the
checkpoint names them is said in its own file.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import Attention
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rope import RopeTable
from engine.layers.step import Step
from engine.models.base import LayerSpec, ModelSpec
from engine.moe.layer import Mlp, Moe


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    mixer_norm: RmsNorm
    mixer: Attention | GatedDelta
    mlp_norm: RmsNorm
    mlp: Mlp | Moe


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights of a whole text model, and its description. embedding: [vocab, hidden]. head: to the vocabulary."""

    spec: ModelSpec
    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    head: Linear
    rope: RopeTable

    def run(self, step: Step) -> torch.Tensor:
        """One forward pass. Returns logits f32 [wanted rows, vocab]."""
        stages = self.stages(step)
        while True:
            try:
                next(stages)
            except StopIteration as end:
                return end.value

    def stages(self, step: Step) -> Generator[int, None, torch.Tensor]:
        """The same, layer by layer: yields the index of each layer that is done, and returns the logits.

        The last layer's channel mixer runs only where logits are wanted: nothing else reads its output.
        """
        x: Any = step.embed(self.embedding)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            h = step.norm(x, layer.mixer_norm)
            if isinstance(layer.mixer, Attention):
                h = step.attention(h, layer.mixer)
            else:
                h = step.delta(h, layer.mixer)
            x = step.add(x, h)
            if index == last:
                x = step.outputs(x)
            h = step.norm(x, layer.mlp_norm)
            h = step.moe(h, layer.mlp) if isinstance(layer.mlp, Moe) else step.mlp(h, layer.mlp)
            x = step.add(x, h)
            yield index
        return step.logits(step.norm(x, self.norm), self.head)


def layer_specs(kinds: list[str], moe: list[bool]) -> tuple[LayerSpec, ...]:
    """Number the layers within their kinds ("attention", "delta")."""
    counts = {"attention": 0, "delta": 0}
    specs = []
    for index, (kind, is_moe) in enumerate(zip(kinds, moe, strict=True)):
        assert kind == "attention" or kind == "delta"
        specs.append(LayerSpec(index, kind, counts[kind], is_moe))
        counts[kind] += 1
    return tuple(specs)
