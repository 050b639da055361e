"""Attention of the C++ library, on every instruction set of this machine: lengths, page and range edges, masks, threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels import cpu, records, reference

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"no C++ library: {cpu.reason()}")

Tensor = torch.Tensor
RANGE = 2048
"""Keys that a task of a few queries reads (kFewRange)."""

few_examples = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=cpu.isas() if cpu.available() else [], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(None)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class Batch:
    """Sequences of `rows` rows behind `contexts` tokens, their pages mixed; what no position of theirs maps to is NaN."""

    def __init__(
        self, rows: list[int], contexts: list[int], group: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype
    ) -> None:
        self.group, self.context = group, torch.tensor(contexts, dtype=torch.int32)
        self.starts = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).int()
        generator = torch.Generator().manual_seed(sum(rows) + sum(contexts))
        needed = [-(-(context + n) // page) for context, n in zip(contexts, rows, strict=True)]
        order = torch.randperm(sum(needed) + 2, generator=generator).int()
        self.table = torch.full((len(rows), max(needed)), -1, dtype=torch.int32)
        live = torch.zeros(sum(needed) + 2, page, dtype=torch.bool)
        for i, n in enumerate(needed):
            self.table[i, :n] = order[sum(needed[:i]) :][:n]
            for at, place in enumerate(self.table[i, :n].tolist()):
                live[place, : contexts[i] + rows[i] - at * page] = True
        shape = (len(live), page, kv_heads, dim)
        # Scores between 10 and 20 apart, so that the maximum moves now and then and few keys share the weight.
        self.k, self.v = (torch.randn(shape, generator=generator).mul(3 - 2 * i).to(dtype) for i in range(2))
        self.k[~live], self.v[~live] = float("nan"), float("nan")
        self.q = torch.randn(sum(rows), group * kv_heads, dim, generator=generator).to(dtype)

    def rows(self, i: int) -> slice:
        return slice(int(self.starts[i]), int(self.starts[i + 1]))

    def attend(self, seqs: list[int]) -> Tensor:
        """Outputs of some of the sequences' rows, computed in one call."""
        rows = [self.rows(i) for i in seqs]
        q = torch.cat([self.q[part] for part in rows])
        starts = torch.tensor([0, *(part.stop - part.start for part in rows)], dtype=torch.int32).cumsum(0).int()
        out = torch.empty(len(q), q[0].numel(), dtype=q.dtype)
        table, context = self.table[seqs].contiguous(), self.context[seqs].contiguous()
        cpu.run(records.attention, q, self.k, self.v, table, starts, context, out, self.scale, len(seqs))
        return out.view(q.shape)

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def expected(self, i: int) -> Tensor:
        rows, context = self.rows(i), int(self.context[i])
        pages = self.table[i][self.table[i] >= 0]
        pools = (self.k.float().nan_to_num(), self.v.float().nan_to_num())
        return reference.paged_attention(self.q[rows].float(), *pools, pages, context, self.scale)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert not got.isnan().any()
    tolerance = (4e-5 if dtype == torch.float32 else 2e-2) * max(1.0, want.abs().max().item())
    worst = (got.float() - want).abs().max().item()
    assert worst <= tolerance, f"off by {worst}, allowed {tolerance}"


@few_examples
@given(
    rows=st.integers(1, 150),
    context=st.integers(0, 700),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([7, 16, 40, 64, 96, 130]),
    page=st.sampled_from([1, 3, 16, 64]),
)
def test_any_shape(dtype: torch.dtype, rows: int, context: int, group: int, kv_heads: int, dim: int, page: int) -> None:
    batch = Batch([rows], [context], group, kv_heads, dim, page, dtype)
    close(batch.attend([0]), batch.expected(0), dtype)


@few_examples
@given(
    rows=st.integers(1, 4),
    ranges=st.integers(1, 2),
    beyond=st.integers(-5, 5),
    group=st.sampled_from([1, 2, 4]),
    page=st.sampled_from([7, 64]),
)
def test_a_few_rows_at_the_edges_of_ranges(
    dtype: torch.dtype, rows: int, ranges: int, beyond: int, group: int, page: int
) -> None:
    """Some rows see none of the last range's keys, or all of them but one."""
    batch = Batch([rows], [ranges * RANGE + beyond], group, 2, 24, page, dtype)
    close(batch.attend([0]), batch.expected(0), dtype)


@pytest.mark.parametrize("dim", [64, 256])
def test_more_rows_than_share_one_reading_of_the_keys(dtype: torch.dtype, dim: int) -> None:
    batch = Batch([330], [75], 2, 1, dim, 64, dtype)
    close(batch.attend([0]), batch.expected(0), dtype)


def test_a_sequence_gets_the_same_bits_beside_others_and_with_any_threads(dtype: torch.dtype) -> None:
    """Chunks that are cut into other tasks, and ranges of keys that other threads add up."""
    batch = Batch([200, 1, 2, 37, 1], [500, 2 * RANGE + 300, 90, 0, 700], 2, 2, 32, 16, dtype)
    everyone = list(range(5))
    alone = [batch.attend([i]) for i in everyone]
    for i in everyone:
        close(alone[i], batch.expected(i), dtype)
    try:
        for threads in (1, 2, 3):
            cpu.set_threads(threads)
            assert torch.equal(batch.attend(everyone), torch.cat(alone))
            assert torch.equal(batch.attend([3, 0]), torch.cat([alone[3], alone[0]]))
    finally:
        cpu.set_threads(1)


def test_a_sequence_without_rows_is_passed_over(dtype: torch.dtype) -> None:
    batch = Batch([3, 0, 1], [5, 9, 2], 2, 1, 16, 4, dtype)
    assert torch.equal(batch.attend([0, 1, 2]), torch.cat([batch.attend([0]), batch.attend([2])]))
