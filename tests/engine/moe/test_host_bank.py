"""Experts are loaded straight into one bank, pinned within bounds, and nothing of its size is held twice."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from engine.device.host import HostDevice
from engine.errors import ShapeMismatch
from engine.moe import host_bank
from engine.moe.host_bank import BankLoader, HostBank, Record
from engine.weights.loader import Weights
from engine.weights.reader import CheckpointReader
from tests.engine.checkpoints import make, save

RECORD = Record(32, 8, torch.float32)


def quiet(fraction: float, what: str) -> None:
    pass


@pytest.mark.parametrize("layout", ["fused", "one tensor an expert"])
def test_loading_fills_the_bank_with_the_checkpoints_experts(layout, tmp_path: Path):
    model = make("qwen3_moe")
    save(model, tmp_path, save_original_format=layout != "fused")
    loader = BankLoader()
    weights = Weights(CheckpointReader(tmp_path), torch.float32, store=loader)
    plain = Weights(CheckpointReader(tmp_path), torch.float32)
    assert f"model.layers.0.mlp.experts.{'gate_up_proj' if layout == 'fused' else '0.up_proj.weight'}" in plain
    for ordinal, layer in enumerate((0, 2)):
        name = f"model.layers.{layer}.mlp.experts"
        gate_up, down = weights.experts(name, 8, 32, 64)
        want = plain.experts(name, 8, 32, 64)
        assert torch.equal(gate_up, want[0])
        assert torch.equal(down, want[1])
        assert loader.bank is not None
        rows = loader.bank.record.views(loader.bank.bytes)
        assert torch.equal(rows.gate_up[8 * ordinal : 8 * ordinal + 8], want[0])
        assert gate_up.data_ptr() == rows.gate_up[8 * ordinal].data_ptr()
    assert loader.bank is not None
    assert loader.bank.rows == 16
    assert weights.digest() == plain.digest()


def test_letting_go_of_a_tensor_leaves_it_readable(tmp_path: Path):
    save(make("qwen3_moe", vocab_size=4000), tmp_path)
    reader = CheckpointReader(tmp_path)
    before = reader.tensor("model.embed_tokens.weight").clone()
    reader.let_go("model.embed_tokens.weight")
    assert torch.equal(reader.tensor("model.embed_tokens.weight"), before)


def test_pinning_goes_step_by_step_and_says_how_far(monkeypatch):
    monkeypatch.setattr(host_bank, "PIN_STEP_BYTES", 4 * RECORD.nbytes)
    bank, device, told = HostBank(10, RECORD), HostDevice(), []
    bank.layer(10, 8, 32, torch.float32)
    bank.pin(device, None, lambda fraction, what: told.append((fraction, what)))
    assert bank.pinned_rows == 10
    assert [fraction for fraction, _ in told] == [0.4, 0.8, 1.0]
    assert "pinning experts" in told[0][1]
    bank.unpin(device)
    assert bank.pinned_rows == 0
    assert device._pinned == {}


@pytest.mark.parametrize(("quota", "limit", "pinned"), [(6, None, 4), (None, 7, 7), (3, None, 0), (100, 0, 0)])
def test_a_quota_or_a_limit_leaves_the_rest_to_the_cpu_and_says_so(quota, limit, pinned, monkeypatch, caplog):
    monkeypatch.setattr(host_bank, "PIN_STEP_BYTES", 4 * RECORD.nbytes)
    size = RECORD.nbytes
    bank, device = HostBank(10, RECORD), HostDevice(pin_quota=None if quota is None else quota * size)
    bank.layer(10, 8, 32, torch.float32)
    with caplog.at_level(logging.WARNING):
        bank.pin(device, None if limit is None else limit * size, quiet)
    assert bank.pinned_rows == pinned
    (record,) = [r for r in caplog.records if r.name == "engine.moe.host_bank"]
    assert "ulimit -l" in record.getMessage()
    assert ("quota of" if quota and quota < 100 else "limit of") in record.getMessage()


def test_no_run_reads_from_two_pinned_parts(monkeypatch):
    monkeypatch.setattr(host_bank, "PIN_STEP_BYTES", 4 * RECORD.nbytes)
    bank = HostBank(11, RECORD)
    bank.layer(11, 8, 32, torch.float32)
    assert list(bank.runs(2, 11)) == [slice(2, 11)]
    bank.pin(HostDevice(), 10 * RECORD.nbytes, quiet)
    assert list(bank.runs(0, 11)) == [slice(0, 4), slice(4, 8), slice(8, 10), slice(10, 11)]
    assert list(bank.runs(5, 9)) == [slice(5, 8), slice(8, 9)]
    assert list(bank.runs(6, 6)) == []


def test_a_record_of_another_shape_or_too_many_are_refused():
    bank = HostBank(4, RECORD)
    with pytest.raises(ShapeMismatch, match="do not fit"):
        bank.layer(2, 16, 32, torch.float32)
    bank.layer(3, 8, 32, torch.float32)
    with pytest.raises(ShapeMismatch, match="cannot take"):
        bank.layer(2, 8, 32, torch.float32)


def test_a_discarded_bank_takes_no_memory():
    record = Record(256, 256, torch.float32)
    bank = HostBank(16, record)
    bank.layer(16, 256, 256, torch.float32)
    bank.bytes.fill_(1)
    before = _resident_bytes()
    bank.discard()
    assert before - _resident_bytes() >= 8 * record.nbytes
    assert not bank.bytes.any()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/meminfo")
def test_room_for_experts_that_never_come_costs_nothing():
    memory = int(next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line).split()[1]) << 10
    record = Record(2048, 512, torch.bfloat16)
    bank = HostBank(2 * memory // record.nbytes, record)
    bank.layer(2, 512, 2048, torch.bfloat16).gate_up.fill_(1)
    assert bank.bytes.shape == (2, record.nbytes)
