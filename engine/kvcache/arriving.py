"""The way of saved bytes to a device: straight from pinned memory, at the link's rate and without waiting for it.

What lies in memory that is not pinned goes through two pinned buffers, one filled by the host while the other is on the link: a
copy from it would go through the driver's own small buffer, on one thread, at a tenth of the rate.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from engine.device.base import Device, Moment
from engine.kvcache.spans import joined

STAGED_BYTES = 32 << 20
"""Of each buffer, and what a copy in pieces moves at a time: it bounds what a long context takes of the device meanwhile."""


class Arrivals:
    """Copies to one device, in the order of MAIN. Keeps what the device still reads; look() lets go of it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: deque[tuple[Moment, object]] = deque()
        self._buffers: list[torch.Tensor] = []
        self._sent: list[Moment | None] = [None, None]
        self._next = 0

    def send(self, arrays: Iterable[np.ndarray], out: torch.Tensor) -> None:
        """Put the bytes of contiguous arrays, one after another, to `out`: uint8 [n] on the device, n their sum."""
        at, kept = 0, []
        for span in joined(arrays):
            source = _wrapped(span)
            part = out[at : at + len(span)]
            at += len(span)
            if out.device.type == "cpu":
                part.copy_(source)
            elif source.is_pinned():
                part.copy_(source, non_blocking=True)
                kept.append(span)
            else:
                self._through_buffers(source, part)
        assert at == len(out), f"{at} bytes for {len(out)}"
        if kept:
            self._kept.append((self._device.moment(), kept))

    def look(self) -> None:
        """Let go of what the device has read."""
        while self._kept and self._kept[0][0].reached():
            self._kept.popleft()

    def _through_buffers(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if not self._buffers:
            self._buffers = [self._device.pinned(STAGED_BYTES, dtype=torch.uint8) for _ in range(2)]
        for first in range(0, len(source), STAGED_BYTES):
            part = source[first : first + STAGED_BYTES]
            turn, self._next = self._next, 1 - self._next
            sent = self._sent[turn]
            if sent is not None:
                sent.wait()
            staged = self._buffers[turn][: len(part)]
            staged.copy_(part)  # by all of torch's threads
            out[first : first + len(part)].copy_(staged, non_blocking=True)
            self._sent[turn] = self._device.moment()


def _wrapped(rows: np.ndarray) -> torch.Tensor:
    """Without a copy. Saved bytes may come from a read-only mapping, of which torch warns; it is only read here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(rows)
