"""A device made of host memory: runs tapes on CPU tensors, each time in another of the orders that they allow.

MAIN runs at once, as everything does that torch is told outside of tapes; SIDE runs early or late, between MAIN's calls, and so
does what is told aside, which without a seed runs at once.

For tests: there is nothing to gain in speed. Without a seed a tape runs in the order of recording.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from engine.config import Machine
from engine.device.base import DeviceMemory
from engine.device.host_memory import HostVirtualMemory
from engine.device.tape import Entry, Lane, Tape
from engine.errors import DeviceError


class HostDevice:
    """See base.py. seed: of the orders. memory_bytes: what it claims to have. pin_quota: bytes that may be pinned, None =
    any."""

    def __init__(self, seed: int | None = None, memory_bytes: int | None = None, pin_quota: int | None = None) -> None:
        self.name = "host memory"
        self.torch_device = torch.device("cpu")
        self._random = None if seed is None else random.Random(seed)
        self._memory_bytes = memory_bytes
        self._pin_quota = pin_quota
        self._pinned: dict[int, int] = {}
        self._side: deque[tuple[Entry, int]] = deque()
        self._done: set[int] = set()
        self._marks = 0
        self._aside: Line = deque()
        self._soon: Line = deque()
        self._virtual: HostVirtualMemory | None = None
        self.replays = 0
        self.others_bytes = 0
        """What other programs take of its memory."""

    def adopt(self) -> None:
        pass

    def memory(self) -> DeviceMemory:
        free = Machine.here().available_bytes // 2 if self._memory_bytes is None else self._memory_bytes
        return DeviceMemory(free, free)

    def free_bytes(self) -> int:
        created = 0 if self._virtual is None else self._virtual.created_bytes
        return max(0, self.memory().free - created - self.others_bytes)

    def virtual(self) -> HostVirtualMemory:
        if self._virtual is None:
            self._virtual = HostVirtualMemory(self)
        return self._virtual

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def pin(self, memory: torch.Tensor) -> str | None:
        used = sum(self._pinned.values())
        if self._pin_quota is not None and used + memory.numel() > self._pin_quota:
            return f"a quota of {self._pin_quota} bytes"
        assert memory.data_ptr() not in self._pinned, "pinned twice"
        self._pinned[memory.data_ptr()] = memory.numel()
        return None

    def unpin(self, memory: torch.Tensor) -> None:
        del self._pinned[memory.data_ptr()]

    def run(self, tape: Tape) -> None:
        """MAIN runs to its end. SIDE may lag behind, over later tapes too, until MAIN waits for it."""
        main = [entry for entry in tape.entries if entry.lane is Lane.MAIN]
        offset = self._marks
        self._marks += tape.marks
        self._side += [(entry, offset) for entry in tape.entries if entry.lane is Lane.SIDE]
        for entry in main:
            if self._random is None:
                self._advance_side(len(self._side))
            else:
                self._advance_side(self._random.choice((0, 0, 1, 2, len(self._side))))
            if entry.awaits is not None:
                while offset + entry.awaits.index not in self._done:
                    if not self._advance_side(1):
                        raise DeviceError("a tape waits for a mark that is never set")
            self._perform(entry, offset)
        if self._random is None:
            self._advance_side(len(self._side))

    def _advance_side(self, count: int) -> bool:
        """Perform up to count entries of SIDE, as far as they need not wait. False if it could not move at all."""
        moved = False
        while count > 0 and self._side:
            entry, offset = self._side[0]
            if entry.awaits is not None and offset + entry.awaits.index not in self._done:
                break
            self._side.popleft()
            self._perform(entry, offset)
            count -= 1
            moved = True
        return moved

    def _perform(self, entry: Entry, offset: int) -> None:
        if entry.call is not None:
            entry.call()
        if entry.sets is not None:
            self._done.add(offset + entry.sets.index)

    def moment(self) -> HostMoment:
        return HostMoment()

    def aside(self, call: Callable[[], None]) -> HostMoment:
        return self._tell(self._aside, call, self._advance_aside)

    def soon(self, call: Callable[[], None]) -> HostMoment:
        return self._tell(self._soon, call, partial(self._advance, self._soon))

    def _tell(self, line: Line, call: Callable[[], None], advance: Callable[[HostMoment | None], None]) -> HostMoment:
        moment = HostMoment(advance)
        line.append((call, moment))
        if self._random is None:
            moment.wait()
        return moment

    def _advance_aside(self, to: HostMoment | None) -> None:
        self._advance(self._aside, to)

    def _advance(self, line: Line, to: HostMoment | None) -> None:
        """Go on to the end of one call, or, None, as far as it happens to be."""
        assert to is None or any(moment is to for _, moment in line)
        count = 0 if self._random is None else self._random.choice((0, 0, 1, len(line)))
        while line and (to is not None or count > 0):
            call, moment = line.popleft()
            call()
            moment.done = True
            count -= 1
            if moment is to:
                break

    def capture(self, tape: Tape) -> HostGraph:
        self.run(tape)
        return HostGraph(self, tape)

    def synchronize(self) -> None:
        while self._advance_side(len(self._side)):
            pass
        assert not self._side, "the side lane waits for a mark that is never set"
        for line in (self._aside, self._soon):
            if line:
                line[-1][1].wait()
        self._done.clear()


class HostGraph:
    def __init__(self, device: HostDevice, tape: Tape) -> None:
        self._device, self._tape = device, tape

    def replay(self) -> None:
        self._device.replays += 1
        self._device.run(self._tape)


class HostMoment:
    """MAIN is never behind; what is told aside may be."""

    def __init__(self, advance: Callable[[HostMoment | None], None] | None = None) -> None:
        self._advance = advance
        self.done = advance is None

    def wait(self) -> None:
        if not self.done and self._advance is not None:
            self._advance(self)

    def reached(self) -> bool:
        if not self.done and self._advance is not None:
            self._advance(None)
        return self.done


Line = deque[tuple[Callable[[], None], HostMoment]]
"""Calls that were told and are not over, the oldest first."""
