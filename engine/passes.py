"""Forward passes over slices: one that a step runs whole, and one that spans steps while others decode at its edges.

Knows no events: whoever asks for a pass publishes what it computed, and ends its requests if it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.ahead import Ahead, row_out
from engine.batch import ForwardBatch, SeqSlice, StateCut
from engine.kvcache.store import NO_ROW, StateStore
from engine.models.base import Logits, Model, Pass, Staged
from engine.scheduler.scheduler import Slice
from engine.scheduler.sequence import Sequence as Running

EDGE_NS = 50_000_000
"""A pass that runs alone returns to the caller this often, who then hears of arrivals and cancels."""


@dataclass(slots=True)
class OpenPass:
    """A pass that spans steps. spent_ns: on it so far."""

    slices: list[Slice]
    work: Pass
    spent_ns: int = 0


class Passes:
    """model: what runs them; may be replaced between steps by one that stands in front of it.

    open: the pass that spans steps, None if there is none; at most one at a time. ahead: None where steps are not begun before
    they are asked for.
    """

    def __init__(self, model: Model, store: StateStore, clock_ns: Callable[[], int], ahead: Ahead | None = None) -> None:
        self.model, self._store, self._clock_ns = model, store, clock_ns
        self._staged = model if isinstance(model, Staged) else None
        self.open: OpenPass | None = None
        self.ahead = ahead

    def run(self, slices: list[Slice]) -> Logits:
        if self.ahead is not None:
            self.ahead.before(slices, alone=self.open is None)
        logits = self.model.forward(self._batch(slices), self._store.kv, self._store.states)
        if self.ahead is not None:
            self.ahead.after(slices, logits)
        return logits

    def divide(self, slices: list[Slice]) -> tuple[list[Slice], list[Slice]]:
        """Those for a pass that spans steps, and those that a step runs by themselves."""
        if self._staged is None:
            return [], slices
        longer = [part for part in slices if part.end - part.start > 1]
        return longer, [part for part in slices if part.end - part.start == 1]

    def begin(self, slices: list[Slice]) -> None:
        """Open a pass that spans steps, over those of divide()."""
        assert self.open is None
        assert self._staged is not None
        self.open = OpenPass(slices, self._staged.begin(self._batch(slices), self._store.kv, self._store.states))
        for part in slices:
            part.seq.busy_to = part.end

    def advance(self, opened: OpenPass, others: bool) -> Logits | None:
        """Compute layers of the open pass: one where others decode beside it, else for about EDGE_NS. Its logits when it is
        over."""
        began_ns = self._clock_ns()
        logits = opened.work.advance()
        while logits is None and not others and self._clock_ns() - began_ns < EDGE_NS:
            logits = opened.work.advance()
        opened.spent_ns += self._clock_ns() - began_ns
        if logits is not None:
            self._close()
        return logits

    def abandon(self) -> None:
        """Give the open pass up, if there is one."""
        opened = self._close()
        if opened is not None:
            opened.work.abandon()

    def _close(self) -> OpenPass | None:
        opened, self.open = self.open, None
        for part in opened.slices if opened is not None else ():
            part.seq.busy_to = 0
        return opened

    def gives(self, seq: Running, position: int) -> bool:
        """Whether the open pass will hold seq's state at this position."""
        return self.open is not None and any(
            part.seq is seq and position == cut for part in self.open.slices for cut, _ in part.cuts
        )

    def _batch(self, slices: list[Slice]) -> ForwardBatch:
        page_size = self._store.page_size
        # In numpy, which takes half as long as torch for a handful of integers: every decode step waits for this.
        count = sum(part.end - part.start for part in slices)
        ids, positions = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        last = np.empty(len(slices), dtype=np.int64)
        seqs: list[SeqSlice] = []
        at = 0
        for index, part in enumerate(slices):
            seq = part.seq
            table = seq.table
            assert table is not None
            start, end = part.start, part.end
            cuts = tuple(StateCut(position - start, row) for position, row in part.cuts if row != NO_ROW) if part.cuts else ()
            pages = table.view(-(-end // page_size))
            draw = None if self.ahead is None else self.ahead.draw(part)
            seqs.append(SeqSlice(at, end - start, start, pages, seq.row, start == 0, cuts, row_out(part), draw))
            if end - start == 1:  # an array for one token costs as much as all else here
                ids[at], positions[at] = seq.token_at(start), start
                at += 1
            else:
                rows = slice(at, at + end - start)
                ids[rows] = seq.tokens[start:end]
                positions[rows] = np.arange(start, end)
                at = rows.stop
            last[index] = at - 1
        return ForwardBatch(torch.from_numpy(ids), torch.from_numpy(positions), tuple(seqs), torch.from_numpy(last))
