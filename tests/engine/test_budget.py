"""Division of memory, as arithmetic; sizes against the published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import (
    DeviceSizes,
    device_sizes,
    kv_token_bytes,
    pass_tokens,
    pool_sizes,
    state_row_bytes,
    vram_budget,
)
from engine.config import EngineConfig, Machine
from engine.errors import InvalidRequest, OutOfDeviceMemory
from engine.models.base import LayerSpec
from tests.fakes.hash_model import make_spec

GB = 10**9
MACHINE = Machine(cores=4, available_bytes=1 << 26)


def test_sizes_of_a_large_hybrid_model():
    """Qwen3.6-35B-A3B: 10 attention and 30 delta layers, 20,480 B of KV per token, 61.4 MiB of state."""
    layers = tuple(LayerSpec(i, "attention" if i % 4 == 3 else "delta", i // 4 if i % 4 == 3 else i, True) for i in range(40))
    spec = replace(
        make_spec(),
        layers=layers,
        kv_heads=2,
        head_dim=256,
        dtype=torch.bfloat16,
        H_v=32,
        d_k=128,
        d_v=128,
        conv_dim=2 * 16 * 128 + 32 * 128,
        conv_kernel=4,
    )
    assert kv_token_bytes(spec) == 20_480
    assert round(state_row_bytes(spec) / 2**20, 1) == 61.4


@given(
    memory=st.integers(0, 10**9),
    kv=st.integers(1, 50_000),
    row=st.integers(0, 10**7),
    page=st.sampled_from([1, 16, 64]),
    rows=st.integers(1, 16),
    context=st.integers(1, 100_000),
)
def test_what_is_given_fits_the_memory_or_is_the_least_that_works(memory, kv, row, page, rows, context):
    sizes = pool_sizes(
        memory_bytes=memory,
        kv_token_bytes=kv,
        state_row_bytes=row,
        page_size=page,
        max_rows=rows,
        max_context=context,
        kv_tokens=None,
        snapshot_rows=None,
    )
    assert sizes.pages >= 1
    assert sizes.rows == (rows + sizes.snapshot_rows if row else 0)
    assert 1 <= sizes.max_context <= min(context, sizes.pages * page)
    assert sizes.pages <= rows * -(-context // page)
    least = sizes.pages == 1 or (row > 0 and sizes.snapshot_rows == 1)
    assert least or sizes.pages * page * kv + sizes.rows * row <= memory


def test_resolve_decides_everything_and_changes_nothing_that_was_given():
    config = EngineConfig(kv_tokens=1000, threads=3)
    resolved = config.resolve(MACHINE, make_spec())
    assert config.kv_tokens == 1000
    assert resolved.kv_tokens == 1024, "rounded up to whole pages"
    assert (resolved.threads, resolved.step_tokens, resolved.dtype) == (3, 512, "float32")
    assert resolved.max_context == 1024
    fields = {name: getattr(resolved, name) for name in EngineConfig.__dataclass_fields__}
    assert [name for name, value in fields.items() if value == "auto"] == ["slots", "expert_mode", "elastic"], (
        "resident, and seen while serving"
    )


def test_resolve_without_a_model_leaves_what_only_the_model_tells():
    resolved = EngineConfig().resolve(MACHINE)
    assert (resolved.threads, resolved.memory_bytes) == (4, 1 << 24)
    assert (resolved.kv_tokens, resolved.dtype) == ("auto", "auto")


@pytest.mark.parametrize("field", ["page_size", "chunk_tokens", "max_rows", "threads", "kv_tokens"])
def test_settings_out_of_range_are_refused_by_name(field):
    with pytest.raises(InvalidRequest, match=f"{field}: got 0"):
        EngineConfig(**{field: 0})


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("max_rows", "x", "an integer"),
        ("max_rows", True, "an integer"),
        ("chunk_tokens", 1.5, "an integer"),
        ("max_context", "all", 'an integer or "auto"'),
        ("backend", "gpu", '"cpu" or "exact" or "reference" or "cuda"'),
        ("elastic", False, '"auto" or "manual" or "off"'),
        ("verify_weights", "no", "true or false"),
        ("pass_tokens", "many", "an integer or nothing"),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_name(field, value, accepted):
    """They come from files. A worker that breaks on one would be started again and again."""
    with pytest.raises(InvalidRequest) as refusal:
        EngineConfig(**{field: value})
    assert str(refusal.value) == f"{field}: got {value!r}, accepted: {accepted}"


def test_this_machine_has_cores_and_memory():
    here = Machine.here()
    assert here.cores >= 1
    assert here.available_bytes > 0


sizes_of_devices = {
    "budget_bytes": st.integers(0, 10**11),
    "record_bytes": st.integers(4096, 10**7),
    "experts": st.integers(0, 12_000),
    "top_k": st.integers(1, 16),
    "kv_token_bytes": st.integers(0, 50_000),
    "state_row_bytes": st.integers(0, 10**8),
    "page_size": st.sampled_from([16, 64]),
    "max_rows": st.integers(1, 16),
    "max_context": st.integers(1, 300_000),
}


@given(
    **sizes_of_devices,
    kv_tokens=st.none() | st.integers(1, 100_000),
    snapshot_rows=st.none() | st.integers(0, 64),
    slots=st.none() | st.integers(1, 12_000),
)
def test_what_is_put_on_a_device_fits_or_is_refused_with_numbers(**given_sizes):
    refused: OutOfDeviceMemory | None = None
    try:
        sizes = device_sizes(layers=1, **given_sizes)
    except OutOfDeviceMemory as error:
        refused = error
    if refused is not None:
        assert refused.needed_bytes > refused.free_bytes >= 0
        return
    page, record = given_sizes["page_size"], given_sizes["record_bytes"]
    rows = given_sizes["max_rows"] + sizes.snapshot_rows if given_sizes["state_row_bytes"] else 0
    used = sizes.pages * page * given_sizes["kv_token_bytes"] + sizes.slots * record + rows * given_sizes["state_row_bytes"]
    assert used + sizes.left_bytes == given_sizes["budget_bytes"]
    assert sizes.left_bytes >= 0
    assert sizes.slots <= given_sizes["experts"]
    assert sizes.max_context <= sizes.pages * page
    if given_sizes["kv_tokens"] is not None:
        assert sizes.pages == -(-given_sizes["kv_tokens"] // page)
    if given_sizes["slots"] is not None:
        assert sizes.slots == min(given_sizes["slots"], given_sizes["experts"])


def qwen36(budget_bytes: int, **changes: int | None) -> DeviceSizes:
    """Qwen3.6-35B-A3B in bf16."""
    fields: dict[str, int | None] = {"kv_tokens": None, "snapshot_rows": None, "slots": None}
    return device_sizes(
        budget_bytes=budget_bytes,
        record_bytes=6_291_456,
        experts=40 * 256,
        top_k=8,
        layers=40,
        kv_token_bytes=20_480,
        state_row_bytes=64_400_000,
        page_size=64,
        max_rows=4,
        max_context=262_144,
        **(fields | changes),  # type: ignore[arg-type]
    )


def test_an_agents_context_comes_first_where_it_fits_and_experts_take_the_rest():
    medium = qwen36(20 * 10**9)
    assert medium.pages * 64 == 65_536
    assert medium.slots == (20 * 10**9 - 65_536 * 20_480 - (4 + medium.snapshot_rows) * 64_400_000) // 6_291_456
    small = qwen36(2 * 10**9)
    assert small.pages * 64 < 65_536
    assert small.pages * 64 * 20_480 <= 10**9
    large = qwen36(100 * 10**9)
    assert large.slots == 40 * 256
    assert large.pages * 64 == 4 * 262_144
    assert large.max_context == 262_144


@pytest.mark.parametrize(
    ("free", "total", "wanted", "budget"),
    [
        (8 * GB, 8 * GB, None, 8 * GB - 8 * GB // 20),
        (100 * GB, 140 * GB, None, 100 * GB - (512 << 20)),
        (8 * GB, 8 * GB, 3 * GB, 3 * GB),
        (2 * GB, 8 * GB, 3 * GB, 2 * GB),
    ],
)
def test_the_budget_leaves_a_reserve_unless_it_was_set(free, total, wanted, budget):
    assert vram_budget(free, total, wanted) == budget


@given(budget=st.integers(0, 10**12), token=st.integers(1, 10**6), context=st.integers(1, 10**6))
def test_a_pass_is_whole_steps_of_64_within_its_share(budget, token, context):
    tokens = pass_tokens(budget, token, context)
    assert tokens % 64 == 0
    assert 64 <= tokens <= 16_384
    assert tokens == 64 or tokens * token <= budget // 16
