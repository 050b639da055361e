"""The way of saved bytes to a device: through two pinned buffers, one filled by the host while the other is on the link.

A copy from memory that is not pinned goes through the driver's own small buffer, on one thread, at a tenth of the link's rate;
pinning what is saved would round it up to powers of two and cost more than it saves.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch


class Staging:
    """device: where bytes go. nbytes: of each buffer; more than that is refused. On a host device bytes are only copied."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._buffers: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        self._next = 0

    def send(self, rows: np.ndarray) -> torch.Tensor:
        """uint8 rows, of any shape, on the device; kernels on the current stream may use them at once."""
        source = _wrapped(np.ascontiguousarray(rows))
        if self._device.type != "cuda":
            return source.clone().to(self._device)
        assert source.numel() <= self._nbytes
        if not self._buffers:
            self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._sent = [torch.cuda.Event() for _ in range(2)]
        turn, self._next = self._next, 1 - self._next
        self._sent[turn].synchronize()  # nothing to wait for the first time
        staged = self._buffers[turn][: source.numel()].view(source.shape)
        staged.copy_(source)  # by all of torch's threads
        out = staged.to(self._device, non_blocking=True)
        self._sent[turn].record()
        return out


def _wrapped(rows: np.ndarray) -> torch.Tensor:
    """Without a copy. Saved bytes may come from a read-only mapping, of which torch warns; it is only read here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(rows)
