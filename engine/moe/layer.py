"""One MoE layer: router, routed experts (all resident, or behind slots), shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from engine.moe.banks import ExpertBank
from engine.moe.offload import ExpertOffload
from engine.moe.router import Router, choose


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense gated MLP. gate_up: [2 · inter, hidden], gate above up. down: [hidden, inter]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Moe:
    """ordinal: this layer's number among the MoE layers. shared: an expert that every token visits, gated by the
    router's last row.

    offload: None where every expert is read in place.
    """

    ordinal: int
    router: Router
    bank: ExpertBank
    shared: Mlp | None = None
    offload: ExpertOffload | None = None


def run_moe(ops: ModuleType, x: torch.Tensor, layer: Moe) -> torch.Tensor:
    """x: [tokens, hidden]. Returns the same shape and dtype; experts are summed in f32."""
    ids, weights, gate = choose(ops, x, layer.router)
    if layer.offload is None:
        out = ops.experts_forward(x, ids, weights, layer.bank.gate_up, layer.bank.down)
    else:
        out = layer.offload.forward(layer.ordinal, x, ids, weights)
    if layer.shared is not None:
        shared = ops.swiglu(x, layer.shared.gate_up, layer.shared.down)
        out = out + shared.float() * torch.sigmoid(gate.float())
    return out.to(x.dtype)
