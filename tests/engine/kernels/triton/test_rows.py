"""Norms, sums, gathers and small dense products against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import reference

from .common import DTYPES, close, few, ints, poisoned, randn, spaced

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops


@pytest.fixture(params=DTYPES, ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@few
@given(rows=st.integers(1, 6), n=st.integers(1, 300), add=st.booleans(), wide=st.booleans())
def test_add_norm_updates_the_residual_and_norms_the_sum(dtype: torch.dtype, rows: int, n: int, add: bool, wide: bool) -> None:
    residual = spaced(randn(rows, n, dtype=torch.float32 if wide else dtype))
    delta = spaced(randn(rows, n, dtype=dtype, seed=1)) if add else None
    weight, out = randn(n, seed=2), spaced(poisoned(rows, n, dtype=dtype))
    total = residual.float() if delta is None else residual.float() + delta.float()
    ops.add_norm(residual, delta, weight, 1e-6, out)
    close(residual, total, residual.dtype)
    close(out, reference.rms_norm(total, weight, 1e-6), dtype)


@few
@given(tokens=st.integers(1, 9), heads=st.integers(1, 5), n=st.integers(1, 140))
def test_gated_norm(dtype: torch.dtype, tokens: int, heads: int, n: int) -> None:
    x, gate = randn(tokens, heads, n), spaced(randn(tokens, heads * n, dtype=dtype, seed=1)).unflatten(1, (heads, n))
    weight, out = randn(n, seed=2), poisoned(tokens, heads, n, dtype=dtype)
    ops.gated_norm(x, gate, weight, 1e-6, out)
    close(out, reference.rms_norm(x.to(dtype), weight, 1e-6, gate), dtype)


@few
@given(rows=st.integers(1, 5), n=st.integers(1, 1200))
def test_gather_takes_rows_and_zeros_for_padding(dtype: torch.dtype, rows: int, n: int) -> None:
    table, ids = randn(7, n, dtype=dtype), ints([-1, 6, 0, 3, 3][:rows])
    out = poisoned(rows, n)
    ops.gather(table, ids, out)
    assert torch.equal(out, table.float()[ids.long().clamp(min=0)] * (ids >= 0)[:, None])


@few
@given(rows=st.integers(1, 5), n=st.integers(1, 700))
def test_silu_mul(dtype: torch.dtype, rows: int, n: int) -> None:
    both, out = spaced(randn(rows, 2 * n, dtype=dtype)), poisoned(rows, n, dtype=dtype)
    ops.silu_mul(both, out)
    wide = both.float()
    close(out, torch.nn.functional.silu(wide[:, :n]) * wide[:, n:], dtype)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("cpu_experts", "fault", "counted"), [(0, 0, False), (2, 0, True), (2, 1, False)])
def test_merge_adds_the_cpu_part_only_where_there_is_one(
    dtype: torch.dtype, shared: bool, cpu_experts: int, fault: int, counted: bool
) -> None:
    residual, out, box = (randn(3, 600, seed=s) for s in (0, 1, 2))
    if not counted:
        box.fill_(float("nan"))
    dense, scores = randn(3, 600, dtype=dtype, seed=3), randn(3, 9, seed=4)
    want = residual + out + (box if counted else 0)
    if shared:
        want = want + torch.sigmoid(scores[:, 8:]) * dense.float()
    part = (dense, scores[:, 8:]) if shared else (None, None)
    ops.merge(residual, out, box, ints([0, cpu_experts, 0, 0]), ints([fault, 0, 0, 0]), *part)
    close(residual, want, torch.float32)


def test_merge_without_a_cpu_part(dtype: torch.dtype) -> None:
    residual, out = randn(2, 30), randn(2, 30, seed=1)
    want = residual + out
    ops.merge(residual, out, None, None, None, None, None)
    close(residual, want, torch.float32)


@few
@given(
    m=st.sampled_from([1, 2, 16, 17, 64, 70]),
    n=st.integers(1, 60),
    k=st.sampled_from([1, 33, 64, 1025]),
    biased=st.booleans(),
    wide=st.booleans(),
)
def test_linear(dtype: torch.dtype, m: int, n: int, k: int, biased: bool, wide: bool) -> None:
    x, weight = spaced(randn(m, k, dtype=dtype)), randn(n, k, dtype=dtype, seed=1) / k**0.5
    bias = randn(n, dtype=dtype, seed=2) if biased else None
    out = poisoned(m, n, dtype=torch.float32 if wide else dtype)
    ops.linear(x, weight, bias, out)
    want = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    close(out, want, torch.float32 if wide and m <= 64 else dtype)


def test_linear_of_a_tall_matrix_covers_every_row(dtype: torch.dtype) -> None:
    x, weight = randn(1, 40, dtype=dtype), randn(2051, 40, dtype=dtype, seed=1)
    out = poisoned(1, 2051)
    ops.linear(x, weight, None, out)
    close(out, x.float() @ weight.float().t(), torch.float32)


def test_shapes_that_do_not_fit_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ShapeMismatch, match="linear"):
        ops.linear(randn(2, 8), randn(4, 9), None, randn(2, 4))
    with pytest.raises(ShapeMismatch, match="silu_mul"):
        ops.silu_mul(randn(2, 8), randn(2, 5))


@few
@given(
    tokens=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    d=st.sampled_from([8, 20, 64]),
    part=st.sampled_from([1, 2, 4]),
    gated=st.booleans(),
    page=st.sampled_from([1, 4, 16]),
)
def test_attend_prepare_norms_rotates_and_stores(
    dtype: torch.dtype, tokens: int, kv_heads: int, group: int, d: int, part: int, gated: bool, page: int
) -> None:
    heads, r = kv_heads * group, d // part // 2
    per_head = 2 * d if gated else d
    projected = spaced(randn(tokens, heads * per_head + 2 * kv_heads * d, dtype=dtype))
    weights = [randn(d, seed=s) for s in (1, 2)]
    angles = randn(40, r, seed=3) * 3
    positions, slots = ints([5, 39, -1, 0][:tokens]), ints([7, 3, -1, 15][:tokens])
    memory = randn(2, 16, 3, page * kv_heads * d, dtype=dtype, seed=4)  # page-major: one page of several layers together
    k_pool, v_pool = (memory[i, :, 1].unflatten(1, (page, kv_heads, d)) for i in (0, 1))
    expected = [k_pool.clone(), v_pool.clone()]
    q_out = poisoned(tokens, heads, d, dtype=dtype)
    ops.attend_prepare(projected, *weights, 1e-6, angles.cos(), angles.sin(), positions, slots, k_pool, v_pool, q_out, gated)
    q, k, v = projected.split([heads * per_head, kv_heads * d, kv_heads * d], dim=1)
    q, k = q.unflatten(1, (heads, per_head))[..., :d], k.unflatten(1, (kv_heads, d))
    turn = angles[positions.long().clamp(min=0)]
    q, k = (
        reference.rope(reference.rms_norm(p, w, 1e-6), turn.cos(), turn.sin()) for p, w in zip((q, k), weights, strict=True)
    )
    close(q_out, q, dtype)
    live = slots >= 0
    reference.write_kv(k[live], v.unflatten(1, (kv_heads, d))[live], *expected, slots[live].long())
    close(k_pool, expected[0], dtype)
    assert torch.equal(v_pool, expected[1])
