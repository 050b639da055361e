"""`agentserve calibrate` on a machine without a device: the CPU is measured, and what could not be is said."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from agentserve.cli import calibrate
from agentserve.cli.main import app


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
