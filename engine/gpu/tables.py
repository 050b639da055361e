"""What a step is told, where kernels read it: small integer tables at fixed addresses, filled from a batch by one copy;
and the little that it tells back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import SeqSlice
from engine.device.base import Device

_IDS, _CONTEXTS, _SLOTS, _ROWS = range(4)


class DecodeTables:
    """For up to `rows` sequences with one token each. Tables of a step with fewer rows are the first columns.

    ids: int32 tokens. contexts: position of the token, −1 = no sequence. slots: where its keys go. state_rows. pages: int32
    [rows, max_pages]; rewritten only where a sequence's table has changed, so a step usually moves 16 bytes a row. best: int32
    [rows] on the host, written by the step: as Logits.best.
    """

    def __init__(self, device: Device, rows: int, max_pages: int, page_size: int) -> None:
        place = device.torch_device
        self.rows, self.page_size = rows, page_size
        self._pinned = device.pinned(4, rows, dtype=torch.int32)
        self._pinned_pages = device.pinned(rows, max_pages, dtype=torch.int32)
        self.best = device.pinned(rows, dtype=torch.int32)
        self._host, self._host_pages = self._pinned.numpy(), self._pinned_pages.numpy()
        self._known = [0] * rows
        self._filled = rows
        self._device = torch.full((4, rows), -1, dtype=torch.int32, device=place)
        self._device[_IDS] = 0
        self.ids, self.contexts = self._device[_IDS], self._device[_CONTEXTS]
        self.slots, self.state_rows = self._device[_SLOTS], self._device[_ROWS]
        self.pages = torch.zeros(rows, max_pages, dtype=torch.int32, device=place)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=place)

    def fill(self, tokens: torch.Tensor, seqs: Sequence[SeqSlice]) -> None:
        """tokens: int64 [len(seqs)], one for each sequence. The device must be done with the step before."""
        host = self._host
        for index, (seq, token) in enumerate(zip(seqs, tokens.tolist(), strict=True)):
            page, offset = divmod(seq.context, self.page_size)
            pages = seq.page_table.numpy()
            host[:, index] = token, seq.context, int(pages[page]) * self.page_size + offset, seq.state_row
            self._fill_pages(index, pages)
        host[_IDS, len(seqs) : self._filled] = 0
        host[_IDS + 1 :, len(seqs) : self._filled] = -1
        self._filled = len(seqs)

    def send(self) -> None:
        """Copy what `fill` wrote to the device: part of a step's graph, so that it costs no launch of its own."""
        self._device.copy_(self._pinned, non_blocking=True)

    def _fill_pages(self, index: int, pages: np.ndarray) -> None:
        have, count = self._host_pages[index], len(pages)
        if self._known[index] >= count and (have[:count] == pages).all():
            return
        have[:count] = pages
        self._known[index] = count
        self.pages[index, :count].copy_(self._pinned_pages[index, :count], non_blocking=True)
