"""The router's choice against the plain one, ties and padding included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import reference

from .common import DEVICE, DTYPES, close, few, ints, poisoned

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops


@few
@given(rows=st.integers(1, 5), n=st.integers(1, 300), k=st.integers(1, 8), normalize=st.booleans(), padded=st.booleans())
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
def test_route_picks_the_best_experts(dtype: torch.dtype, rows: int, n: int, k: int, normalize: bool, padded: bool) -> None:
    k = min(k, n)
    logits = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(r)) for r in range(rows)]) * 0.125
    scores = torch.cat([logits, torch.full((rows, 1), 1e6)], 1).to(dtype).to(DEVICE)  # the shared expert's gate behind them
    live = ints([5, -1, 0, -1, 2][:rows]) if padded else None
    ids, weights = ints([[77] * k] * rows), poisoned(rows, k)
    ops.route(scores, n, normalize, live, ids, weights)
    # Scores that one type cannot tell apart are a tie: the lower expert first.
    p = torch.softmax(scores[:, :n].float(), -1)
    want_ids = torch.sort(p, dim=-1, descending=True, stable=True).indices[:, :k].int()
    want = torch.gather(p, 1, want_ids.long())
    want = want / want.sum(-1, keepdim=True) if normalize else want
    if live is not None:
        want_ids, want = torch.where((live < 0)[:, None], -1, want_ids), torch.where((live < 0)[:, None], 0.0, want)
    assert torch.equal(ids, want_ids)
    close(weights, want, torch.float32)


def test_without_ties_the_choice_is_the_references() -> None:
    scores = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(r)) for r in range(9)]).to(DEVICE) * 0.1
    ids, weights = ints([[0] * 8] * 9), poisoned(9, 8)
    ops.route(scores, 64, True, None, ids, weights)
    want_ids, want = reference.route(scores, 8, True)
    assert torch.equal(ids, want_ids)
    close(weights, want, torch.float32)


def test_weights_that_underflow_still_name_distinct_experts() -> None:
    ids, weights = ints([[0, 0, 0]]), poisoned(1, 3)
    ops.route(torch.tensor([[0.0, 500.0, 0.0, 0.0]], device=DEVICE), 4, True, None, ids, weights)
    assert ids.tolist() == [[1, 0, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
