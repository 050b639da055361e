"""`agentserve calibrate` on a machine without a device: the CPU is measured, and what could not be is said."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from agentserve import config
from agentserve.cli import calibrate, doctor
from agentserve.cli.main import app
from engine.moe import profile


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_it_measures_the_cpu_for_each_format_and_says_what_it_did_not(tmp_path):
    run = CliRunner().invoke(app, ["calibrate", "--state-dir", str(tmp_path), "--seconds", "0.02", "--memory-mb", "8"])
    assert run.exit_code == 0, run.output
    assert "device: none" in run.output
    assert "bf16: experts of 192 x 64" in run.output
    assert run.output.count("CPU alone: ") == run.output.count("not measured: the link alone") == 2
    (entry,) = json.loads((tmp_path / "rates.json").read_text())["machines"].values()
    assert set(entry) == {"bfloat16 192x64", "float32 192x64"}
    assert all(values["cpu_mbs"] > 0 for values in entry.values())


def test_several_memory_nodes_are_named(monkeypatch, tmp_path):
    class Two:
        def __init__(self, path: str) -> None:
            pass

        def glob(self, pattern: str):
            return [tmp_path / "node0", tmp_path / "node1"]

    assert calibrate.numa_lines() == [] or "NUMA" in calibrate.numa_lines()[0]
    monkeypatch.setattr(calibrate, "Path", Two)
    assert "2 memory nodes" in calibrate.numa_lines()[0]


def speed(state_dir, **model) -> doctor.Finding:
    chosen = config.load(flags={"state_dir": str(state_dir), **{f"model.{name}": value for name, value in model.items()}})
    return doctor.check_speed(chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_doctor_says_what_limits_speed_once_it_was_measured(tmp_path):
    before = speed(tmp_path, threads=1)
    assert "agentserve calibrate" in before.hint
    profile.save(tmp_path / "rates.json", profile.machine_key(None, 1), "any", {"cpu_mbs": 10_000})
    after = speed(tmp_path, threads=1)
    assert "the CPU reads 10.0 GB/s: at most about" in after.what
    weights = doctor._weights(config.load(flags={"state_dir": str(tmp_path)}))
    assert weights is not None
    most = 10_000 * 10**6 // (weights.active_bytes + weights.other_bytes)
    assert f"about {most} tokens/s" in after.what
    assert 0 < weights.active_bytes < weights.experts_bytes


def test_doctor_on_a_machine_whose_experts_do_not_fit_names_both_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "board")
    weights = doctor._weights(config.load(flags={"state_dir": str(tmp_path)}))
    assert weights is not None
    room = weights.other_bytes + weights.experts_bytes // 4
    rates = {"cpu_mbs": 90_000, "both_link_mbs": 49_000, "both_cpu_mbs": 61_000}
    profile.save(tmp_path / "rates.json", profile.machine_key("board", 1), "any", rates)
    found = speed(tmp_path, threads=1, vram_bytes=room)
    assert "25% of the experts fit" in found.what
    assert "110.0 GB/s (link and CPU together)" in found.what
    assert "all experts fit" in speed(tmp_path, threads=1, vram_bytes=10 * room).what


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.parametrize(("device", "verdict"), [("auto", "ok"), ("cpu", "ok"), ("cuda", "fail")])
def test_doctor_names_a_missing_device_only_where_it_is_wanted(device, verdict, tmp_path):
    chosen = config.load(flags={"state_dir": str(tmp_path), "model.device": device})
    assert doctor.check_device(chosen).verdict == verdict
