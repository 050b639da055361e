"""The experts of all MoE layers in one allocation of host memory, one record per expert, pinned for the device to read.

Loading writes each expert once, from the mapped file to its place: nothing else of the bank's size is ever allocated. Pinning
is bounded: what a quota refuses stays usable, for the CPU alone.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.device.base import Device
from engine.errors import ShapeMismatch
from engine.moe.banks import ExpertBank

log = logging.getLogger(__name__)

PAGE = 4096
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which mmap names from Python 3.13 on
PIN_STEP_BYTES = 1 << 30
"""Pinned at a time, for progress: the driver takes about 0.6 s for a gigabyte."""
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Record:
    """How one expert lies in memory: gate_up [2 · inter, hidden], then down [hidden, inter]. nbytes: with padding to whole
    pages, so that any run of records can be pinned by itself."""

    hidden: int
    inter: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return -(-3 * self.hidden * self.inter * self.dtype.itemsize // PAGE) * PAGE

    def views(self, rows: torch.Tensor) -> ExpertBank:
        """uint8 [rows, nbytes] as a bank; its tensors share the memory."""
        flat = rows.view(self.dtype)
        middle = 2 * self.inter * self.hidden
        gate_up = flat[:, :middle].unflatten(1, (2 * self.inter, self.hidden))
        down = flat[:, middle : middle + self.inter * self.hidden].unflatten(1, (self.hidden, self.inter))
        return ExpertBank(gate_up, down)


class HostBank:
    """Room for `capacity` experts, given out layer by layer in loading order: flat id = layer · experts + expert.

    Pages are taken only where a record is written.
    """

    def __init__(self, capacity: int, record: Record) -> None:
        self.record = record
        self.rows = 0
        self.pinned_rows = 0
        # Not reserved: capacity also counts experts that are never read, and a virtual machine may grow only as it is filled.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sys.platform == "linux" else 0)
        self._mapping = mmap.mmap(-1, max(1, capacity) * record.nbytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8).view(-1, record.nbytes)
        self._pinned: list[torch.Tensor] = []

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [rows, record bytes]: every record that was given out."""
        return self._bytes[: self.rows]

    @property
    def nbytes(self) -> int:
        return self.rows * self.record.nbytes

    def layer(self, count: int, inter: int, hidden: int, dtype: torch.dtype) -> ExpertBank:
        """The next `count` records, to be filled. Raises ShapeMismatch for a record of another shape."""
        if Record(hidden, inter, dtype) != self.record:
            raise ShapeMismatch(f"experts [{hidden}, {inter}] {dtype} do not fit a bank of {self.record}")
        if self.rows + count > len(self._bytes):
            raise ShapeMismatch(f"a bank of {len(self._bytes)} experts cannot take {self.rows + count}")
        self.rows += count
        return self.record.views(self._bytes[self.rows - count : self.rows])

    def pin(self, device: Device, limit_bytes: int | None, tell: Progress) -> None:
        """Pin records from the first on, a gigabyte at a time, at most limit_bytes; ends early where the system refuses.

        pinned_rows says how many can be fetched; the others are computed on the CPU. tell(fraction, what).
        """
        most = self.rows if limit_bytes is None else min(self.rows, limit_bytes // self.record.nbytes)
        step = max(1, PIN_STEP_BYTES // self.record.nbytes)
        refused = None if most == self.rows else f"a limit of {limit_bytes} bytes"
        while self.pinned_rows < most:
            part = self._bytes[self.pinned_rows : min(most, self.pinned_rows + step)]
            reason = device.pin(part.view(-1))
            if reason is not None:
                refused = reason
                break
            self._pinned.append(part.view(-1))
            self.pinned_rows += len(part)
            tell(
                self.pinned_rows / self.rows,
                f"pinning experts, {_gb(self.pinned_rows * self.record.nbytes)} of {_gb(self.nbytes)}",
            )
        if refused is not None:
            log.warning(
                "experts are only partly pinned pinned=%s of=%s reason=%r: the rest is computed on the CPU and never fetched; "
                "raise the limit of locked memory (ulimit -l, or the container's) or engine.pin_bytes",
                _gb(self.pinned_rows * self.record.nbytes),
                _gb(self.nbytes),
                refused,
            )

    def runs(self, first: int, stop: int) -> Iterator[slice]:
        """first … stop in slices that one copy may move: the driver refuses a copy that reads from two pinned parts at once."""
        edge = 0
        for part in self._pinned:
            edge += len(part) // self.record.nbytes
            if first < min(edge, stop):
                yield slice(first, min(edge, stop))
                first = min(edge, stop)
        if first < stop:
            yield slice(first, stop)

    def discard(self) -> None:
        """Give the memory back: every expert lies on the device for good. The records read as zeros from now on."""
        assert not self._pinned
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def unpin(self, device: Device) -> None:
        for part in self._pinned:
            device.unpin(part)
        self._pinned.clear()
        self.pinned_rows = 0


class BankLoader:
    """Makes the bank when the first layer's experts come, since only then a record's shape is known. See loader.ExpertStore."""

    def __init__(self) -> None:
        self.bank: HostBank | None = None

    def place(
        self, capacity: int, count: int, inter: int, hidden: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.bank is None:
            self.bank = HostBank(capacity, Record(hidden, inter, dtype))
        layer = self.bank.layer(count, inter, hidden, dtype)
        return layer.gate_up, layer.down


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
