"""The offloaded engine on the Triton kernels, interpreted on host memory: the same models, the same answers, the same slots."""

from __future__ import annotations

import pytest

from engine.moe.dispatch import fetch_table
from tests.engine.checkpoints import Lane, pools, step
from tests.engine.gpu.models import PAGES, TYPES, check_slots, close, device_pools, directory, offloaded, reference, tokens

pytest.importorskip("triton", reason="needs triton")
from engine.kernels.triton import config


@pytest.fixture(autouse=True)
def _few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a moment for each block, so keys are divided into fewer parts than a GPU wants."""
    monkeypatch.setattr(config, "decode_splits", lambda batch: 2)
    monkeypatch.setattr(config, "prefill_splits", lambda blocks: 2)


def check(model_type, fetches, parts, place, taken=0):
    want = reference(model_type, place)
    state, lane = pools(want.spec), Lane(PAGES, 1)
    with offloaded(directory(model_type, place), kernels="triton", slots=7) as model:
        experts = model.experts
        assert experts is not None
        experts.set_table(fetch_table(fetches, 8), taken)
        own, mine = device_pools(model), Lane(PAGES, 1)
        for part in parts:
            (expected,) = step(want, state, [(lane, part)])
            (got,) = step(model, own, [(mine, part)])
            assert close(got, expected, 2e-4)
            check_slots(experts)
        fetched, on_cpu, _, misses = experts.totals()
        assert fetched + on_cpu == misses > 0
        assert (on_cpu > 0) == (fetches >= 0)


@pytest.mark.slow
def test_prefill_and_decode_are_the_references(tmp_path_factory):
    check("qwen3_5_moe", 1, [tokens(1, 1), tokens(9, 2), tokens(1, 3)], tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("fetches", [0, 1])
def test_the_device_takes_a_part_of_what_the_cpu_has(fetches, tmp_path_factory):
    check("qwen3_5_moe", fetches, [tokens(1, 1), tokens(3, 2), tokens(1, 3)], tmp_path_factory, taken=16)


@pytest.mark.slow
@pytest.mark.parametrize("fetches", [-1, 1])
@pytest.mark.parametrize("model_type", TYPES)
def test_long_suffixes_too(model_type, fetches, tmp_path_factory):
    check(model_type, fetches, [tokens(1, 1), tokens(19, 2), tokens(1, 3), tokens(70, 5), tokens(1, 6)], tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_batches_decode_together(model_type, tmp_path_factory):
    want = reference(model_type, tmp_path_factory)
    own, lanes = pools(want.spec, pages=48, rows=12), [Lane(range(8 * i, 8 * i + 8), i) for i in range(3)]
    prompts, turns = [tokens(3 + i, i) for i in range(3)], [tokens(1, 9 + i) for i in range(3)]
    expected = step(want, own, list(zip(lanes, prompts, strict=True))) + step(want, own, list(zip(lanes, turns, strict=True)))
    with offloaded(directory(model_type, tmp_path_factory), kernels="triton", slots=6) as model:
        own, lanes = device_pools(model, pages=48, rows=12), [Lane(range(8 * i, 8 * i + 8), i) for i in range(3)]
        got = step(model, own, list(zip(lanes, prompts, strict=True))) + step(model, own, list(zip(lanes, turns, strict=True)))
    for mine, theirs in zip(got, expected, strict=True):
        assert close(mine, theirs, 2e-4)
