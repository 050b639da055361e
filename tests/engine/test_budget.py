"""Division of memory, as arithmetic; sizes against the published ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import kv_token_bytes, pool_sizes, state_row_bytes
from engine.config import EngineConfig, Machine
from engine.errors import InvalidRequest
from engine.models.base import LayerSpec
from tests.fakes.hash_model import make_spec

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
    assert [name for name, value in fields.items() if value == "auto"] == ["slots"], "auto slots means all resident"


def test_resolve_without_a_model_leaves_what_only_the_model_tells():
    resolved = EngineConfig().resolve(MACHINE)
    assert (resolved.threads, resolved.memory_bytes) == (4, 1 << 24)
    assert (resolved.kv_tokens, resolved.dtype) == ("auto", "auto")


@pytest.mark.parametrize("field", ["page_size", "chunk_tokens", "max_rows", "threads", "kv_tokens"])
def test_settings_out_of_range_are_refused_by_name(field):
    with pytest.raises(InvalidRequest, match=f"{field}: got 0"):
        EngineConfig(**{field: 0})


def test_this_machine_has_cores_and_memory():
    here = Machine.here()
    assert here.cores >= 1
    assert here.available_bytes > 0
