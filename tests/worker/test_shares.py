"""How a machine is divided among workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.config import ModelConfig
from agentserve.worker.shares import shares, visible_device

models = st.builds(
    ModelConfig,
    name=st.text("ab", min_size=1, max_size=3),
    ram_cache_bytes=st.integers(0, 1 << 40),
    workers=st.integers(0, 5),
    gpus=st.lists(st.integers(0, 3), max_size=4).map(tuple),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
)


@given(served=st.lists(models, min_size=1, max_size=4))
def test_workers_of_a_model_have_its_memory_together_and_no_more(served: list[ModelConfig]) -> None:
    every = shares(served)
    assert len(every) == sum(model.worker_count for model in served)
    assert {share.sharers for share in every} == {len(every)}
    for model in served:
        own = [share for share in every if share.model is model]
        total = sum(share.ram_cache_bytes for share in own)
        assert model.ram_cache_bytes - len(own) < total <= model.ram_cache_bytes
        assert [share.number for share in own] == list(range(model.worker_count))


@given(served=st.lists(models, min_size=1, max_size=4))
def test_who_uses_a_device_knows_how_many_do(served: list[ModelConfig]) -> None:
    every = shares(served)
    for share in every:
        users = [one for one in every if one.model.device != "cpu" and (one.gpu or 0) == (share.gpu or 0)]
        assert share.gpu_sharers == (len(users) if share.model.device != "cpu" else 1)


def test_workers_take_the_named_devices_in_turn() -> None:
    (model,) = [ModelConfig(name="m", gpus=(2, 5), workers=3)]
    assert [share.gpu for share in shares([model])] == [2, 5, 2]
    assert [share.gpu for share in shares([ModelConfig(name="m", gpus=(2, 5))])] == [2, 5]


def test_a_device_is_counted_among_those_that_the_process_may_see() -> None:
    assert visible_device(1, None) == "1"
    assert visible_device(1, "4, GPU-7") == "GPU-7"
    with pytest.raises(ValueError, match=r"model\.gpus: got 2; CUDA_VISIBLE_DEVICES lists 2"):
        visible_device(2, "4,5")
