"""What the kernel tests share: random tensors on the device at hand (the CPU, interpreted, where there is none), tolerances."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.budget import examples

pytest.importorskip("triton", reason="needs triton")
from engine.kernels.triton import base

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.bfloat16]
SHARED = [99 * 1024, 227 * 1024] if DEVICE == "cpu" else [base.shared_bytes()]
"""Shared memory that block sizes are chosen by: interpreted, of both classes of devices."""
few = settings(max_examples=examples(4, 8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output that shows what was not written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same values as a view whose rows lie further apart."""
    wide = x.new_full((x.shape[0], x.shape[1] + 5), float("nan"))
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Within a few roundings of the type, relative to the tensor's largest value."""
    assert got.shape == want.shape
    assert not got.isnan().any()
    tolerance = factor * (2e-5 if dtype == torch.float32 else 1.6e-2) * max(1.0, want.abs().max().item())
    worst = (got.float() - want.float()).abs().max().item() if got.numel() else 0.0
    assert worst <= tolerance, f"off by {worst}, allowed {tolerance}"
