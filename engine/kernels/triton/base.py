"""What every kernel file uses: launching, a product that means the same interpreted, scratch memory that graphs may keep.

Kernels do not specialize by what follows the number of tokens (do_not_specialize): a prompt of another length must not meet the
compiler.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from engine.kernels.triton import config

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether kernels run under Triton's interpreter, on CPU tensors."""

_workspaces: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}
_outgrown: list[torch.Tensor] = []


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a · b, accumulated in f32. The interpreter multiplies bf16 as integers, so there operands are widened first."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


class Launches:
    """Compiled kernels by what their arguments are, so that all but the first launch of a kind skip Triton's own binding, its
    hooks and its search for device and stream, which cost 30 to 60 µs of Python: a short prefill makes hundreds of launches,
    and the device waits for each.

    Keys are at least as fine as Triton's own (types, alignment of pointers to 16 bytes, integers that are 1, multiples of 16 or
    wider than 32 bits), so a kernel is never used for arguments that it was not compiled for. One device a process.
    """

    def __init__(self) -> None:
        self._ready: dict[tuple[object, ...], tuple[Any, Any, Any, tuple[object, ...]]] = {}
        self._stream: Callable[[], int] | None = None

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
        key = (id(kernel), *options.items(), *_kinds(args))
        found = self._ready.get(key)
        if found is None:
            compiled = kernel[grid](*args, **options)
            if compiled is not None:
                rest = kernel.arg_names[len(args) :]
                if all(name in options for name in rest):
                    constants = tuple(options[name] for name in rest)
                    self._ready[key] = compiled.run, compiled.function, compiled.packed_metadata, constants
            return
        run, function, metadata, constants = found
        if self._stream is None:
            self._stream = _current_stream()
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, self._stream(), function, metadata, None, None, None, *args, *constants)


def _current_stream() -> Callable[[], int]:
    """Which stream is current on this process's device, as a function to ask again and again."""
    return partial(driver.active.get_current_stream, driver.active.get_current_device())


def _kinds(values: tuple[object, ...]) -> list[object]:
    """What Triton could specialize a kernel by. A loop without calls: it runs for each of some ten arguments of each launch."""
    kinds: list[object] = []
    for value in values:
        if type(value) is int:
            if value == 1:
                kinds.append(1)
            else:
                kinds.append((value & 15 == 0, -(2**31) <= value < 2**31, value >= 2**63))
        elif isinstance(value, torch.Tensor):
            kinds += (value.dtype, value.data_ptr() & 15 == 0)
        elif isinstance(value, float):
            kinds.append(type(value))
        else:
            kinds += (type(value), value)
    return kinds


_launches = Launches()
reuse_compiled = not INTERPRETED.value
"""Whether launches go past Triton's binding. False where nothing is really launched."""


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """kernel[grid](*args, **options); nothing if the grid is empty."""
    if not all(grid):
        return
    if reuse_compiled:
        _launches(kernel, grid, *args, **options)
    else:
        kernel[grid](*args, **options)


def precision(dtype: torch.dtype) -> str:
    """How products of operands of this type round: f32 exactly, bf16 needs no choice, its f32 intermediates take tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def workspace(purpose: str, numel: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """At least `numel` elements of scratch on like's device, kept for ever: the same memory for every call of this purpose.

    Contents are undefined. Launches that may overlap must not share a purpose. Growing takes new memory and leaves the old to
    the graphs that were captured with it, so run the largest shape first.
    """
    key = (purpose, like.device, dtype)
    held = _workspaces.get(key)
    if held is None or held.numel() < numel:
        if held is not None:
            _outgrown.append(held)
        held = _workspaces[key] = torch.empty(max(1, numel), dtype=dtype, device=like.device)
    return held


@cache
def shared_bytes() -> int:
    """Shared memory that one block may have on this process's device."""
    return 99 * 1024 if INTERPRETED else config.shared_bytes(int(driver.active.get_current_target().arch))
