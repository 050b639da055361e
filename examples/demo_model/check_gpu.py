"""Compares the Triton operators with the plain ones on a CUDA device, at the sizes of training.

python -m examples.demo_model.check_gpu
"""

from __future__ import annotations

import torch

from examples.demo_model.delta import CHUNK, scan, scan_grad, unit_inverse


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double().cpu() - want.double()).norm() / want.double().norm()).item()


def main() -> None:
    torch.manual_seed(0)
    lower = torch.randn(64, 8, CHUNK, CHUNK).tril(-1) * 0.2
    print(f"unit_inverse {relative(unit_inverse(lower.cuda()), unit_inverse(lower.double())):.2e}")
    tensors = [torch.randn(64, 8, CHUNK, 32) * 0.2 for _ in range(4)]
    tensors += [torch.randn(64, 8, CHUNK, CHUNK) * 0.2, torch.rand(64, 8)]
    grad = torch.randn(64, 8, CHUNK, 32)
    wide = [t.double() for t in tensors]
    want, states = scan(*wide, 32)
    got, mine = scan(*(t.cuda() for t in tensors), 32)
    print(f"scan {relative(got, want):.2e} states {relative(mine, states):.2e}")
    plain = scan_grad(grad.double(), *wide, states, 32)
    fast = scan_grad(grad.cuda(), *(t.cuda() for t in tensors), mine, 32)
    for name, a, b in zip(("u", "w", "q", "k", "attn", "decay"), fast, plain, strict=True):
        print(f"grad {name} {relative(a, b):.2e}")


if __name__ == "__main__":
    main()
