"""Muon for matrices, AdamW for the rest, as plain tensor operations that a CUDA graph can record.

Muon: Jordan et al. 2024; its update is scaled to AdamW's size as in Liu et al. 2025, so that one rate serves both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from examples.demo_model.model import MATRICES, Params

NO_DECAY = (
    "final_norm",
    "norm_in",
    "norm_post",
    "q_norm",
    "k_norm",
    "delta_norm",
    "dt_bias",
    "A_log",
    "conv",
)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices by five Newton-Schulz steps in bf16. matrices: [count, rows, columns]."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    def __init__(self, params: Params, muon: bool = True, decay: float = 0.1, clip: float = 1.0) -> None:
        self.params, self.decay, self.clip = params, decay, clip
        self.matrices = set(MATRICES) if muon else set()
        device = params["embed"].device
        self.rate = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)
        self.first = {name: torch.zeros_like(p) for name, p in params.items()}
        self.second = {name: torch.zeros_like(p) for name, p in params.items() if name not in self.matrices}

    @torch.no_grad()
    def step(self) -> Tensor:
        """Update parameters from their gradients; returns the gradient norm before clipping."""
        self.count += 1
        grads = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        norm = torch.stack([g.float().pow(2).sum() for g in grads.values()]).sum().sqrt()
        scale = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        scale = torch.where(torch.isfinite(norm), scale, 0.0)
        for name, p in self.params.items():
            g = torch.nan_to_num(grads[name]) * scale
            if name in self.matrices:
                self.first[name].lerp_(g, 0.05)
                mixed = g.lerp(self.first[name], 0.95)
                size = self._matrix(name, p)
                update = orthogonalize(mixed.reshape(-1, *size)).reshape(p.shape).float()
                update = update * (0.2 * math.sqrt(max(size)))
            else:
                self.first[name].lerp_(g, 0.1)
                self.second[name].lerp_(g * g, 0.05)
                mean = self.first[name] / (1 - 0.9**self.count)
                square = self.second[name] / (1 - 0.95**self.count)
                update = mean / (square.sqrt() + 1e-10)
            if name not in NO_DECAY:
                p.mul_(1 - self.rate * self.decay)
            p.sub_(update * self.rate)
        return norm

    @staticmethod
    def _matrix(name: str, p: Tensor) -> tuple[int, int]:
        """Rows and columns of one matrix: gate and up projections of an expert are two."""
        return (p.shape[-2] // 2, p.shape[-1]) if name == "gate_up" else (p.shape[-2], p.shape[-1])
