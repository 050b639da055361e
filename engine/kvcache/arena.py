"""Host memory that a device copies to and from by itself, at the rate of its link: where saved states lie beside a GPU.

A range is given out as an array and comes back when nothing refers to it any more, so whoever reads it needs no other pin.
All that may be pinned is, in steps and from the start: later, it would take the driver from those who decode. Where none is
left, or none may be pinned, ordinary memory is given out, which works and is slow.

Threads: take() may be called from any; ranges may end in any.
"""

from __future__ import annotations

import logging
import mmap
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import Machine
from engine.device.base import Device
from engine.kvcache.spans import Span

log = logging.getLogger(__name__)
UNIT = mmap.PAGESIZE
STEP_BYTES = 128 << 20
"""Pinned at a time: other calls to the driver may wait meanwhile, 9 ms (H200). More than any one range, or that would lie in
ordinary memory."""
AT_ONCE = 8
"""Ranges that are taken back whenever one is given out: a context's thousand at once would take as long as a step."""
SPARE_BYTES = 1 << 30
"""Left to others by what the system says is available."""


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Bytes. limit: what may be pinned. elsewhere: given out so far of ordinary memory instead."""

    limit: int
    pinned: int
    used: int
    elsewhere: int


class _Returned:
    """Keeps a range until the last array over it is gone. Ends in any thread, also inside of take(): so it takes no lock."""

    __slots__ = ("_home", "_memory", "_range")

    def __init__(self, home: deque[tuple[int, int]], memory: torch.Tensor, start: int, units: int) -> None:
        self._home, self._memory, self._range = home, memory, (start, units)

    def __del__(self) -> None:
        self._home.append(self._range)


class PinnedArena:
    """limit_bytes: most that is pinned, in whole steps: the last one is not left out. unit: of ranges, in bytes; a divisor of
    the step."""

    def __init__(
        self,
        device: Device,
        limit_bytes: int,
        *,
        step_bytes: int = STEP_BYTES,
        unit: int = UNIT,
    ) -> None:
        assert step_bytes % mmap.PAGESIZE == step_bytes % unit == 0
        self._device, self._step, self._unit = device, step_bytes, unit
        self._limit = self._in_steps(limit_bytes)
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._refused = ""
        self._firsts: list[int] = []
        """Addresses of what is pinned, in units and in order, and the memory there."""
        self._chunks: list[torch.Tensor] = []
        self._starts: list[int] = []
        """Free ranges, in units and in order; how long each is; where the search goes on."""
        self._lengths: dict[int, int] = {}
        self._at = 0
        self._free = 0
        self._returned: deque[tuple[int, int]] = deque()
        self._elsewhere = 0

    # ── ranges ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], to be written by whoever asks; neighbours if asked for one after another and there is room."""
        units = -(-nbytes // self._unit)
        with self._lock:
            self._collect(AT_ONCE)
            start = self._find(units) if units else None
            if start is None and self._returned:
                self._collect()
                start = self._find(units) if units else None
            memory = None if start is None else self._chunks[self._chunk_of(start)]
            self._elsewhere += nbytes if memory is None else 0
        if start is None or memory is None:
            return np.empty(nbytes, dtype=np.uint8)
        return np.asarray(Span(start * self._unit, nbytes, _Returned(self._returned, memory, start, units)))

    def stats(self) -> ArenaStats:
        with self._lock:
            self._collect()
            pinned = len(self._chunks) * self._step
            used = pinned - len(self._chunks) * 2 * self._unit - self._free * self._unit
            return ArenaStats(self._limit, pinned, used, self._elsewhere)

    # ── what is pinned ──────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Pin what the limit allows, now and whenever it changes, on a thread."""
        self._wanted.set()
        self._thread = threading.Thread(target=self._run, name="pin-memory", daemon=True)
        self._thread.start()

    def set_limit(self, limit_bytes: int) -> None:
        """More is pinned soon; less when what is beyond it is not used any more."""
        with self._lock:
            self._limit, self._refused = self._in_steps(limit_bytes), ""
        self._wanted.set()

    def _in_steps(self, nbytes: int) -> int:
        return -(-nbytes // self._step) * self._step

    def grow(self) -> bool:
        """Pin a step more if that is allowed. Called by one thread."""
        with self._lock:
            allowed = not self._refused and not self._closed and (len(self._chunks) + 1) * self._step <= self._limit
        if not allowed:
            return False
        available = Machine.here().available_bytes
        if available < self._step + SPARE_BYTES:
            return self._refuse(f"{available} bytes are available")
        mapping = mmap.mmap(-1, self._step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        memory.zero_()  # its pages are found here, without the interpreter's lock, and not in the driver, with the driver's
        reason = self._device.pin(memory)
        if reason is not None:
            return self._refuse(reason)
        first = memory.data_ptr() // self._unit
        with self._lock:
            if self._closed:
                self._device.unpin(memory)
                return False
            index = bisect_left(self._firsts, first)
            self._firsts.insert(index, first)
            self._chunks.insert(index, memory)
            # A unit at either end stays unused: ranges that lie side by side are copied as one, and the driver refuses a copy
            # over two registrations, and over memory of which one part is pinned.
            self._give_back(first + 1, self._step // self._unit - 2)
        return True

    def shrink(self) -> bool:
        """Let go of a step that nobody uses, if more is pinned than may be. Called by one thread."""
        with self._lock:
            self._collect()
            whole = self._step // self._unit - 2
            index = next((i for i, first in enumerate(self._firsts) if self._lengths.get(first + 1) == whole), None)
            if index is None or self._closed or not self._is_over():
                return False
            memory, first = self._chunks.pop(index), self._firsts.pop(index) + 1
            del self._lengths[first]
            del self._starts[bisect_left(self._starts, first)]
            self._at = 0
            self._free -= whole
        self._device.unpin(memory)
        return True

    def _is_over(self) -> bool:
        return len(self._chunks) * self._step > self._limit

    def _refuse(self, reason: str) -> bool:
        """Not tried again until the limit changes: what was given out elsewhere does not come back either."""
        self._refused = reason
        log.warning(
            "saved states lie partly in memory that is not pinned, and are copied slower pinned_bytes=%d wanted_bytes=%d "
            "reason=%r: see the limit of locked memory (ulimit -l, or the container's)",
            len(self._chunks) * self._step,
            self._limit,
            reason,
        )
        return False

    def fill(self) -> None:
        """Pin all that the limit allows, now."""
        while self.grow():
            pass

    def close(self) -> None:
        """Nothing is pinned any more. The device must have no copy under way; arrays that are still used stay as they are."""
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            chunks, self._chunks, self._firsts = self._chunks, [], []
            self._starts, self._lengths, self._free = [], {}, 0
            self._returned.clear()
        for memory in chunks:
            self._device.unpin(memory)

    def _run(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            before = len(self._chunks)
            self.fill()
            while self.shrink():
                pass
            if len(self._chunks) != before:
                log.info("memory for saved states is pinned bytes=%d limit=%d", len(self._chunks) * self._step, self._limit)

    # ── free ranges ─────────────────────────────────────────────────────────────────────────────────────────────

    def _collect(self, most: int | None = None) -> None:
        """Take ranges back that nobody looks at any more: all of them, or so many."""
        if self._returned and self._is_over():
            self._wanted.set()  # a step may have become free
        for _ in range(len(self._returned) if most is None else min(most, len(self._returned))):
            start, units = self._returned.popleft()
            if self._chunk_of(start) >= 0:
                self._give_back(start, units)

    def _chunk_of(self, start: int) -> int:
        """Index of the chunk that a range lies in; −1 if it is gone."""
        index = bisect_right(self._firsts, start) - 1
        return index if index >= 0 and start < self._firsts[index] + self._step // self._unit else -1

    def _find(self, units: int) -> int | None:
        """From behind the last one on: what is taken one after another lies so, and no search begins at the start each time."""
        count = len(self._starts)
        for offset in range(count):
            index = (self._at + offset) % count
            start = self._starts[index]
            length = self._lengths[start]
            if length < units:
                continue
            del self._lengths[start]
            if length == units:
                del self._starts[index]
            else:
                self._starts[index] = start + units
                self._lengths[start + units] = length - units
            self._at = index
            self._free -= units
            return start
        return None

    def _give_back(self, start: int, units: int) -> None:
        self._free += units
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + units:
            units += self._lengths.pop(self._starts.pop(index))
        before = self._starts[index - 1] if index else None
        if before is not None and before + self._lengths[before] == start:
            self._lengths[before] += units
            return
        self._starts.insert(index, start)
        self._lengths[start] = units
        self._at += self._at > index
