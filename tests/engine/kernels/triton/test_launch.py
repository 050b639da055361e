"""Launches after the first of a kind go to the compiled kernel, with every argument in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from engine.kernels.triton import base
from engine.kernels.triton.base import Launches

STREAM = 77


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def run(self, x: int, y: int, z: int, stream: int, function: str, metadata: str, *rest: Any) -> None:
        assert (stream, function, metadata, rest[:3]) == (STREAM, "function", "metadata", (None, None, None))
        self._log.append(((x, y, z), rest[3:]))


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(base, "_current_stream", lambda: lambda: STREAM)


class Kernel:
    """As much of Triton's as launching asks for."""

    arg_names = ("x", "n", "scale", "DEPTH", "FIRST")

    def __init__(self) -> None:
        self.bound: list[dict[str, object]] = []
        self.direct: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: object, **options: object) -> Compiled:
            self.bound.append(options)
            return Compiled(self.direct)

        return run


def test_the_second_launch_of_a_kind_is_direct_and_complete():
    kernel, launches, x = Kernel(), Launches(), torch.zeros(64)
    for n in (32, 48):
        launches(kernel, (2, 3), x, n, 0.5, FIRST=True, DEPTH=16, num_warps=4)
    assert len(kernel.bound) == 1
    assert kernel.direct == [((2, 3, 1), (x, 48, 0.5, 16, True))]


@pytest.mark.parametrize("n", [1, 2, 17, 2**31, 2**63])
def test_arguments_that_could_be_specialized_differently_are_bound_again(n):
    kernel, launches, x = Kernel(), Launches(), torch.zeros(64)
    launches(kernel, (1,), x, 32, 0.5, DEPTH=16, FIRST=True)
    launches(kernel, (1,), x, n, 0.5, DEPTH=16, FIRST=True)
    assert len(kernel.bound) == 2
    assert not kernel.direct


def test_pointers_types_and_constants_are_told_apart():
    kernel, launches, x = Kernel(), Launches(), torch.zeros(64)
    launches(kernel, (1,), x, 32, 0.5, DEPTH=16, FIRST=True)
    for other in (x[1:], x.half(), 7):
        launches(kernel, (1,), other, 32, 0.5, DEPTH=16, FIRST=True)
    launches(kernel, (1,), x, 32, 0.5, DEPTH=32, FIRST=True)
    launches(kernel, (1,), x, 32, 0.5, DEPTH=16, FIRST=False)
    launches(kernel, (1,), x, 32, 0.5, DEPTH=16, FIRST=True, num_warps=8)
    assert len(kernel.bound) == 7
    launches(kernel, (1,), x, 64, 0.25, DEPTH=16, FIRST=True)
    assert kernel.direct == [((1, 1, 1), (x, 64, 0.25, 16, True))]
