"""Packs a record, and checks what goes into one: types, shapes, strides, whether there are enough rows."""

from __future__ import annotations

import torch

from engine.errors import ShapeMismatch
from engine.kernels import native

Tensor = torch.Tensor

_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_NO_POINTERS = (0,) * 14
_INT_MAX = 2**31 - 1


def record(code: int, flags: int, pointers: tuple[int, ...], numbers: tuple[int, ...], floats: tuple[float, ...] = ()) -> bytes:
    if max(numbers) > _INT_MAX:
        raise ShapeMismatch(f"a dimension or stride of {max(numbers)} exceeds the kernels' limit of {_INT_MAX}")
    return native.RECORD.pack(
        code,
        flags,
        *pointers,
        *_NO_POINTERS[len(pointers) :],
        *numbers,
        *_NO_POINTERS[len(numbers) :],
        *floats,
        *_NO_POINTERS[len(floats) : 4],
    )


def bit(position: int, name: str, tensor: Tensor) -> int:
    """The flag that says whether a tensor is bf16."""
    bf16 = _BF16.get(tensor.dtype)
    if bf16 is None:
        raise ShapeMismatch(f"{name} is {tensor.dtype}, accepted: float32, bfloat16")
    return bf16 << position


def pointer(name: str, tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        raise ShapeMismatch(f"{name} is on {tensor.device}, the CPU kernels need it in host memory")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeMismatch(f"{name} has stride {tensor.stride(-1)} in its last dimension, must be 1")
    return tensor.data_ptr()


def whole(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    if not tensor.is_contiguous():
        raise ShapeMismatch(f"{name} of shape {list(tensor.shape)} is not contiguous")
    if dtype is not None and tensor.dtype != dtype:
        raise ShapeMismatch(f"{name} is {tensor.dtype}, must be {dtype}")
    if tensor.device.type != "cpu":
        raise ShapeMismatch(f"{name} is on {tensor.device}, the CPU kernels need it in host memory")
    return tensor.data_ptr()


def rows_whole(name: str, tensor: Tensor) -> int:
    """Each row contiguous, at any distance from the next."""
    if len(tensor):
        whole(name, tensor[0])
    return tensor.data_ptr()


def expect(name: str, tensor: Tensor, *shape: int | None) -> None:
    got = tensor.shape
    if len(got) != len(shape) or any(want is not None and want != have for want, have in zip(shape, got, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeMismatch(f"{name} has shape {list(got)}, expected [{wanted}]")


def enough(count: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[0] < count:
            raise ShapeMismatch(f"{name} has {tensor.shape[0]} rows, {count} are needed")


def row_head(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0
