"""The token that is probably drawn from each row: against torch where it is the largest, else against the host's sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import plain
from engine.sampling import Sampler, uniform
from engine.types import SamplingParams

from .common import DEVICE, few, ints, randn, spaced

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops
from engine.kernels.triton import config

SETS = pytest.mark.parametrize("kernels", [ops, plain], ids=["triton", "plain"])
GREEDY = (0.0, 0, 1.0, 0.0, 0.5)


def settings_of(rows: list[tuple[float, ...]]) -> torch.Tensor:
    """f32 [6, rows + 1]: the number in two parts, and a row too many."""
    columns = [(*row[:4], float(np.float32(row[4])), row[4] - float(np.float32(row[4]))) for row in (*rows, (9.0,) * 5)]
    return torch.tensor(columns, dtype=torch.float32).T.contiguous().to(DEVICE)


def guessed(kernels, logits: torch.Tensor, draws: list[tuple[float, ...]] | None = None) -> list[int]:
    """Of a fifth step: in its own half of what the host reads, and nowhere else, and where the next step finds it."""
    rows = len(logits)
    guesses, found = ints([-7] * (rows + 2)), ints([[-7] * (rows + 3)] * 2)
    kernels.guess(logits, settings_of(draws or [GREEDY] * rows), ints([5]), guesses, found)
    assert found[0].tolist() == [-7] * (rows + 3)
    assert found[1].tolist() == [*guesses.tolist()[:rows], -7, -7, -7]
    assert guesses.tolist()[rows:] == [-7, -7]
    return guesses.tolist()[:rows]


@SETS
@few
@given(rows=st.integers(1, 4), n=st.integers(1, 3000), levels=st.sampled_from([1, 2, 7, 1000]), seed=st.integers(0, 9))
@example(rows=2, n=1024, levels=3, seed=0)
@example(rows=2, n=2049, levels=1, seed=0)
def test_the_lowest_of_the_largest(kernels, rows: int, n: int, levels: int, seed: int) -> None:
    """Few levels: the largest value comes many times, in several blocks."""
    logits = spaced((randn(rows, n, seed=seed) * levels).round().clamp(-levels, levels) - levels - 1)
    for row, got in zip(logits.cpu().tolist(), guessed(kernels, logits), strict=True):
        assert got == row.index(max(row))


@SETS
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 127, 128, 1499])
def test_a_row_that_is_not_finite_has_none_and_leaves_the_others_theirs(kernels, value: float, at: int, temperature) -> None:
    logits = randn(3, 1500)
    want = guessed(kernels, logits, [GREEDY, (temperature, 0, 1.0, 0.0, 0.5), GREEDY])
    logits[1, at] = value
    assert guessed(kernels, logits, [GREEDY, (temperature, 0, 1.0, 0.0, 0.5), GREEDY]) == [want[0], -1, want[2]]
    logits[:] = value
    assert guessed(kernels, logits, [GREEDY, (temperature, 5, 1.0, 0.0, 0.5), GREEDY]) == [-1, -1, -1]


@SETS
def test_the_largest_numbers_there_are_still_count_as_finite(kernels) -> None:
    """Their sum is infinite."""
    most = torch.finfo(torch.float32).max
    logits = torch.full((2, 3000), most, device=DEVICE)
    logits[1] = -most
    logits[1, 2999] = math.nextafter(-most, 0.0) / 2
    assert guessed(kernels, logits) == [0, 2999]


def near(logits: torch.Tensor, params: SamplingParams, seed: int, index: int) -> tuple[int, set[int]]:
    """What the host draws, and what it would draw for numbers that differ by what sums of float32 do."""
    sampler = Sampler(params, np.arange(1), len(logits))
    u = uniform(seed, index)
    drawn = [sampler._draw(logits.cpu(), min(max(0.0, u + off), math.nextafter(1.0, 0.0))) for off in (0.0, -3e-6, 3e-6)]
    return drawn[0], set(drawn)


@SETS
@few
@given(
    n=st.sampled_from([1, 2, 33, 300, 513, 3000]),
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 1.7, 1e30]),
    top_k=st.sampled_from([0, 1, 5, 20, 64, 100_000]),
    top_p=st.sampled_from([1e-300, 0.3, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    spread=st.sampled_from([2.0, 6.0]),
    seed=st.integers(0, 1 << 30),
)
@example(n=4000, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, spread=2.0, seed=4)
@example(n=4000, temperature=1.0, top_k=0, top_p=1.0, min_p=0.05, spread=2.0, seed=5)
@example(n=4000, temperature=0.7, top_k=0, top_p=0.9, min_p=0.0, spread=6.0, seed=6)
@example(n=4000, temperature=1.0, top_k=64, top_p=0.95, min_p=0.0, spread=2.0, seed=7)
def test_what_the_host_will_draw(kernels, n, temperature, top_k, top_p, min_p, spread, seed) -> None:
    """The host's own numbers, of several draws of one request, beside a row that is greedy."""
    params = SamplingParams(9, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = spaced(randn(3, n, seed=seed) * spread)
    draws = [(temperature, top_k, top_p, min_p, uniform(seed, index)) for index in range(2)]
    got = guessed(kernels, logits, [*draws, GREEDY])
    assert got[2] == int(logits[2].argmax())
    for index in range(2):
        # What is left of the nucleus after top-k is small, or it would be wider than the kernel looks.
        wide = (
            kernels is ops and n > config.GUESS_MOST and not 0 < top_k < n and nucleus(logits[index], temperature, top_p) > 60
        )
        drawn, allowed = near(logits[index], params, seed, index)
        assert got[index] in allowed or wide, (drawn, got[index])


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> int:
    """Tokens in it, 0 if top-p is off."""
    p = (logits.cpu().double() / temperature).softmax(-1).sort(descending=True).values
    return int((p.cumsum(0) - p < top_p).sum()) if top_p < 1.0 else 0


@SETS
def test_nearly_every_draw_is_guessed_also_from_flat_rows_and_where_what_is_frequent_lies_together(kernels) -> None:
    """Logits as a trained model has them: few ids far above the others, and those that are frequent side by side."""
    n, rows = 4100, 3
    rank = torch.arange(n, dtype=torch.float32)
    logits = (randn(rows, n, seed=3).cpu() - 0.001 * rank).to(DEVICE)
    logits[:, :40] += 6.0
    for top_k, top_p in ((20, 0.95), (0, 0.9), (0, 1.0)):
        params = SamplingParams(9, temperature=0.6, top_k=top_k, top_p=top_p, seed=1)
        got = guessed(kernels, logits, [(0.6, top_k, top_p, 0.0, uniform(1, index)) for index in range(rows)])
        sampler = Sampler(params, np.arange(1), n)
        assert got == [sampler._draw(logits[index].cpu(), uniform(1, index)) for index in range(rows)]
    flat = torch.zeros(rows, n, device=DEVICE)
    got = guessed(kernels, flat, [(1.0, 0, 1.0, 0.0, uniform(2, index)) for index in range(rows)])
    sampler = Sampler(SamplingParams(9, seed=2), np.arange(1), n)
    assert got == [sampler._draw(flat[index].cpu(), uniform(2, index)) for index in range(rows)]


def test_a_nucleus_that_is_wider_than_what_is_picked_is_guessed_by_its_best_part() -> None:
    logits = randn(4, 4000, seed=8) * 1.2
    params = SamplingParams(9, top_p=0.9, seed=4)
    assert nucleus(logits[0], 1.0, 0.9) > 2 * config.GUESS_MOST
    got = guessed(ops, logits, [(1.0, 0, 0.9, 0.0, uniform(4, index) / 6) for index in range(4)])
    sampler = Sampler(params, np.arange(1), 4000)
    want = [sampler._draw(logits[index].cpu(), uniform(4, index) / 6) for index in range(4)]
    assert sum(a == b for a, b in zip(got, want, strict=True)) >= 3


def test_a_result_of_another_length_is_refused() -> None:
    for draws, guesses in ((settings_of([GREEDY] * 2), ints([0])), (settings_of([GREEDY] * 2)[:5], ints([0, 0]))):
        with pytest.raises(ShapeMismatch, match="guess"):
            ops.guess(randn(2, 8), draws, ints([0]), guesses, ints([[0] * 3] * 2))
