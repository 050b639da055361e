"""Convolution and delta rule over several sequences, decode and prefill, with fresh rows and padding."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import reference

from .common import DTYPES, SHARED, close, few, ints, poisoned, randn, spaced

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops
from engine.kernels.triton import delta_chunk


@pytest.fixture(params=DTYPES, ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@dataclass(frozen=True)
class Seq:
    length: int
    context: int = 0
    dead: bool = False


@dataclass(frozen=True)
class Batch:
    """Sequence s reads row 2·s and writes row 2·s or 2·s + 1."""

    seqs: list[Seq]
    double: bool

    def tables(self) -> dict[str, torch.Tensor]:
        edges = [sum(s.length for s in self.seqs[:i]) for i in range(len(self.seqs) + 1)]
        rows = [-1 if s.dead else 2 * i for i, s in enumerate(self.seqs)]
        return {
            "starts": ints(edges),
            "contexts": ints([s.context for s in self.seqs]),
            "rows": ints(rows),
            "rows_out": ints([row + self.double if row >= 0 else -1 for row in rows]),
        }

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.seqs)

    @property
    def longest(self) -> int:
        return max(s.length for s in self.seqs)

    @property
    def pool_rows(self) -> int:
        return 2 * len(self.seqs)

    def parts(self) -> list[tuple[Seq, slice, int, int]]:
        """Of the live: sequence, its rows of the batch, state row read, written."""
        starts = self.tables()["starts"].tolist()
        return [
            (s, slice(starts[i], starts[i + 1]), 2 * i, 2 * i + self.double)
            for i, s in enumerate(self.seqs)
            if not s.dead and s.length
        ]


def batches(lengths: list[int]) -> st.SearchStrategy[Batch]:
    seq = st.builds(Seq, st.sampled_from(lengths), st.sampled_from([0, 5]), st.sampled_from([False, False, True]))
    some = st.lists(seq, min_size=1, max_size=3).filter(lambda seqs: sum(s.length for s in seqs) > 0)
    return st.builds(Batch, some, st.booleans())


def check_conv(batch: Batch, channels: int, kernel: int, dtype: torch.dtype) -> None:
    x, weight = spaced(randn(batch.tokens, channels, dtype=dtype)), randn(channels, kernel, dtype=dtype, seed=1)
    tails = randn(batch.pool_rows, channels, kernel - 1, dtype=dtype, seed=2)
    want_tails, out = tails.clone(), poisoned(batch.tokens, channels, dtype=dtype)
    tables = batch.tables()
    ops.conv(
        x, weight, tails, tables["starts"], tables["contexts"], tables["rows"], batch.longest, out,
        rows_out=tables["rows_out"],
    )  # fmt: skip
    for seq, rows, row, row_out in batch.parts():
        tail = want_tails[row].clone() if seq.context else torch.zeros_like(want_tails[row])
        close(out[rows], reference.causal_conv(x[rows], weight, tail), dtype)
        want_tails[row_out] = tail
    assert torch.equal(tails, want_tails)


@few
@given(batch=batches([0, 1]), channels=st.integers(1, 70), kernel=st.integers(2, 5))
def test_conv_of_one_token_a_sequence(dtype: torch.dtype, batch: Batch, channels: int, kernel: int) -> None:
    check_conv(batch, channels, kernel, dtype)


@few
@given(batch=batches([0, 1, 2, 3, 40]), channels=st.integers(1, 70), kernel=st.integers(2, 5))
def test_conv_of_slices(dtype: torch.dtype, batch: Batch, channels: int, kernel: int) -> None:
    check_conv(batch, channels, kernel, dtype)


def check_delta(batch: Batch, k_heads: int, repeat: int, d_k: int, d_v: int, dtype: torch.dtype, factor: float) -> None:
    heads, tables = k_heads * repeat, batch.tables()
    mixed = spaced(randn(batch.tokens, 2 * k_heads * d_k + heads * d_v, dtype=dtype))
    a, b = (spaced(randn(batch.tokens, heads, dtype=dtype, seed=s)) for s in (1, 2))
    a_log, dt_bias = randn(heads, seed=3), randn(heads, seed=4)
    states = randn(batch.pool_rows, heads, d_k, d_v, seed=5)
    want_states, out = states.clone(), poisoned(batch.tokens, heads, d_v)
    ops.delta(
        mixed, a, b, a_log, dt_bias, states, tables["starts"], tables["contexts"], tables["rows"], batch.longest, k_heads,
        out, rows_out=tables["rows_out"],
    )  # fmt: skip
    g, beta = reference.delta_gates(a, b, a_log, dt_bias)
    q, k, v = mixed.float().split([k_heads * d_k, k_heads * d_k, heads * d_v], dim=1)
    q, k, v = q.unflatten(1, (k_heads, d_k)), k.unflatten(1, (k_heads, d_k)), v.unflatten(1, (heads, d_v))
    untouched = set(range(batch.pool_rows))
    for seq, rows, row, row_out in batch.parts():
        state = want_states[row].clone() if seq.context else torch.zeros_like(want_states[row])
        inputs = [t[rows] for t in (q, k, v, g, beta)]
        close(out[rows], reference.gated_delta_chunk(*inputs, state), dtype, factor)
        close(states[row_out], state, dtype, factor)
        untouched.discard(row_out)
    for row in untouched:
        assert torch.equal(states[row], want_states[row])


@few
@given(
    batch=batches([0, 1]), k_heads=st.integers(1, 2), repeat=st.integers(1, 3), d_k=st.integers(1, 40), d_v=st.integers(1, 70)
)
def test_delta_of_one_token_a_sequence(dtype: torch.dtype, batch: Batch, k_heads: int, repeat: int, d_k: int, d_v: int) -> None:
    check_delta(batch, k_heads, repeat, d_k, d_v, torch.float32 if dtype == torch.float32 else dtype, 1.0)


@few
@given(batch=batches([0, 1, 3, 64, 90]), repeat=st.integers(1, 2), d_k=st.sampled_from([16, 24]), d_v=st.sampled_from([16, 40]))
def test_delta_of_slices(dtype: torch.dtype, batch: Batch, repeat: int, d_k: int, d_v: int) -> None:
    check_delta(batch, 1, repeat, d_k, d_v, dtype, 5.0 if dtype == torch.float32 else 1.0)


@pytest.mark.parametrize("shared", SHARED)
def test_delta_at_the_sizes_of_a_model(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles of tensor cores, which smaller heads do not fill. Two sequences, one with a chunk that is not full."""
    monkeypatch.setattr(delta_chunk, "shared_bytes", lambda: shared)
    check_delta(Batch([Seq(70, 5), Seq(64)], True), 1, 2, 128, 128, torch.bfloat16, 1.0)


def test_delta_survives_repeated_keys_and_strong_writes() -> None:
    """The case in which a power series of the triangular matrix would lose every digit: all keys alike, nothing forgotten."""
    tokens, d = 130, 16
    mixed = randn(1, 3 * d).repeat(tokens, 1)
    mixed[:, 2 * d :] = randn(tokens, d, seed=1)
    a, b = mixed.new_full((tokens, 1), -30.0), mixed.new_full((tokens, 1), 4.0)
    gate = (mixed.new_zeros(1), mixed.new_zeros(1))
    states, want = randn(1, 1, d, d, seed=2), randn(1, d, d, seed=2)
    out = poisoned(tokens, 1, d)
    ops.delta(mixed, a, b, *gate, states, ints([0, tokens]), ints([1]), ints([0]), tokens, 1, out)
    q, k, v = (part.unflatten(1, (1, d)) for part in mixed.split(d, dim=1))
    close(out, reference.gated_delta_chunk(q, k, v, *reference.delta_gates(a, b, *gate), want), torch.float32, 5.0)
    close(states[0], want, torch.float32, 5.0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    where = (ints([0, 2]), ints([0]), ints([0]), 2)
    with pytest.raises(ShapeMismatch, match="conv"):
        ops.conv(randn(2, 8), randn(9, 4), randn(1, 9, 3), *where, randn(2, 8))
    with pytest.raises(ShapeMismatch, match="delta"):
        ops.delta(randn(2, 8), randn(2, 1), randn(2, 1), randn(1), randn(1), randn(1, 1, 4, 4), *where, 1, randn(2, 1, 4))
