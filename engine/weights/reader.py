"""Reads safetensors checkpoints: one file, or shards named by an index. Zero-copy: tensors are views of the mapped files.

Knows names, dtypes and bytes, not what a model wants; see loader.py. Nothing here ever unpickles.
Format: 8-byte little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, data.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import CheckpointError

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_LIBC = ctypes.CDLL(None)
_PAGE = mmap.PAGESIZE
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk. dtype is safetensors' own name (BF16, F32 …); offsets are bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int


class CheckpointReader:
    """All tensors of a checkpoint directory, by name.

    Raises CheckpointError, naming the file, if nothing is there, a shard is missing, or a file is truncated or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, StoredTensor] = {}
        for file in _shards(directory):
            self._map(file)
        if not self._tensors:
            raise CheckpointError(f"{directory}: the checkpoint holds no tensors")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def entry(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing") from None

    def advise(self, advice: Callable[[torch.Tensor], object]) -> None:
        """Call advice(bytes of a file) for each mapped file. To be done before any tensor is read."""
        for mapped in self._maps.values():
            advice(mapped)

    def raw(self, name: str) -> torch.Tensor:
        """The tensor's bytes, uint8 [nbytes], a view of the mapped file. Never write into it."""
        stored = self.entry(name)
        return self._maps[stored.file][stored.start : stored.end]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, a view of the mapped file (a copy only where the file is not aligned for its dtype)."""
        stored = self.entry(name)
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(f"{stored.file}: tensor {name!r} has dtype {stored.dtype}, which this reader does not know")
        data = self._maps[stored.file][stored.start : stored.end]
        if stored.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(stored.shape)

    def let_go(self, name: str) -> None:
        """Tell the system that the tensor's pages are not needed any more. Reading it again reads the file."""
        stored = self.entry(name)
        mapped = self._maps[stored.file]
        # Whole pages inside only: its neighbours on the first and last page may still be wanted.
        begin = -(-(mapped.data_ptr() + stored.start) // _PAGE) * _PAGE
        end = (mapped.data_ptr() + stored.end) // _PAGE * _PAGE
        if end > begin:
            _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)

    def _map(self, file: str) -> None:
        path = self.directory / file
        try:
            size = path.stat().st_size
            header, data_start = _header(path, size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if name in self._tensors:
                raise CheckpointError(f"{path}: tensor {name!r} is also in {self._tensors[name].file}")
            stored = _entry(path, name, about, data_start)
            if stored.end > size:
                raise CheckpointError(f"{path}: truncated: tensor {name!r} ends at byte {stored.end}, the file has {size}")
            self._tensors[name] = stored
        self._maps[file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _shards(directory: Path) -> list[str]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory")
    index = directory / _INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = sorted({str(file) for file in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{index}: not a safetensors index (no weight_map)") from None
        for file in files:
            if Path(file).name != file:
                raise CheckpointError(f"{index}: shard {file!r} is not a plain file name")
            if not (directory / file).is_file():
                raise CheckpointError(f"{directory}: shard {file} is named by the index but missing")
        return files
    if (directory / _SINGLE).exists():
        return [_SINGLE]
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle file and is never loaded" if pickles else ""
    raise CheckpointError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there{hint}")


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: truncated or not safetensors: {size} bytes, header says {length}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not JSON")
    return header, 8 + length


def _entry(path: Path, name: str, about: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = str(about["dtype"]), tuple(int(n) for n in about["shape"]), about["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header's entry for {name!r} is malformed") from None
    known = _DTYPES.get(dtype)
    if start < 0 or end < start or (known is not None and math.prod(shape) * known.itemsize != end - start):
        raise CheckpointError(
            f"{path}: tensor {name!r} of dtype {dtype} and shape {list(shape)} cannot have {end - start} bytes"
        )
    return StoredTensor(name, dtype, shape, path.name, data_start + start, data_start + end)
