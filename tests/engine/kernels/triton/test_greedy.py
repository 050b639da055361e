"""The best token of each row, against torch and against the plain kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import plain

from .common import DEVICE, few, ints, randn, spaced

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops

SETS = pytest.mark.parametrize("kernels", [ops, plain], ids=["triton", "plain"])


def best_of(kernels, logits: torch.Tensor) -> list[int]:
    """Of a fifth step: in its own half of what the host reads, and nowhere else, and where the next step finds it."""
    rows = len(logits)
    best, found = ints([-7] * (rows + 2)), ints([[-7] * (rows + 3)] * 2)
    kernels.greedy(logits, ints([5]), best, found)
    assert found[0].tolist() == [-7] * (rows + 3)
    assert found[1].tolist() == [*best.tolist()[:rows], -7, -7, -7]
    assert best.tolist()[rows:] == [-7, -7]
    return best.tolist()[:rows]


@SETS
@few
@given(rows=st.integers(1, 4), n=st.integers(1, 5000), levels=st.sampled_from([1, 2, 7, 1000]), seed=st.integers(0, 9))
@example(rows=2, n=2048, levels=3, seed=0)
@example(rows=2, n=4097, levels=1, seed=0)
def test_the_lowest_of_the_largest(kernels, rows: int, n: int, levels: int, seed: int) -> None:
    """Few levels: the largest value comes many times, in several blocks."""
    logits = spaced((randn(rows, n, seed=seed) * levels).round().clamp(-levels, levels) - levels - 1)
    for row, got in zip(logits.cpu().tolist(), best_of(kernels, logits), strict=True):
        assert got == row.index(max(row))


@SETS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2047, 2048, 4999])
def test_a_row_that_is_not_finite_has_none_and_leaves_the_others_theirs(kernels, value: float, at: int) -> None:
    logits = randn(3, 5000)
    logits[1, at] = value
    assert best_of(kernels, logits) == [int(logits[0].argmax()), -1, int(logits[2].argmax())]


@SETS
def test_the_largest_numbers_there_are_still_count_as_finite(kernels) -> None:
    """Their sum is infinite."""
    most = torch.finfo(torch.float32).max
    logits = torch.full((2, 3000), most, device=DEVICE)
    logits[1] = -most
    logits[1, 2999] = math.nextafter(-most, 0.0) / 2
    assert best_of(kernels, logits) == [0, 2999]


def test_a_result_of_another_length_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="greedy"):
        ops.greedy(randn(2, 8), ints([0]), ints([0]), ints([[0] * 3] * 2))
