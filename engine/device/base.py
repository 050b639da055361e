"""What the offloaded engine needs of a device beside tensors: tapes, graphs, pinned memory, addresses whose memory comes and
goes, and how much memory there is.

Two implementations: cuda.py, and host.py, which runs the same orchestration on CPU tensors for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.device.tape import Tape


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes, as the driver counts them: other programs' memory is not free."""

    free: int
    total: int


class Graph(Protocol):
    """A captured tape."""

    def replay(self) -> None:
        """Enqueue the whole tape again; returns before it has run."""
        ...


class Moment(Protocol):
    """A point in what MAIN was told, or the end of a call beside it."""

    def wait(self) -> None:
        """Return once it is reached; what was told elsewhere may go on. Raises DeviceError."""
        ...

    def reached(self) -> bool:
        """Whether it is, without waiting. Raises DeviceError."""
        ...


class VirtualMemory(Protocol):
    """Addresses without memory, and pieces of memory that are put behind them and taken away while graphs and kernels keep the
    addresses. Numbers of bytes and addresses are multiples of `granularity`."""

    @property
    def granularity(self) -> int: ...

    def reserve(self, nbytes: int) -> int:
        """An address with nbytes behind it that nobody may touch yet."""
        ...

    def free(self, address: int, nbytes: int) -> None:
        """Give a whole reservation back. Nothing of it may be mapped."""
        ...

    def create(self, nbytes: int) -> int:
        """A piece of device memory, by handle; its bytes are anything. Raises OutOfDeviceMemory."""
        ...

    def release(self, handle: int) -> None:
        """Give a piece that is not mapped back to the device."""
        ...

    def map(self, address: int, handles: Sequence[int], nbytes: int) -> None:
        """Put pieces of nbytes each behind addresses, one after another."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Take what was mapped there away. The device must be done with it."""
        ...

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over a reservation; its first bytes must be mapped. Only mapped bytes may be touched."""
        ...


class Device(Protocol):
    """One device and the two streams that this engine computes on, and what goes on beside them."""

    @property
    def name(self) -> str:
        """For people: the board's name."""
        ...

    @property
    def torch_device(self) -> torch.device: ...

    def adopt(self) -> None:
        """What the calling thread tells torch from now on is MAIN's work. Cheap where it is already."""
        ...

    def memory(self) -> DeviceMemory:
        """After giving back what torch keeps for later: for decisions at the start."""
        ...

    def free_bytes(self) -> int:
        """The same number at once, for looking now and then."""
        ...

    def virtual(self) -> VirtualMemory:
        """Raises Unsupported, naming what is missing."""
        ...

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device reads and writes directly, under the same address."""
        ...

    def pin(self, memory: torch.Tensor) -> str | None:
        """Pin existing host memory (uint8, whole pages) for direct reads. Returns why it was refused, None if it was not."""
        ...

    def unpin(self, memory: torch.Tensor) -> None: ...

    def run(self, tape: Tape) -> None:
        """Enqueue a tape after everything enqueued before."""
        ...

    def moment(self) -> Moment:
        """Everything that MAIN was told up to now."""
        ...

    def aside(self, call: Callable[[], None]) -> Moment:
        """Enqueue what `call` tells torch so that it begins after all that MAIN was told up to now, one such call after
        another, and MAIN never waits for it. Returns its end. Whoever frees or writes what it reads has to wait for that."""
        ...

    def soon(self, call: Callable[[], None]) -> Moment:
        """The same, but not behind what was told aside: for the little that somebody is waiting for."""
        ...

    def capture(self, tape: Tape) -> Graph:
        """Run the tape once (kernels are compiled, libraries make their workspaces) and capture it. Its calls must be harmless
        to run once more, must not allocate and must not wait for the device."""
        ...

    def synchronize(self) -> None:
        """Wait for everything enqueued. Raises DeviceError if something of it failed."""
        ...
