"""Grouping of pairs by expert, and the experts of many tokens in rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import reference

from .common import DEVICE, DTYPES, close, few, ints, poisoned, randn, spaced
from .test_slot_experts import pool_of, routes

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops


def grouped(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    order, offsets = torch.full((ids.numel(),), -7, dtype=torch.int32, device=DEVICE), ints([-7] * (experts + 1))
    ops.group(ids, experts, order, offsets)
    return order, offsets


@few
@given(
    tokens=st.sampled_from([1, 7, 64, 300, 700]),
    top_k=st.integers(1, 3),
    experts=st.sampled_from([3, 9, 40]),
    holes=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_pairs_are_sorted_by_expert_and_stay_in_order(tokens: int, top_k: int, experts: int, holes: float, seed: int) -> None:
    ids = routes(tokens, top_k, experts, holes, seed)
    order, offsets = grouped(ids, experts)
    flat = ids.flatten().tolist()
    want = [[pair for pair, e in enumerate(flat) if e == expert] for expert in range(experts)]
    edges = offsets.tolist()
    assert edges == [sum(len(w) for w in want[:e]) for e in range(experts + 1)]
    for expert, pairs in enumerate(want):
        assert order[edges[expert] : edges[expert + 1]].tolist() == pairs


@few
@given(
    tokens=st.sampled_from([1, 5, 33]),
    top_k=st.integers(1, 3),
    hidden=st.sampled_from([20, 72]),
    inter=st.sampled_from([8, 40]),
    holes=st.sampled_from([0.0, 0.3]),
    rounds=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
def test_rounds_add_up_to_the_plain_experts(
    dtype: torch.dtype, tokens: int, top_k: int, hidden: int, inter: int, holes: float, rounds: int, seed: int
) -> None:
    """Seven experts of which the rounds bring six into four slots, each round over what the last one held."""
    weights_of = [randn(7, *shape, dtype=dtype, seed=s) / 5 for s, shape in ((1, (2 * inter, hidden)), (2, (hidden, inter)))]
    ids = routes(tokens, top_k, 7, holes, seed)
    order, offsets = grouped(ids, 7)
    x, weights = spaced(randn(tokens, hidden, dtype=dtype)), randn(tokens, top_k, seed=4)
    out = randn(tokens, hidden, seed=5)
    served = torch.full_like(ids, -1)
    want = out.clone()
    for i in range(rounds):
        gate_up, down = pool_of(4, inter, hidden, dtype)
        slot_of = ints([-1] * 7)
        for expert in range(3 * i, 3 * i + 3):
            slot = (expert * 3 + 1) % 4
            slot_of[expert] = slot
            gate_up[slot], down[slot] = weights_of[0][expert], weights_of[1][expert]
            served = torch.where(ids == expert, expert, served)
        inner = poisoned(tokens * top_k, inter, dtype=dtype)
        ops.grouped_experts(x, ids, order, offsets, slot_of, weights, gate_up, down, inner, out)
    want += reference.experts_forward(x.float(), served.int(), weights, weights_of[0].float(), weights_of[1].float())
    close(out, want, dtype)


@pytest.mark.parametrize("mean", [40, 200])
def test_experts_with_many_tokens_take_larger_blocks(mean: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden, inter = mean, 20, 12
    gate_up, down = pool_of(3, inter, hidden, torch.bfloat16)
    ids = routes(tokens, 2, 2, 0.0, 1)
    order, offsets = grouped(ids, 2)
    x, weights, out = randn(tokens, hidden, dtype=torch.bfloat16), randn(tokens, 2), torch.zeros(tokens, hidden, device=DEVICE)
    inner = poisoned(tokens * 2, inter, dtype=torch.bfloat16)
    ops.grouped_experts(x, ids, order, offsets, ints([2, 0]), weights, gate_up, down, inner, out)
    where = torch.where(ids == 0, 2, 0).int()
    close(out, reference.experts_forward(x.float(), where, weights, gate_up.float(), down.float()), torch.bfloat16)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="group"):
        ops.group(ints([[0, 1]]), 4, ints([0]), ints([0] * 5))
