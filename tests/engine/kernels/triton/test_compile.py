"""Every kernel compiles for the GPUs that people have, without a GPU, and fits their shared memory without spilling."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

KERNELS = Path(__file__).resolve().parents[4] / "engine/kernels/triton"
LAUNCH = re.compile(r"launch\(\s*(_\w+),")

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""What one block may have, by compute capability: A100, RTX 4090, H200."""

STACK_BYTES = 64
"""A few bytes of stack are the compiler's own; more is spilled registers."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80, 89])
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_all.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    launched = {name for file in KERNELS.glob("*.py") for name in LAUNCH.findall(file.read_text(encoding="utf-8"))}
    assert {kernel["kernel"] for kernel in kernels} == launched, "some kernel has no case in benchmarks/gpu/kernel_cases.py"
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES[capability], kernel
        assert kernel["stack"] <= STACK_BYTES, kernel
