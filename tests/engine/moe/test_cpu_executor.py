"""The executor computes the same with and without the C++ library, and says once when it is missing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine.errors import EngineError, ShapeMismatch
from engine.kernels import cpu, native, reference
from engine.moe.banks import ExpertBank
from engine.moe.cpu_executor import CpuExecutor


def bank() -> ExpertBank:
    torch.manual_seed(0)
    return ExpertBank(torch.randn(4, 24, 20) / 4, torch.randn(4, 20, 12) / 4)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 20), torch.tensor([[0, 3], [1, -1], [2, 0], [-1, -1], [3, 1]], dtype=torch.int32), torch.rand(5, 2)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_reason", None)


def test_sums_the_experts_of_this_bank() -> None:
    x, ids, weights = inputs()
    got = CpuExecutor(bank()).forward(x, ids, weights)
    torch.testing.assert_close(got, reference.experts_forward(x, ids, weights, bank().gate_up, bank().down))
    assert not got[3].any()


@pytest.mark.usefixtures("unloaded")
def test_falls_back_to_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "candidates", lambda: [tmp_path / native.FILE_NAME])
    x, ids, weights = inputs()
    with caplog.at_level(logging.WARNING):
        executors = [CpuExecutor(bank()) for _ in range(3)]
        got = executors[2].forward(x, ids, weights)
    assert not executors[0].native
    torch.testing.assert_close(got, reference.experts_forward(x, ids, weights, bank().gate_up, bank().down))
    warnings = [record for record in caplog.records if record.name == "engine.kernels.native"]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0].getMessage()
    with pytest.raises(EngineError, match="not built"):
        cpu.linear(x, x)


@pytest.mark.usefixtures("unloaded")
def test_a_file_that_is_no_library_is_a_reason_and_not_a_crash(tmp_path: Path) -> None:
    broken = tmp_path / native.FILE_NAME
    broken.write_bytes(b"not an ELF file")
    assert native.load(broken) is None
    assert "cannot be loaded" in str(native.reason())


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, ids, weights = inputs()
    with pytest.raises(ShapeMismatch, match=r"ids \[4, 2\]"):
        CpuExecutor(bank()).forward(x, ids[:4], weights[:4])
