"""Pools in a device's memory move the same bytes as those of the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.host import HostDevice
from engine.errors import OutOfDeviceMemory
from engine.kvcache import device
from engine.kvcache.arriving import Arrivals
from engine.kvcache.device import DeviceKvPools, DeviceRecurrentPools
from engine.kvcache.pool import KvPools
from engine.kvcache.recurrent import RecurrentPools
from engine.types import ROW, StateLayout
from tests.fakes.hash_model import make_spec

PAGE, PAGES = 4, 9
HERE = HostDevice()


def both(width: tuple[int, int, torch.dtype]) -> tuple[KvPools, DeviceKvPools]:
    spec = replace(make_spec(recurrent=False), kv_heads=width[0], head_dim=width[1], dtype=width[2])
    plain, pools = KvPools(spec, PAGES, PAGE), DeviceKvPools(spec, PAGES, PAGE, HERE)
    torch.manual_seed(0)
    for mine, other in zip((*plain.k, *plain.v), (*pools.k, *pools.v), strict=True):
        mine.normal_()
        other.copy_(mine)
    return plain, pools


@pytest.mark.parametrize("staged", [1, 1 << 20])
@pytest.mark.parametrize("width", [(1, 2, torch.float32), (2, 8, torch.bfloat16), (1, 3, torch.bfloat16)], ids=str)
@given(start=st.integers(0, 24), length=st.integers(0, 24), order=st.permutations(range(PAGES)))
@settings(max_examples=30, deadline=None)
def test_reads_and_writes_are_those_of_the_cpu_pools(width, staged, start, length, order):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "STAGED_BYTES", staged)
        plain, pools = both(width)
    stop = min(start + length, PAGE * PAGES)
    pages, others = np.array(order, dtype=np.int32), np.array(order[::-1], dtype=np.int32)
    rows = plain.read(pages, start, stop)
    assert np.array_equal(pools.read(pages, start, stop), rows)
    rows.flags.writeable = False
    plain.write(others, start, rows)
    pools.write(others, start, rows)
    plain.copy_head(2, 5, 3)
    pools.copy_head(2, 5, 3)
    for mine, other in zip((*plain.k, *plain.v), (*pools.k, *pools.v), strict=True):
        assert torch.equal(mine, other)
    assert pools.token_bytes == plain.token_bytes


def test_moved_pages_are_whole_and_others_stay():
    _, pools = both((1, 2, torch.float32))
    before = pools.memory.clone()
    pools.move(np.array([7, 8], dtype=np.int32), np.array([1, 0], dtype=np.int32))
    assert torch.equal(pools.memory[[1, 0]], before[[7, 8]])
    assert torch.equal(pools.memory[2:], before[2:])


def test_recurrent_rows_are_those_of_the_cpu_pools():
    spec = make_spec()
    plain, pools = RecurrentPools(spec, 3), DeviceRecurrentPools(spec, 3, HERE)
    assert pools.components == plain.components
    for mine in (*plain.delta, *plain.conv):
        mine.normal_()
    row = plain.read(1)
    row.flags.writeable = False
    parts = StateLayout(0, plain.components, 0).split({ROW: row})
    by_layer = [pool for pair in zip(plain.delta, plain.conv, strict=True) for pool in pair]
    for (name, source), pool in zip(parts.items(), by_layer, strict=True):
        assert source.tobytes() == pool[1].numpy().tobytes()
        pools.write(2, name, source)
    assert np.array_equal(pools.read(2), row)
    pools.copy(2, 0)
    assert np.array_equal(pools.read(0), row)
    pools.fill(np.array([2], dtype=np.int32), float("nan"))
    assert all(pool[2].isnan().all() and not pool[0].isnan().any() for pool in (*pools.delta, *pools.conv))


def test_a_device_without_room_for_the_state_is_an_error_with_numbers(monkeypatch):
    def refuse(*shape, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device.torch, "zeros", refuse)
    with pytest.raises(OutOfDeviceMemory, match=r"9 KV pages and 2 recurrent rows: needs"):
        device.device_pools(make_spec(), PAGES, PAGE, 2, HERE, Arrivals(HERE))
