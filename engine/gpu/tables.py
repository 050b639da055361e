"""What a step is told, where kernels read it: small integer tables at fixed addresses, filled from a batch by one copy;
and the little that it tells back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import SeqSlice
from engine.device.base import Device, Moment
from engine.errors import DeviceError

_IDS, _CONTEXTS, _SLOTS, _ROWS, _ROWS_OUT = range(5)
_COUNT = 5
_DRAWS = 6


class DecodeTables:
    """For up to `rows` sequences with one token each. Tables of a step with fewer rows are the first columns.

    ids: int32 tokens. contexts: position of the token, −1 = no sequence. slots: where its keys go. state_rows, rows_out: of the
    recurrent state before and after it. pages: int32 [rows, max_pages]; rewritten only where a sequence's table has changed, so
    a step usually moves 44 bytes a row. draws: f32 [6, rows], how the token behind each row will be chosen, as the kernel
    `guess` takes it. guesses: int32 [rows], as Logits.guesses of the newest step, for the step after it.

    A step may be launched while the one before it runs. So what is written on the host for one step (told, and the pages that
    are new) and what a step writes there (found: guesses, and its number) lie in two places, in turn: steps count themselves in
    `turn`, and the host counts them too.
    """

    def __init__(self, device: Device, rows: int, max_pages: int, page_size: int) -> None:
        place = device.torch_device
        self.rows, self.page_size = rows, page_size
        self.told = device.pinned(2, _COUNT + _DRAWS, rows, dtype=torch.int32)
        self.found = device.pinned(2, rows + 1, dtype=torch.int32)
        self._staged = device.pinned(2, rows, max_pages, dtype=torch.int32)
        self._host, self._host_found, self._host_staged = self.told.numpy(), self.found.numpy(), self._staged.numpy()
        self._host_draws = self._host[:, _COUNT:].view(np.float32)
        self._sent = np.zeros((rows, max_pages), dtype=np.int32)
        self._known = [0] * rows
        self._launched = 0
        self._running: list[Moment | None] = [None, None]
        self.tables = torch.full((_COUNT + _DRAWS, rows), -1, dtype=torch.int32, device=place)
        self.tables[_IDS] = 0
        self.tables[_COUNT:] = 0
        self.draws = self.tables[_COUNT:].view(torch.float32)
        self.ids, self.contexts = self.tables[_IDS], self.tables[_CONTEXTS]
        self.slots, self.state_rows, self.rows_out = self.tables[_SLOTS], self.tables[_ROWS], self.tables[_ROWS_OUT]
        self.guesses = torch.zeros(rows, dtype=torch.int32, device=place)
        self.turn = torch.zeros(1, dtype=torch.int32, device=place)
        self.pages = torch.zeros(rows, max_pages, dtype=torch.int32, device=place)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=place)

    @property
    def beginning(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the kernel `begin` takes."""
        return self.told, self.guesses, self.turn, self.tables, self.found

    def fill(self, tokens: torch.Tensor, seqs: Sequence[SeqSlice]) -> None:
        """For the next step. tokens: int64 [len(seqs)], one for each sequence; −1 − r: what the step before it guesses for
        its row r. Waits until the step before that is over."""
        side = (self._launched + 1) & 1
        running = self._running[side]
        if running is not None:
            running.wait()
        host, draws = self._host[side], self._host_draws[side]
        draws[:] = 0
        for index, (seq, token) in enumerate(zip(seqs, tokens.tolist(), strict=True)):
            page, offset = divmod(seq.context, self.page_size)
            pages = seq.page_table.numpy()
            row_out = seq.state_row if seq.row_out < 0 else seq.row_out
            slot = int(pages[page]) * self.page_size + offset
            host[:_COUNT, index] = token, seq.context, slot, seq.state_row, row_out
            if seq.draw is not None:
                draws[: _DRAWS - 1, index] = seq.draw
                draws[_DRAWS - 1, index] = seq.draw.uniform - float(draws[_DRAWS - 2, index])
            self._fill_pages(side, index, pages)
        host[_IDS, len(seqs) :] = 0
        host[_IDS + 1 : _COUNT, len(seqs) :] = -1

    def launched(self, moment: Moment) -> int:
        """The step that was filled for has been launched, and is over at this moment. Returns its number."""
        self._launched += 1
        self._running[self._launched & 1] = moment
        return self._launched

    def chosen(self, number: int, count: int) -> list[int]:
        """Logits.guesses of the first `count` rows of a step that is over, of the last two that were launched."""
        found = self._host_found[number & 1]
        if int(found[-1]) & 0xFFFFFFFF != number & 0xFFFFFFFF:
            raise DeviceError(f"decode step {number} left the results of step {int(found[-1])}")
        return found[:count].tolist()

    def holds_pages(self, index: int, pages: np.ndarray) -> bool:
        """Whether row `index` was told these pages last, or more behind them."""
        count = len(pages)
        return self._known[index] >= count and bool((self._sent[index, :count] == pages).all())

    def _fill_pages(self, side: int, index: int, pages: np.ndarray) -> None:
        if self.holds_pages(index, pages):
            return
        count = len(pages)
        self._sent[index, :count] = pages
        self._known[index] = count
        self._host_staged[side, index, :count] = pages
        self.pages[index, :count].copy_(self._staged[side, index, :count], non_blocking=True)
