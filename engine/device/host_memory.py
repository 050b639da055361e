"""Virtual memory of the host device: an ordinary buffer, poisoned wherever nothing is mapped, so that a stale read shows.

Bytes of 0xFF are NaN in f32 and in bf16, and an impossible integer in most tables. What is newly mapped is poisoned too: on a
device it holds whatever its last owner left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.errors import OutOfDeviceMemory

_POISON = 0xFF


class _Memory(Protocol):
    def free_bytes(self) -> int: ...


class HostVirtualMemory:
    """See base.VirtualMemory. created_bytes: of pieces that were not released."""

    granularity = 4096

    def __init__(self, device: _Memory) -> None:
        self._device = device
        self._reserved: dict[int, torch.Tensor] = {}
        self._pieces: dict[int, int] = {}
        self._behind: dict[int, int] = {}
        self._next = 1

    @property
    def created_bytes(self) -> int:
        return sum(self._pieces.values())

    def reserve(self, nbytes: int) -> int:
        # A page more, so that the address is a multiple of the granularity as a device's is.
        buffer = torch.full((nbytes + self.granularity,), _POISON, dtype=torch.uint8)
        skip = -buffer.data_ptr() % self.granularity
        buffer = buffer[skip : skip + nbytes]
        self._reserved[buffer.data_ptr()] = buffer
        return buffer.data_ptr()

    def free(self, address: int, nbytes: int) -> None:
        assert not any(address <= at < address + nbytes for at in self._behind), "something is mapped there"
        assert self._reserved.pop(address).numel() == nbytes

    def create(self, nbytes: int) -> int:
        if nbytes > self._device.free_bytes():
            raise OutOfDeviceMemory("a piece of memory", nbytes, self._device.free_bytes())
        handle, self._next = self._next, self._next + 1
        self._pieces[handle] = nbytes
        return handle

    def release(self, handle: int) -> None:
        assert handle not in self._behind.values(), "released while it is mapped"
        del self._pieces[handle]

    def map(self, address: int, handles: Sequence[int], nbytes: int) -> None:
        for at, handle in enumerate(handles):
            where = address + at * nbytes
            assert self._pieces[handle] == nbytes
            assert where not in self._behind, "mapped twice"
            assert handle not in self._behind.values(), "one piece in two places"
            self._behind[where] = handle
        self._fill(address, len(handles) * nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        covered = 0
        while covered < nbytes:
            covered += self._pieces[self._behind.pop(address + covered)]
        assert covered == nbytes, "part of a piece was unmapped"
        self._fill(address, nbytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        assert address in self._behind, "an address without memory cannot be wrapped on a device"
        return self._reserved[address][:nbytes]

    def _fill(self, address: int, nbytes: int) -> None:
        for base, buffer in self._reserved.items():
            if base <= address < base + buffer.numel():
                buffer[address - base : address - base + nbytes].fill_(_POISON)
                return
        raise AssertionError("an address that was not reserved")
