"""Paged attention, decode and prefill, against the plain one; pages are poisoned where nobody may look."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import reference

from .common import DEVICE, DTYPES, SHARED, close, few, ints, poisoned, randn

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops
from engine.kernels.triton import attention, config


@pytest.fixture(params=DTYPES, ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a moment for each block, so keys are divided into fewer parts than a GPU wants."""
    assert (config.decode_splits(1), config.decode_splits(256), config.prefill_splits(256)) == (64, 1, 1)
    monkeypatch.setattr(config, "decode_splits", lambda batch: 4)
    monkeypatch.setattr(config, "prefill_splits", lambda blocks: 2)


class Paged:
    """Pools of one layer among others in page-major memory, pages in random order, NaN where no live position maps."""

    def __init__(self, totals: list[int], page: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
        most = max(1, *(-(-t // page) for t in totals))
        order = torch.randperm(len(totals) * most + 1, generator=torch.Generator().manual_seed(3))[: len(totals) * most]
        self.pages = order.int().view(len(totals), most).to(DEVICE)
        memory = poisoned(len(totals) * most + 1, 2, 2, page, kv_heads, d, dtype=dtype)
        self.k, self.v = memory[:, 1, 0], memory[:, 1, 1]
        for s, total in enumerate(totals):
            for i in range(total):
                where = (self.pages[s, i // page].item(), i % page)
                self.k[where] = randn(kv_heads, d, dtype=dtype, seed=10_000 * s + 2 * i)
                self.v[where] = randn(kv_heads, d, dtype=dtype, seed=10_000 * s + 2 * i + 1)

    def expected(self, q: torch.Tensor, s: int, context: int, scale: float, gate: torch.Tensor | None) -> torch.Tensor:
        out = reference.paged_attention(q.float(), self.k.float(), self.v.float(), self.pages[s], context, scale).to(q.dtype)
        out = out if gate is None else reference.sigmoid_gate(out, gate)
        return out.flatten(1)


def queries(tokens: int, heads: int, d: int, gated: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each head's query followed by its gate, as a projection leaves them."""
    both = randn(tokens, heads, 2 * d, dtype=dtype, seed=7)
    return both[..., :d], both[..., d:] if gated else None


@few
@given(
    contexts=st.lists(st.sampled_from([-1, 0, 3, 70]), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 8]),
    d=st.sampled_from([20, 64]),
    page=st.sampled_from([1, 16, 64]),
    gated=st.booleans(),
)
def test_decode_reads_each_sequences_pages_and_nothing_else(
    dtype: torch.dtype, contexts: list[int], kv_heads: int, group: int, d: int, page: int, gated: bool
) -> None:
    paged, heads, batch = Paged([c + 1 for c in contexts], page, kv_heads, d, dtype), kv_heads * group, len(contexts)
    q, gate = queries(batch, heads, d, gated, dtype)
    out, scratch = poisoned(batch, heads * d, dtype=dtype), poisoned(ops.decode_scratch(batch, heads, d))
    ops.decode_attention(q, paged.k, paged.v, paged.pages, ints(contexts), 0.2, gate, out, scratch)
    for s, context in enumerate(contexts):
        if context < 0:
            assert not out[s].any()
        else:
            part = None if gate is None else gate[s : s + 1]
            close(out[s : s + 1], paged.expected(q[s : s + 1], s, context, 0.2, part), dtype)


def test_decode_of_a_large_batch_divides_the_keys_no_further(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "decode_splits", lambda batch: 1)
    contexts = [70, -1, 2]
    paged = Paged([c + 1 for c in contexts], 16, 1, 16, dtype)
    q, gate = queries(3, 2, 16, True, dtype)
    out = poisoned(3, 32, dtype=dtype)
    ops.decode_attention(
        q, paged.k, paged.v, paged.pages, ints(contexts), 0.2, gate, out, poisoned(ops.decode_scratch(3, 2, 16))
    )
    assert not out[1].any()
    for s in (0, 2):
        assert gate is not None
        close(out[s : s + 1], paged.expected(q[s : s + 1], s, contexts[s], 0.2, gate[s : s + 1]), dtype)


@few
@given(
    seqs=st.lists(st.tuples(st.sampled_from([0, 1, 5, 20]), st.sampled_from([0, 3, 70])), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 8]),
    d=st.sampled_from([20, 64]),
    page=st.sampled_from([4, 64]),
    gated=st.booleans(),
)
def test_prefill_is_causal_over_history_and_itself(
    dtype: torch.dtype, seqs: list[tuple[int, int]], kv_heads: int, group: int, d: int, page: int, gated: bool
) -> None:
    paged, heads = Paged([n + context for n, context in seqs], page, kv_heads, d, dtype), kv_heads * group
    starts = [sum(n for n, _ in seqs[:s]) for s in range(len(seqs) + 1)]
    if starts[-1] == 0:
        return
    q, gate = queries(starts[-1], heads, d, gated, dtype)
    out = poisoned(starts[-1], heads * d, dtype=dtype)
    where = (paged.pages, ints(starts), ints([context for _, context in seqs]), max(n for n, _ in seqs))
    ops.prefill_attention(q, paged.k, paged.v, *where, 0.2, gate, out)
    for s, (n, context) in enumerate(seqs):
        rows = slice(starts[s], starts[s + 1])
        if n:
            close(out[rows], paged.expected(q[rows], s, context, 0.2, None if gate is None else gate[rows]), dtype)


@pytest.mark.parametrize("shared", SHARED)
def test_prefill_at_the_sizes_of_a_model(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles of tensor cores; tiles that every query sees, that some see and that end with the last key."""
    monkeypatch.setattr(attention, "shared_bytes", lambda: shared)
    monkeypatch.setattr(config, "prefill_splits", lambda blocks: 1)
    paged = Paged([150 + 20, 33], 64, 1, 256, torch.bfloat16)
    q, gate = queries(53, 8, 256, True, torch.bfloat16)
    assert gate is not None
    out = poisoned(53, 8 * 256, dtype=torch.bfloat16)
    ops.prefill_attention(q, paged.k, paged.v, paged.pages, ints([0, 20, 53]), ints([150, 0]), 33, 0.06, gate, out)
    close(out[:20], paged.expected(q[:20], 0, 150, 0.06, gate[:20]), torch.bfloat16)
    close(out[20:], paged.expected(q[20:], 1, 0, 0.06, gate[20:]), torch.bfloat16)


def test_prefill_of_many_blocks_needs_no_division_of_the_keys(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "prefill_splits", lambda blocks: 1)
    paged = Paged([60, 30], 16, 1, 16, dtype)
    q, gate = queries(40, 4, 16, True, dtype)
    assert gate is not None
    out = poisoned(40, 64, dtype=dtype)
    ops.prefill_attention(q, paged.k, paged.v, paged.pages, ints([0, 10, 40]), ints([50, 0]), 30, 0.2, gate, out)
    close(out[:10], paged.expected(q[:10], 0, 50, 0.2, gate[:10]), dtype)
    close(out[10:], paged.expected(q[10:], 1, 0, 0.2, gate[10:]), dtype)


def test_too_little_scratch_is_refused(dtype: torch.dtype) -> None:
    paged = Paged([4], 4, 1, 16, dtype)
    q, _ = queries(1, 1, 16, False, dtype)
    with pytest.raises(ShapeMismatch, match="scratch"):
        ops.decode_attention(q, paged.k, paged.v, paged.pages, ints([3]), 0.2, None, poisoned(1, 16, dtype=dtype), poisoned(3))
