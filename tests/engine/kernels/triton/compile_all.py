"""Compiles every launch of the given cases for a GPU that is not there, and prints what ptxas says of each.

    python tests/engine/kernels/triton/compile_all.py 90 [name …]

Runs the real wrappers on meta tensors of real geometry, so that specialization is what a device would see; only the launch is
left out. Needs a process of its own: the interpreter must be off. One JSON line per compiled kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

WIDE_LOAD = r"ld\.[\w.:]*global[\w.:]*\.(?:v4\.[bu]32|v2\.[bu]64)|cp\.async\.cg"


class AbsentDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(int(self._target.arch), 10)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and spilled bytes (stack) of a thread, from the cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", said)}
    return {"registers": found["reg"], "stack": found["stack"]}


def main() -> None:
    capability, wanted = int(sys.argv[1]), set(sys.argv[2:])
    driver.set_active(AbsentDevice(capability))  # type: ignore[arg-type]
    launch = JITFunction.run
    compiled: list[Any] = []

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    from engine.kernels.triton import base

    base.reuse_compiled = False
    from benchmarks.gpu.kernel_cases import QWEN36, cases

    for case in cases(QWEN36, "meta", torch.bfloat16):
        if wanted and case.name not in wanted:
            continue
        compiled.clear()
        with contextlib.redirect_stdout(sys.stderr):
            case.run()
        for kernel in compiled:
            line = {"case": case.name, "kernel": kernel.metadata.name, "warps": kernel.metadata.num_warps}
            line |= {"shared": kernel.metadata.shared, **resources(kernel.asm["cubin"])}
            line["wide_loads"] = len(
                re.findall(r"ld\.[\w.:]*global[\w.:]*\.(?:v4\.[bu]32|v2\.[bu]64)|cp\.async\.cg", kernel.asm["ptx"])
            )
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
