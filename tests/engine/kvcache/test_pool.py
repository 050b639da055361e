"""Pages to token-major rows and back, against indexing one position at a time."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kvcache.pool import KvPools
from engine.models.base import ModelSpec
from tests.fakes.hash_model import make_spec

PAGE, PAGES = 4, 9
WIDTHS = [(1, 2, torch.float32), (2, 8, torch.bfloat16), (1, 3, torch.bfloat16)]
"""The last has rows of 6 bytes, which are not whole words."""


def spec_of(width: tuple[int, int, torch.dtype]) -> ModelSpec:
    return replace(make_spec(recurrent=False), kv_heads=width[0], head_dim=width[1], dtype=width[2])


def random_pools(spec: ModelSpec) -> KvPools:
    pools = KvPools(spec, PAGES, PAGE)
    torch.manual_seed(0)
    for pool in (*pools.k, *pools.v):
        pool.normal_()
    return pools


def one_by_one(pools: KvPools, pages: np.ndarray, position: int) -> bytes:
    page, slot = int(pages[position // PAGE]), position % PAGE
    parts = (pool[page, slot] for pair in zip(pools.k, pools.v, strict=True) for pool in pair)
    return b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@given(start=st.integers(0, 24), length=st.integers(0, 24), order=st.permutations(range(PAGES)))
@settings(max_examples=40, deadline=None)
def test_rows_read_and_written_are_the_positions_asked_for(width, start, length, order):
    spec = spec_of(width)
    source, dest = random_pools(spec), KvPools(spec, PAGES, PAGE)
    stop = min(start + length, PAGE * PAGES)
    pages, others = np.array(order, dtype=np.int32), np.array(order[::-1], dtype=np.int32)
    rows = source.read(pages, start, stop)
    assert rows.shape == (stop - start, source.token_bytes)
    assert [row.tobytes() for row in rows] == [one_by_one(source, pages, p) for p in range(start, stop)]
    rows.flags.writeable = False
    dest.write(others, start, rows)
    zero = bytes(source.token_bytes)
    for position in range(PAGE * PAGES):
        want = one_by_one(source, pages, position) if start <= position < stop else zero
        assert one_by_one(dest, others, position) == want


def test_rows_that_lie_askew_in_memory_are_taken():
    spec = spec_of(WIDTHS[0])
    source, dest = random_pools(spec), KvPools(spec, PAGES, PAGE)
    pages = np.arange(PAGES, dtype=np.int32)
    rows = source.read(pages, 0, 10)
    shifted = np.empty(rows.size + 3, np.uint8)[3:].reshape(rows.shape)
    shifted[:] = rows
    dest.write(pages, 0, shifted)
    assert np.array_equal(dest.read(pages, 0, 10), rows)


def test_copy_head_leaves_the_rest_of_the_page():
    pools = random_pools(spec_of(WIDTHS[1]))
    pages = np.arange(PAGES, dtype=np.int32)
    before = pools.read(pages, 0, PAGE * PAGES).reshape(PAGES, PAGE, -1)
    pools.copy_head(2, 5, 3)
    after = pools.read(pages, 0, PAGE * PAGES).reshape(PAGES, PAGE, -1)
    assert np.array_equal(after[5, :3], before[2, :3])
    assert np.array_equal(after[5, 3:], before[5, 3:])
    assert np.array_equal(np.delete(after, 5, 0), np.delete(before, 5, 0))


def test_writing_rows_takes_no_second_copy_of_them():
    """A saved context lies in read-only memory; as much again, touched for the first time, took most of a restore."""
    pools = KvPools(replace(make_spec(recurrent=False), kv_heads=2, head_dim=64), 64, 16)
    rows = np.zeros((1024, pools.token_bytes), np.uint8)
    rows.flags.writeable = False
    pages = np.arange(64, dtype=np.int32)
    pools.write(pages, 0, rows)
    tracemalloc.start()
    try:
        pools.write(pages, 0, rows)
        assert tracemalloc.get_traced_memory()[1] < rows.nbytes // 8
    finally:
        tracemalloc.stop()
