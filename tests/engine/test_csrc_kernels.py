"""Every kernel of the C++ library, on every instruction set of this machine, against plain torch. Attention alone has a file
of its own, test_csrc_attention.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import cpu, native, records, reference

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no C++ library: {cpu.reason()}")

DTYPES = [torch.float32, torch.bfloat16]
fast = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def isas() -> list[str]:
    return cpu.isas() if cpu.available() else []


@pytest.fixture(params=isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


@pytest.fixture(params=DTYPES, ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Within a few roundings of the output type, relative to the tensor's largest value."""
    assert got.shape == want.shape
    assert not got.isnan().any()
    tolerance = (2e-5 if dtype == torch.float32 else 1.6e-2) * max(1.0, want.abs().max().item())
    worst = (got.float() - want.float()).abs().max().item() if got.numel() else 0.0
    assert worst <= tolerance, f"off by {worst}, allowed {tolerance}"


@fast
@given(t=st.integers(1, 60), n=st.integers(1, 70), k=st.integers(1, 150), extra=st.sampled_from(["", "bias", "residual"]))
def test_linear_matches_torch_for_any_shape(dtype: torch.dtype, t: int, n: int, k: int, extra: str) -> None:
    x, w = randn(t, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1) / k**0.5
    bias = randn(n, dtype=dtype, seed=2) if extra == "bias" else None
    residual = randn(t, n, dtype=dtype, seed=3) if extra == "residual" else None
    want = torch.nn.functional.linear(x.float(), w.float(), None if bias is None else bias.float())
    close(cpu.linear(x, w, bias, residual), want if residual is None else want + residual.float(), dtype)


@pytest.mark.parametrize(("x_type", "w_type"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("t", [3, 33])
def test_linear_with_mixed_types_computes_in_f32(x_type: torch.dtype, w_type: torch.dtype, t: int) -> None:
    x, w = randn(t, 77, dtype=x_type), randn(19, 77, dtype=w_type, seed=1) / 9
    out = torch.empty(t, 19)
    close(cpu.linear(x, w, out=out), torch.nn.functional.linear(x.float(), w.float()), torch.float32)


def test_linear_passes_over_many_tokens_and_strided_rows(dtype: torch.dtype) -> None:
    x = randn(700, 600, dtype=dtype)[:, 88:]
    w = randn(45, 512, dtype=dtype, seed=1) / 20
    close(cpu.linear(x, w), torch.nn.functional.linear(x.float(), w.float()), dtype)


@fast
@given(rows=st.integers(1, 20), n=st.integers(1, 140), gated=st.booleans(), one_plus=st.booleans())
def test_rms_norm(dtype: torch.dtype, rows: int, n: int, gated: bool, one_plus: bool) -> None:
    x, w = randn(rows, 3, n, dtype=dtype), randn(n, seed=1)
    gate = randn(rows, 3, n, dtype=dtype, seed=2) if gated else None
    want = reference.rms_norm(x.float(), w + one_plus, 1e-6, None if gate is None else gate.float())
    close(cpu.rms_norm(x, w, 1e-6, gate, one_plus), want, dtype)


@fast
@given(rows=st.integers(1, 20), r=st.integers(1, 40), rest=st.integers(0, 20))
def test_rope_rotates_a_part_of_each_head(dtype: torch.dtype, rows: int, r: int, rest: int) -> None:
    x = randn(rows, 3, 2 * r + rest, dtype=dtype)
    angle = randn(rows, r, seed=1) * 3
    close(cpu.rope(x, angle.cos(), angle.sin()), reference.rope(x.float(), angle.cos(), angle.sin()), dtype)


def test_rope_reads_the_table_at_the_given_positions() -> None:
    table, positions = randn(50, 8) * 3, torch.tensor([49, 0, 7])
    x = randn(3, 2, 20)
    want = reference.rope(x, table[positions].cos(), table[positions].sin())
    cpu.run(records.rope, x, table.cos(), table.sin(), 3, positions)
    close(x, want, torch.float32)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_of_several_sequences_stores_and_reads_its_own_pages(dtype: torch.dtype, head_dim: int) -> None:
    lengths, contexts, page = [5, 1, 70], [3, 200, 0], 16
    heads, kv_heads, max_pages = 4, 2, 14
    table = torch.randperm(3 * max_pages, generator=torch.Generator().manual_seed(0)).int().view(3, max_pages)
    k_pool, v_pool = (randn(3 * max_pages, page, kv_heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
    starts = torch.tensor([0, 5, 6, 76], dtype=torch.int32)
    context = torch.tensor(contexts, dtype=torch.int32)
    # Queries interleaved with a gate, as models with gated attention have them.
    q = randn(76, heads, 2 * head_dim, dtype=dtype, seed=3)[..., :head_dim]
    k, v = (randn(76, kv_heads, head_dim, dtype=dtype, seed=s) for s in (4, 5))
    out = torch.empty(76, heads * head_dim, dtype=dtype)
    program = cpu.Program()
    program.add(records.kv_store, k, v, k_pool, v_pool, table, starts, context, count=3)
    program.add(records.attention, q, k_pool, v_pool, table, starts, context, out, 0.1, count=cpu.SEQS)
    program.run(rows=76, seqs=3)
    for i, (length, before) in enumerate(zip(lengths, contexts, strict=True)):
        rows = slice(int(starts[i]), int(starts[i]) + length)
        assert torch.equal(k_pool[int(table[i, before // page]), before % page], k[rows][0])
        want = reference.paged_attention(q[rows].float(), k_pool.float(), v_pool.float(), table[i], before, 0.1)
        close(out[rows].view(length, heads, head_dim), want, dtype)


@fast
@given(tokens=st.integers(1, 12), channels=st.integers(1, 150), kernel=st.integers(2, 8))
def test_causal_conv_advances_its_state(dtype: torch.dtype, tokens: int, channels: int, kernel: int) -> None:
    x, w = randn(tokens, channels, dtype=dtype), randn(channels, kernel, dtype=dtype, seed=1)
    state = randn(channels, kernel - 1, dtype=dtype, seed=2)
    expected_state = state.clone()
    want = reference.causal_conv(x, w, expected_state)
    close(cpu.causal_conv(x, w, state), want, dtype)
    assert torch.equal(state, expected_state)


@fast
@given(
    tokens=st.integers(1, 9),
    k_heads=st.integers(1, 2),
    repeat=st.integers(1, 3),
    d_k=st.integers(1, 40),
    d_v=st.integers(1, 70),
)
def test_gated_delta(dtype: torch.dtype, tokens: int, k_heads: int, repeat: int, d_k: int, d_v: int) -> None:
    q, k = (randn(tokens, k_heads, d_k, dtype=dtype, seed=s) for s in (0, 1))
    v = randn(tokens, k_heads * repeat, d_v, dtype=dtype, seed=2)
    g, beta = -torch.rand(tokens, k_heads * repeat), torch.rand(tokens, k_heads * repeat)
    state = randn(k_heads * repeat, d_k, d_v, seed=3)
    expected_state = state.clone()
    want = reference.gated_delta_chunk(q, k, v, g, beta, expected_state)
    close(cpu.gated_delta_chunk(q, k, v, g, beta, state), want, torch.float32)
    close(state, expected_state, torch.float32)


def test_recurrence_is_bitwise_the_same_however_a_prompt_is_sliced() -> None:
    tokens, heads, d = 23, 2, 48
    q, k, v = (randn(tokens, heads, d, dtype=torch.bfloat16, seed=s) for s in (0, 1, 2))
    g, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    whole, sliced = torch.zeros(heads, d, d), torch.zeros(heads, d, d)
    want = cpu.gated_delta_chunk(q, k, v, g, beta, whole)
    got = [cpu.gated_delta_chunk(q[s], k[s], v[s], g[s], beta[s], sliced) for s in (slice(0, 1), slice(1, 8), slice(8, 23))]
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(sliced, whole)


def test_recurrent_operators_start_fresh_and_fill_cuts(dtype: torch.dtype) -> None:
    channels, kernel, heads, d = 70, 4, 2, 10
    starts, context = torch.tensor([0, 6, 9], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    rows = torch.tensor([1, 2], dtype=torch.int32)
    cuts = torch.tensor([2, 0, 5, 4, 1, 3, 3], dtype=torch.int32)  # sequence 0 after 5 rows to row 4, 1 after 3 to row 3
    x, w = randn(9, channels, dtype=dtype), randn(channels, kernel, dtype=dtype, seed=1)
    conv_state = randn(5, channels, kernel - 1, dtype=dtype, seed=2)
    state = randn(5, heads, d, d, seed=3)
    expected_conv, expected_state = conv_state.clone(), state.clone()
    q, k, v = (randn(9, heads, d, dtype=dtype, seed=s) for s in (4, 5, 6))
    a, b = randn(9, heads, dtype=dtype, seed=7), randn(9, heads, dtype=dtype, seed=8)
    gates = (randn(heads, seed=9), randn(heads, seed=10))
    out, mixed = torch.empty(9, heads, d), torch.empty(9, channels, dtype=dtype)
    cpu.run(records.conv, x, w, conv_state, rows, starts, context, mixed, 2, cuts=cuts)
    cpu.run(records.delta, q, k, v, a, b, gates, state, rows, starts, context, out, 2, cuts)
    g, beta = reference.delta_gates(a, b, *gates)
    for seq, (begin, cut, end) in enumerate([(0, 5, 6), (6, 9, 9)]):
        row, dest = int(rows[seq]), [4, 3][seq]
        if context[seq] == 0:
            expected_conv[row], expected_state[row] = 0, 0
        for part in (slice(begin, cut), slice(cut, end)):
            if part.start == part.stop:
                continue
            close(mixed[part], reference.causal_conv(x[part], w, expected_conv[row]), dtype)
            want = reference.gated_delta_chunk(q[part], k[part], v[part], g[part], beta[part], expected_state[row])
            close(out[part], want, torch.float32)
            if part.stop == cut:
                expected_conv[dest], expected_state[dest] = expected_conv[row], expected_state[row]
    assert torch.equal(conv_state, expected_conv)
    close(state, expected_state, torch.float32)


@fast
@given(rows=st.integers(1, 20), n=st.integers(1, 70), k=st.integers(1, 8), normalize=st.booleans())
def test_route_picks_the_best_experts(dtype: torch.dtype, rows: int, n: int, k: int, normalize: bool) -> None:
    k = min(k, n)
    logits = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(r)) for r in range(rows)]) * 0.125
    ids, weights = cpu.route(logits.to(dtype), k, normalize)
    want_ids, want_weights = reference.route(logits, k, normalize)
    assert torch.equal(ids, want_ids)
    close(weights, want_weights, torch.float32)


def expert_case(t: int, hidden: int, inter: int, n: int, top_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(t)
    ids = torch.stack([torch.randperm(n, generator=generator)[:top_k] for _ in range(t)]).int()
    gate_up = randn(n, 2 * inter, hidden, dtype=dtype, seed=1) / hidden**0.5
    down = randn(n, hidden, inter, dtype=dtype, seed=2) / inter**0.5
    return randn(t, hidden, dtype=dtype), ids, torch.rand(t, top_k, generator=generator), gate_up, down


@fast
@given(
    t=st.integers(1, 70),
    hidden=st.integers(1, 90),
    inter=st.integers(1, 50),
    n=st.integers(1, 6),
    top_k=st.integers(1, 3),
    skipped=st.booleans(),
)
def test_experts(dtype: torch.dtype, t: int, hidden: int, inter: int, n: int, top_k: int, skipped: bool) -> None:
    x, ids, weights, gate_up, down = expert_case(t, hidden, inter, n, min(top_k, n), dtype)
    if skipped:
        ids[::2, 0] = -1
    want = reference.experts_forward(x.float(), ids, weights, gate_up.float(), down.float())
    close(cpu.experts_forward(x, ids, weights, gate_up, down), want, dtype)


@fast
@given(t=st.integers(1, 40), hidden=st.integers(1, 90), inter=st.integers(1, 70), data=st.data())
def test_the_parts_of_experts_add_up_and_each_reads_its_own_rows(
    dtype: torch.dtype, t: int, hidden: int, inter: int, data: st.DataObject
) -> None:
    x, ids, weights, gate_up, down = expert_case(t, hidden, inter, 4, 2, dtype)
    cuts = sorted({0, inter, *data.draw(st.sets(st.integers(0, inter), max_size=2))})
    total = torch.zeros(t, hidden)
    for first, stop in itertools.pairwise(cuts):
        part = slice(first, stop)
        mine = [gate_up.unflatten(1, (2, inter)).clone(), down.clone()]
        outside = torch.ones(inter, dtype=torch.bool)
        outside[part] = False
        mine[0][:, :, outside], mine[1][:, :, outside] = float("nan"), float("nan")
        got = cpu.experts_forward(x, ids, weights, mine[0].flatten(1, 2), mine[1], part)
        args = (x.float(), ids, weights, gate_up.float(), down.float(), part)
        close(got, reference.experts_forward(*args), dtype)
        total += got
    close(total, reference.experts_forward(x.float(), ids, weights, gate_up.float(), down.float()), dtype)


@pytest.mark.parametrize("part", [slice(3, 3), slice(8, None), slice(0, 8, 2)])
def test_a_part_without_rows_or_with_gaps_is_refused(part: slice) -> None:
    x, ids, weights, gate_up, down = expert_case(1, 16, 8, 2, 1, torch.float32)
    with pytest.raises(ShapeMismatch, match="no part of 8 inner rows"):
        cpu.experts_forward(x, ids, weights, gate_up, down, part)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("hidden", "inter"), [(512, 64), (600, 48), (97, 33), (352, 40)])
@pytest.mark.parametrize("t", [17, 33, 70])
def test_experts_with_many_tokens_and_with_few(dtype: torch.dtype, t: int, hidden: int, inter: int, threads: int) -> None:
    """Whole blocks, strips and tiles, what is left of each, and groups of 1, 4, 5, 16 and all tokens in one batch."""
    x, ids, weights, gate_up, down = expert_case(t, hidden, inter, 5, 3, dtype)
    chosen = [0, *[1] * 4, *[2] * 5, *[3] * 16]
    ids[:, 0] = 4
    ids[:, 1:].t().copy_(torch.tensor(chosen + [-1] * (2 * t - len(chosen))).view(2, t))
    want = reference.experts_forward(x.float(), ids, weights, gate_up.float(), down.float())
    cpu.set_threads(threads)
    try:
        close(cpu.experts_forward(x, ids, weights, gate_up, down), want, dtype)
    finally:
        cpu.set_threads(1)


def test_a_larger_batch_after_a_smaller_one_reads_nothing_of_it() -> None:
    """Scratch is kept between calls: what lies behind a tail of K is another call's, here not even numbers."""
    huge = torch.full((40, 256), float("inf"), dtype=torch.bfloat16)
    bank = huge[:1].expand(512, 256).contiguous()[None], torch.ones(1, 256, 256).bfloat16()
    cpu.experts_forward(huge, torch.zeros(40, 1, dtype=torch.int32), torch.ones(40, 1), *bank)
    x, ids, weights, gate_up, down = expert_case(40, 50, 22, 2, 1, torch.bfloat16)
    want = reference.experts_forward(x.float(), ids, weights, gate_up.float(), down.float())
    close(cpu.experts_forward(x, ids, weights, gate_up, down), want, torch.bfloat16)


def test_emulation_is_never_chosen_by_itself() -> None:
    cpu.set_isa(None)
    assert cpu.isa() != "amx_emulated"
    assert "amx_emulated" in cpu.isas()


def test_experts_add_a_residual_and_keep_a_token_independent_of_its_batch(dtype: torch.dtype) -> None:
    x, ids, weights, gate_up, down = expert_case(8, 96, 40, 8, 3, dtype)
    residual, out = randn(8, 96, dtype=dtype, seed=5), torch.empty(8, 96, dtype=dtype)
    cpu.run(records.experts, x, ids, weights, gate_up, down, out, 8, residual)
    want = reference.experts_forward(x.float(), ids, weights, gate_up.float(), down.float())
    close(out, want + residual.float(), dtype)
    together = cpu.experts_forward(x, ids, weights, gate_up, down)
    alone = torch.cat([cpu.experts_forward(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], gate_up, down) for i in range(8)])
    assert torch.equal(alone, together)
    ids[3, 1] = -1
    each, want_each = torch.full((8, 3, 96), 7.0), torch.full((8, 3, 96), 7.0)
    cpu.expert_outputs(x, ids, gate_up, down, each)
    reference.expert_outputs(x.float(), ids, gate_up.float(), down.float(), want_each)
    close(each, want_each, dtype)


def test_small_operators(dtype: torch.dtype) -> None:
    a, b, gate = randn(7, 45, dtype=dtype), randn(7, 45, dtype=dtype, seed=1), randn(7, 3, dtype=dtype, seed=2)
    out = torch.empty(7, 45, dtype=dtype)
    cpu.run(records.silu_mul, a, b, out, 7)
    close(out, torch.nn.functional.silu(a.float()) * b.float(), dtype)
    close(cpu.sigmoid_gate(a, b), a.float() * torch.sigmoid(b.float()), dtype)
    cpu.run(records.gated_add, a, gate, b, out, 7)
    close(out, a.float() + torch.sigmoid(gate[:, :1].float()) * b.float(), dtype)
    cpu.run(records.gated_add, a, None, b, out, 7)
    close(out, a.float() + b.float(), dtype)
    ids, picked = torch.tensor([3, 0, -1, 7]), torch.empty(4, 45, dtype=dtype)
    cpu.run(records.gather, a, ids, picked, 4)
    assert torch.equal(picked[:2], a[[3, 0]])
    assert not picked[2:].any()
    close(
        cpu.swiglu(a, randn(20, 45, dtype=dtype) / 7, randn(9, 10, dtype=dtype)),
        reference.swiglu(a.float(), (randn(20, 45, dtype=dtype) / 7).float(), randn(9, 10, dtype=dtype).float()),
        dtype,
    )


def test_a_program_runs_with_the_counts_of_the_moment(dtype: torch.dtype) -> None:
    x, w, out = randn(8, 40, dtype=dtype), randn(30, 40, dtype=dtype, seed=1) / 6, torch.zeros(8, 30, dtype=dtype)
    program = cpu.Program()
    program.add(records.linear, x, w, out, count=cpu.ROWS)
    program.run(rows=3)
    close(out[:3], torch.nn.functional.linear(x[:3].float(), w.float()), dtype)
    assert not out[3:].any()


def test_up_to_16_rows_do_not_change_each_other(dtype: torch.dtype) -> None:
    x, w = randn(16, 333, dtype=dtype), randn(37, 333, dtype=dtype, seed=1) / 18
    want = torch.cat([cpu.linear(x[i : i + 1], w) for i in range(16)])
    for rows in (2, 3, 7, 16):
        assert torch.equal(cpu.linear(x[:rows], w), want[:rows])


def test_threads_change_no_bit() -> None:
    """Large enough to be shared: a task computes the same whoever runs it, in loops with helpers and without."""
    x, ids, weights, gate_up, down = expert_case(48, 512, 256, 16, 4, torch.bfloat16)
    w, few = randn(1024, 512, dtype=torch.bfloat16, seed=1), randn(3, 512, dtype=torch.bfloat16)
    q, pool = randn(48, 8, 64, dtype=torch.bfloat16), randn(20, 16, 2, 64, dtype=torch.bfloat16, seed=2)
    pages = torch.arange(20, dtype=torch.int32)
    v, g = randn(48, 8, 64, dtype=torch.bfloat16, seed=3), -torch.rand(48, 8)

    def everything() -> list[torch.Tensor]:
        state = torch.zeros(8, 64, 64)
        return [
            cpu.experts_forward(x, ids, weights, gate_up, down),
            cpu.experts_forward(x[:2], ids[:2], weights[:2], gate_up, down),
            cpu.linear(x, w),
            cpu.linear(few, w),
            cpu.paged_attention(q, pool, pool, pages, 200, 0.1),
            cpu.gated_delta_chunk(q[:, :4], q[:, 4:], v, g, -g, state),
            state,
        ]

    alone = everything()
    try:
        for threads in (2, 3):
            cpu.set_threads(threads, pin=threads == 2)
            for _ in range(4):
                for got, want in zip(everything(), alone, strict=True):
                    assert torch.equal(got, want)
        assert cpu.pool_stats()["parallel"] > 0
    finally:
        cpu.set_threads(1)


def test_bad_tensors_are_refused_with_their_numbers() -> None:
    x = randn(4, 10)
    with pytest.raises(ShapeMismatch, match=r"x has shape \[4, 10\], expected \[any, 11\]"):
        cpu.linear(x, randn(3, 11))
    with pytest.raises(ShapeMismatch, match="float16"):
        cpu.linear(x.half(), randn(3, 10).half())
    with pytest.raises(ShapeMismatch, match="not contiguous"):
        cpu.linear(x, randn(10, 3).t())
    with pytest.raises(ShapeMismatch, match="2 rows, 4 are needed"):
        cpu.linear(x, randn(3, 10), out=torch.empty(2, 3))
    assert native.RECORD.size == native.load().asv_op_bytes()  # type: ignore[union-attr]
