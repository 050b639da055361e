"""CUDA's virtual memory management, through the driver by ctypes: addresses that stay while the memory behind them changes.

The only file that talks to the driver. torch sees a reservation as one tensor and knows nothing of what is mapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from engine.errors import DeviceError, EngineError, OutOfDeviceMemory, Unsupported

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
_FUNCTIONS = (
    *("cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap"),
    *("cuMemUnmap", "cuMemSetAccess", "cuDeviceGetAttribute", "cuGetErrorString"),
)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Reservation:
    """A reservation as torch takes foreign memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaVirtualMemory:
    """See base.VirtualMemory. Raises Unsupported where the driver or the device lacks it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unsupported(f"virtual memory management: the driver's library cannot be loaded ({error})") from error
        missing = [name for name in _FUNCTIONS if not hasattr(self._driver, name)]
        if missing:
            raise Unsupported(f"virtual memory management: the driver lacks {', '.join(missing)}")
        supported = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), ctypes.c_int(_SUPPORTED), ctypes.c_int(self._index))
        if not supported.value:
            raise Unsupported(f"virtual memory management: {torch.cuda.get_device_name(device)} does not support it")
        location = _Location(_ON_DEVICE, self._index)
        self._prop = _AllocationProp(type=_PINNED, location=location)
        self._access = _AccessDesc(location, _READ_WRITE)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), ctypes.c_int(_MINIMUM))
        self.granularity = granularity.value
        self._try()

    def _try(self) -> None:
        """Everything once, in small: what a driver or a torch of another version makes of it shows here, not while serving."""
        size = self.granularity
        try:
            address, handle = self.reserve(2 * size), self.create(size)
            self.map(address, [handle], size)
            whole = self.tensor(address, 2 * size)
            whole[:size].fill_(7)
            right = whole.data_ptr() == address and int(whole[size - 1]) == 7
            del whole
            torch.cuda.synchronize(self._device)
            self.unmap(address, size)
            self.release(handle)
            self.free(address, 2 * size)
        except (RuntimeError, TypeError, ValueError, MemoryError, EngineError) as error:
            raise Unsupported(f"virtual memory management: a trial failed ({error})") from error
        if not right:
            raise Unsupported("virtual memory management: a trial failed (torch did not take the address as it is)")

    @property
    def _index(self) -> int:
        return self._device.index or 0

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown"
        message = f"{name}: {reason} (CUDA driver error {status})"
        if status == _OUT_OF_MEMORY:
            raise MemoryError(message)
        raise DeviceError(message)

    def reserve(self, nbytes: int) -> int:
        address = ctypes.c_ulonglong()
        none = ctypes.c_ulonglong(0)
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_size_t(0),
            none,
            ctypes.c_ulonglong(0),
        )
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(nbytes))

    def create(self, nbytes: int) -> int:
        handle = ctypes.c_ulonglong()

        def attempt() -> None:
            self._call(
                "cuMemCreate",
                ctypes.byref(handle),
                ctypes.c_size_t(nbytes),
                ctypes.byref(self._prop),
                ctypes.c_ulonglong(0),
            )

        try:
            attempt()
        except MemoryError:
            # What torch keeps for later is memory too, but giving it back waits for the device: only when it is needed.
            torch.cuda.empty_cache()
            try:
                attempt()
            except MemoryError as error:
                free = torch.cuda.mem_get_info(self._device)[0]
                raise OutOfDeviceMemory("a piece of elastic memory", nbytes, free) from error
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", ctypes.c_ulonglong(handle))

    def map(self, address: int, handles: Sequence[int], nbytes: int) -> None:
        done = 0
        try:
            for handle in handles:
                at = ctypes.c_ulonglong(address + done * nbytes)
                size, zero = ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
                self._call("cuMemMap", at, size, ctypes.c_size_t(0), ctypes.c_ulonglong(handle), zero)
                done += 1
            if handles:
                whole = ctypes.c_size_t(len(handles) * nbytes)
                self._call("cuMemSetAccess", ctypes.c_ulonglong(address), whole, ctypes.byref(self._access), ctypes.c_size_t(1))
        except (DeviceError, MemoryError) as error:
            with suppress(DeviceError, MemoryError):
                if done:
                    self.unmap(address, done * nbytes)
            if isinstance(error, MemoryError):
                raise OutOfDeviceMemory("mapping elastic memory", len(handles) * nbytes, 0) from error
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", ctypes.c_ulonglong(address), ctypes.c_size_t(nbytes))

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Reservation(address, nbytes), device=self._device)
