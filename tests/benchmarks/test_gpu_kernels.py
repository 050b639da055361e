"""The kernels' benchmark: every case runs, at tiny shapes under the interpreter where there is no GPU, and leaves no NaN."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
from benchmarks.gpu import kernel_variants
from benchmarks.gpu.kernel_cases import TINY, Case, cases
from benchmarks.gpu.kernels import floor_us, main, table
from engine.kernels.triton import config


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the benchmark itself is the test")
def test_every_case_runs_at_tiny_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    ran = capsys.readouterr().out.splitlines()
    names = [case.name for case in cases(TINY, "meta", torch.bfloat16)]
    assert ran == [f"{name}: ran" for name in names]
    assert len(set(names)) == len(names) > 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the benchmark itself is the test")
def test_names_pick_cases(capsys: pytest.CaptureFixture[str]) -> None:
    main(["route t", "gather t1"])
    assert capsys.readouterr().out.split("\n")[:-1] == ["route t1: ran", "gather t1: ran", "route t4: ran"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the benchmark itself is the test")
def test_variants_run_beside_what_was_chosen_and_leave_it_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [variant for variant in kernel_variants.VARIANTS if variant.label in ("prepare w8", "scan 16 w4 s3")]
    monkeypatch.setattr(kernel_variants, "VARIANTS", wanted)
    chosen, seen = config.delta_scan, []
    monkeypatch.setattr(config, "delta_scan", lambda *shape: seen.append(chosen(*shape)) or seen[-1])
    before = config.delta_scan
    main(["delta 40", "--variants"])
    assert capsys.readouterr().out.splitlines() == [f"delta 40{way}: ran" for way in ("", " [scan 16 w4 s3]", " [prepare w8]")]
    assert len(seen) == 2, "one of the three has a scan of its own"
    assert config.delta_scan is before


def test_the_floor_is_the_slower_of_bytes_and_arithmetic() -> None:
    nothing = lambda: None  # noqa: E731
    assert math.isclose(floor_us(Case("a", nothing, 4_000_000, 0), 4000, 500), 1.0)
    assert math.isclose(floor_us(Case("b", nothing, 4_000_000, 10**12), 4000, 500), 2000.0)


def test_the_table_shows_figures_and_failures() -> None:
    rows = [{"case": "a", "us": 2.0, "floor_us": 1.0, "over_us": 1.0, "of_floor": 2.0}, {"case": "b", "failed": "no room"}]
    lines = table(rows).splitlines()
    assert lines[1].split() == ["a", "2.0", "1.0", "1.0", "2.0"]
    assert lines[2].split() == ["b", "failed:", "no", "room"]
