"""The device memory of expert slots and KV pages: two runs of addresses, and the chunks behind them. Moves no contents and
decides nothing; see plan.py for the sizes and boundary.py for the order in which things happen.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.device.base import Device, VirtualMemory
from engine.elastic.plan import Bounds, Sizes


class Memory(Protocol):
    """bounds: what can ever be had. slots: uint8 [most slots, record bytes]. pages: uint8 [most pages · page bytes].
    fixed: why nothing can change hands, None if it can."""

    @property
    def bounds(self) -> Bounds: ...
    @property
    def slots(self) -> torch.Tensor: ...
    @property
    def pages(self) -> torch.Tensor: ...
    @property
    def fixed(self) -> str | None: ...

    @property
    def chunks(self) -> int:
        """In hand, whether mapped or not."""
        ...

    def secure(self, chunks: int) -> None:
        """Have at least so many chunks in hand. Raises OutOfDeviceMemory, changing nothing."""
        ...

    def fit(self, sizes: Sizes) -> None:
        """Put memory behind these sizes, and none behind more than that. Enough chunks are in hand; the device is done with
        what goes."""
        ...

    def let_go(self, chunks: int) -> None:
        """Give back to the device what is mapped nowhere, but for so many chunks in hand in all."""
        ...

    def close(self) -> None: ...


class Span:
    """A run of addresses of which the first `handles` chunks have memory."""

    def __init__(self, virtual: VirtualMemory, chunks: int, chunk_bytes: int) -> None:
        self._virtual, self._chunk_bytes = virtual, chunk_bytes
        self._nbytes = max(1, chunks) * chunk_bytes
        self.address = virtual.reserve(self._nbytes)
        self.handles: list[int] = []

    def extend(self, handles: list[int]) -> None:
        self._virtual.map(self.address + len(self.handles) * self._chunk_bytes, handles, self._chunk_bytes)
        self.handles += handles

    def shrink(self, keep: int) -> list[int]:
        """The handles behind chunk `keep`, mapped no longer."""
        gone = self.handles[keep:]
        if gone:
            self._virtual.unmap(self.address + keep * self._chunk_bytes, len(gone) * self._chunk_bytes)
            del self.handles[keep:]
        return gone

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Some chunk must be mapped, or nbytes be 0."""
        if nbytes == 0:
            return torch.zeros(0, dtype=torch.uint8)
        return self._virtual.tensor(self.address, self._nbytes)[:nbytes]

    def close(self) -> list[int]:
        gone = self.shrink(0)
        self._virtual.free(self.address, self._nbytes)
        return gone


class ElasticMemory:
    """See Memory. Raises OutOfDeviceMemory if the sizes cannot be had."""

    fixed: str | None = None

    def __init__(self, device: Device, virtual: VirtualMemory, bounds: Bounds, sizes: Sizes) -> None:
        self.bounds = bounds
        self._device, self._virtual = device, virtual
        self._spare: list[int] = []
        self._spans = (
            Span(virtual, bounds.slot_chunks(bounds.most_slots), bounds.chunk_bytes),
            Span(virtual, bounds.page_chunks(bounds.most_pages), bounds.chunk_bytes),
        )
        try:
            self.secure(bounds.slot_chunks(sizes.slots) + bounds.page_chunks(sizes.pages))
            self.fit(sizes)
            slots = self._spans[0].tensor(bounds.most_slots * bounds.record_bytes)
            self.slots = slots.view(bounds.most_slots, bounds.record_bytes)
            self.pages = self._spans[1].tensor(bounds.most_pages * bounds.page_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def chunks(self) -> int:
        return len(self._spare) + sum(len(span.handles) for span in self._spans)

    def secure(self, chunks: int) -> None:
        made: list[int] = []
        try:
            for _ in range(chunks - self.chunks):
                made.append(self._virtual.create(self.bounds.chunk_bytes))
        except BaseException:
            for handle in made:
                self._virtual.release(handle)
            raise
        self._spare += made

    def fit(self, sizes: Sizes) -> None:
        wanted = (self.bounds.slot_chunks(sizes.slots), self.bounds.page_chunks(sizes.pages))
        for span, count in zip(self._spans, wanted, strict=True):
            self._spare += span.shrink(count)
        for span, count in zip(self._spans, wanted, strict=True):
            more = count - len(span.handles)
            if more > 0:
                taken, self._spare = self._spare[:more], self._spare[more:]
                assert len(taken) == more, "not secured"
                try:
                    span.extend(taken)
                except BaseException:
                    self._spare += taken
                    raise

    def let_go(self, chunks: int) -> None:
        while self._spare and self.chunks > chunks:
            self._virtual.release(self._spare.pop())

    def close(self) -> None:
        """The device must be idle."""
        self._device.synchronize()
        for span in self._spans:
            self._spare += span.close()
        self.let_go(0)
        self._spans = ()


class FixedMemory:
    """What stands in where the device has no virtual memory, or none is wanted: an allocation for each side, for good. Slots
    and pages can be left unused and used again; nobody else gets their memory."""

    def __init__(self, device: Device, bounds: Bounds, fixed: str) -> None:
        self.bounds, self.fixed = bounds, fixed
        place = device.torch_device
        self.slots = torch.zeros(bounds.most_slots, bounds.record_bytes, dtype=torch.uint8, device=place)
        self.pages = torch.zeros(bounds.most_pages * bounds.page_bytes, dtype=torch.uint8, device=place)

    @property
    def chunks(self) -> int:
        return self.bounds.slot_chunks(self.bounds.most_slots) + self.bounds.page_chunks(self.bounds.most_pages)

    def secure(self, chunks: int) -> None:
        pass

    def fit(self, sizes: Sizes) -> None:
        pass

    def let_go(self, chunks: int) -> None:
        pass

    def close(self) -> None:
        pass
