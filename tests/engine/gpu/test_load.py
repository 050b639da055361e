"""Loading: which kernels serve, and what must not be there twice."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from engine.config import EngineConfig
from engine.errors import Unsupported
from engine.gpu import load
from engine.kernels import plain
from tests.engine.gpu.models import directory, offloaded


def test_the_plain_kernels_have_every_operation():
    assert all(callable(getattr(plain, name)) for name in load.OPERATIONS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_that_lack_an_operation_are_refused_by_its_name(monkeypatch):
    empty = ModuleType("engine.kernels.triton")
    monkeypatch.setattr(load.importlib, "import_module", lambda name: empty)
    with pytest.raises(Unsupported, match="lack gather, add_norm"):
        load.choose_kernels(EngineConfig(backend="cuda"))


def test_the_embedding_and_a_tied_head_lie_on_the_device_once(tmp_path):
    from tests.engine.checkpoints import make, save

    save(make("qwen3_moe", tie_word_embeddings=True), tmp_path)
    with offloaded(tmp_path, slots=6) as model:
        decoder = model._decoder
        assert decoder.embedding.data_ptr() == decoder.head.weight.data_ptr()


def test_a_bank_whose_experts_are_all_resident_is_given_back(tmp_path_factory):
    with offloaded(directory("qwen3_moe", tmp_path_factory)) as model:
        assert model.experts is not None
        assert model.experts.resident
        assert not model.experts.bank.bytes.any()
        assert model.experts.memory.any()
