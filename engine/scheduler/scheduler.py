"""Who runs next: admission in arrival order, pages for growth, and which slices one step takes.

Moves references, never numbers: forward passes and sampling are in engine.py. When pages or rows run out, in this order:
the owner of holds is asked to release some (`reclaim`), states pinned for requests that still wait go to host memory, the
youngest running request goes to host memory and back to the head of the queue. The oldest running request is never moved
for another, so it always comes to an end and nothing deadlocks; a request that went to the host returns bit for bit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import OutOfPages, OutOfRows
from engine.kvcache.loading import Loading
from engine.kvcache.store import NO_ROW, Held, StateStore
from engine.kvcache.table import PageTable
from engine.scheduler.prefill import choose_slices, next_edge
from engine.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slice:
    """seq's tokens [start, end) run in this step. cuts: (position, row that receives the recurrent state there)."""

    seq: Sequence
    start: int
    end: int
    cuts: tuple[tuple[int, int], ...]

    @property
    def decode(self) -> bool:
        return self.start >= self.seq.prompt_length


class Scheduler:
    """Owns the queue and the running list; `waiting` and `running` are both in arrival order.

    reclaim(pages): asks the owner of holds to release some worth about `pages` pages; returns how many holds it released.
    starved: requests that cannot go on although nothing else runs and reclaim gave nothing; the engine fails them.
    """

    def __init__(
        self, store: StateStore, *, max_rows: int, chunk_tokens: int, step_tokens: int, restore_bytes: int = 32 << 20
    ) -> None:
        self.store = store
        self.max_rows = max_rows
        self.chunk_tokens = chunk_tokens
        self.step_tokens = step_tokens
        self.restore_bytes = restore_bytes
        self.reclaim: Callable[[int], int] | None = None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.starved: list[Sequence] = []
        self.preemptions = 0
        self.cuts_skipped = 0
        self._steps = 0
        self._ready: list[Sequence] = []

    # ── a step, in two halves ───────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Give decoding requests their next page, admit from the queue, copy a piece of what is restored."""
        for seq in tuple(self.running):
            # An earlier, older request may have sent this one to the host.
            if seq.table is not None and seq.decoding and seq.computed < seq.length:
                self._grow(seq)
        while self.waiting and len(self.running) < self.max_rows and self._admit(self.waiting[0]):
            pass
        self._load()
        self._ready = [seq for seq in self.running if seq.decoding and seq.computed < seq.length]

    def slices(self) -> list[Slice]:
        """What this step runs: every decoding request, then prefill chunks by turns within the token budget."""
        chosen = [Slice(seq, seq.computed, seq.computed + 1, self._cut_rows(seq, seq.computed + 1)) for seq in self._ready]
        prefilling = (seq for seq in self.running if not seq.decoding and seq.loading is None)
        turn = sorted(prefilling, key=lambda seq: (seq.served, seq.order))
        if turn:
            ends = [next_edge(seq.computed, seq.prompt_length, self.chunk_tokens, seq.edges) for seq in turn]
            lengths = [end - seq.computed for seq, end in zip(turn, ends, strict=True)]
            self._steps += 1
            for index in choose_slices(lengths, self.step_tokens - len(chosen)):
                seq = turn[index]
                seq.served = self._steps
                chosen.append(Slice(seq, seq.computed, ends[index], self._cut_rows(seq, ends[index])))
        return chosen

    # ── the queue ───────────────────────────────────────────────────────────────────────────────────────────────

    def retire(self, seq: Sequence) -> None:
        """Take a request out for good, from wherever it is; its pages and row are free again."""
        if seq.table is None:
            self.waiting.remove(seq)
            if isinstance(seq.restore, Held):
                self.store.drop(seq.restore)
            seq.restore = None
        else:
            self.running.remove(seq)
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        assert seq.table is not None
        self.store.release_pages(seq.table.pages)
        for row in (seq.row, *seq.cut_rows):
            self.store.release_row(row)
        seq.table, seq.row, seq.loading = None, NO_ROW, None
        seq.cut_rows.clear()

    def _admit(self, seq: Sequence) -> bool:
        """Give the head of the queue its row and pages for all its tokens, if they can be had, and let it run.

        What it restores from the host is copied by _load().
        """
        store = self.store
        # One page beyond the prompt, unless it would run alone: else it might have to leave again at once.
        spare = store.page_size if self.running else 0

        def needs() -> tuple[int, int]:
            target = seq.length + spare
            held = seq.restore
            if not isinstance(held, Held):
                return -(-target // store.page_size), int(store.recurrent)
            table = PageTable(held.pages, borrowed_tail=held.position % store.page_size != 0)
            own_row = held.row != NO_ROW and store.rows.refs[held.row] > 1
            return store.pages_needed(table, held.position, target), int(own_row)

        if not self._make_room(needs, seq, spill=not self.running):
            self._maybe_starved(seq)
            return False
        restore = seq.restore
        if restore is None:
            seq.row = store.take_row()
            seq.table = PageTable(store.pages.take(0))
        elif isinstance(restore, Held):
            seq.table, seq.row = store.open_pin(restore)
            self._restored(seq, restore.position, restore.logits)
        else:
            seq.row = store.take_row()
            seq.table = PageTable(store.pages.take(-(-restore.position // store.page_size)))
            seq.loading = Loading(store, restore, seq.table.pages, seq.row)
        self.running.append(self.waiting.popleft())
        store.grow(seq.table, seq.computed if seq.loading is None else seq.loading.snapshot.position, seq.length)
        return True

    def _restored(self, seq: Sequence, position: int, logits: torch.Tensor | None) -> None:
        seq.restore = seq.loading = None
        seq.computed = position
        if position == seq.length:
            seq.logits = logits

    def _load(self) -> None:
        """Copy at most `restore_bytes` of saved states to where they are used, the oldest request's first.

        So no step waits for a whole restore: the others decode in between, and a cancelled one stops at once.
        """
        left = self.restore_bytes
        for seq in self.running:
            loading = seq.loading
            if loading is None:
                continue
            left -= loading.advance(left)
            if not loading.done:
                return
            self._restored(seq, loading.snapshot.position, _tensor(loading.snapshot.logits))
            if left <= 0:
                return

    # ── room ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _grow(self, seq: Sequence) -> None:
        """Make the next position writable, or send the youngest request away for it, maybe this one."""
        store, table = self.store, seq.table
        assert table is not None
        target = seq.computed + 1
        if not table.borrowed_tail and target <= table.count * store.page_size:
            return

        def needs() -> tuple[int, int]:
            return store.pages_needed(table, seq.computed, target), 0

        while not self._make_room(needs, seq, spill=True):
            youngest = self.running[-1]
            if len(self.running) == 1:
                self._maybe_starved(seq)
                self._preempt(seq)
                return
            self._preempt(youngest)
            if youngest is seq:
                return
        store.grow(table, seq.computed, target)

    def _make_room(self, needs: Callable[[], tuple[int, int]], seq: Sequence, spill: bool) -> bool:
        """True once needs() → (pages, rows) are free. needs is asked again after each release: a page that loses its other
        owners need not be copied any more."""
        while not self._free(*needs()):
            if not self._reclaim(*needs()) and not (spill and self._spill_one(seq)):
                return False
        return True

    def _free(self, pages: int, rows: int) -> bool:
        return pages <= self.store.pages.free and rows <= self.store.rows.free

    def _reclaim(self, pages: int, rows: int) -> bool:
        if self.reclaim is None or not self.store.holds:
            return False
        missing = max(pages - self.store.pages.free, rows - self.store.rows.free, 1)
        return self.reclaim(missing) > 0

    def _spill_one(self, keep: Sequence) -> bool:
        """Move the state pinned for the youngest waiting request to the host."""
        for seq in reversed(self.waiting):
            if seq is not keep and isinstance(seq.restore, Held):
                held = seq.restore
                seq.restore = self.store.export(held)
                self.store.drop(held)
                return True
        return False

    def _preempt(self, seq: Sequence) -> None:
        """Move a running request to the host and to the head of the queue."""
        assert seq.table is not None
        log.debug("request preempted id=%s computed=%d", seq.id, seq.computed)
        if seq.computed:
            seq.restore = self.store.export(Held(seq.computed, seq.table.pages, seq.row, seq.tokens, seq.logits))
        self._release(seq)
        seq.computed, seq.logits = 0, None
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.preemptions += 1

    def _maybe_starved(self, seq: Sequence) -> None:
        """With no callback the owner of the holds may still release some between steps: keep waiting."""
        others = [s for s in self.running if s is not seq]
        if not others and (self.reclaim is not None or not self.store.holds):
            self.starved.append(seq)

    def _cut_rows(self, seq: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """Rows for the cuts in (computed, end]. A cut for which none is left is skipped, the earlier ones first: waiting for
        one could be for ever, and ending the chunk there would change the numbers of the run."""
        if not seq.cuts or seq.cuts[0] > end:
            return ()
        due = seq.take_cuts(end)
        if not self.store.recurrent:
            return tuple((position, NO_ROW) for position in due)
        self._make_room(lambda: (0, len(due)), seq, spill=False)
        affordable = min(len(due), self.store.rows.free)
        self.skip_cuts(len(due) - affordable)
        cuts: list[tuple[int, int]] = []
        for position in due[len(due) - affordable :]:
            row = self.store.take_row()
            seq.cut_rows.append(row)  # its owner from now on, whatever fails before a hold takes it over
            cuts.append((position, row))
        return tuple(cuts)

    def row_for_hold(self, seq: Sequence) -> int | None:
        """A copy of seq's recurrent row as it is now (NO_ROW without recurrence), which belongs to seq until a hold takes it
        over; None, counted as skipped, if none is left."""
        if not self._make_room(lambda: (0, int(self.store.recurrent)), seq, spill=False):
            self.skip_cuts(1)
            return None
        row = self.store.copy_row(seq.row)
        if row != NO_ROW:
            seq.cut_rows.append(row)
        return row

    def skip_cuts(self, count: int) -> None:
        if count:
            self.cuts_skipped += count
            log.warning("cuts skipped count=%d held=%d rows=%d", count, len(self.store.holds), self.store.rows.total)

    def take_starved(self) -> list[Sequence]:
        """The starved requests, once; those that found room after all are left out."""
        starved = [seq for seq in dict.fromkeys(self.starved) if seq.table is None]
        self.starved.clear()
        return starved

    def unprefilled_tokens(self) -> int:
        """Prompt tokens not yet in a state, over all requests: what a new one would wait behind."""
        total = 0
        for seq in (*self.running, *self.waiting):
            done = seq.computed if seq.restore is None else seq.restore.position
            total += max(0, seq.prompt_length - done)
        return total

    def shortage(self, seq: Sequence) -> str:
        """Why a starved request cannot go on."""
        pages = -(-(seq.length + 1) // self.store.page_size)
        error: Exception = OutOfPages(pages, self.store.pages.free)
        if self.store.recurrent and not self.store.rows.free:
            error = OutOfRows(1, 0)
        return f"{error}; {len(self.store.holds)} states are held and none could be released"


def _tensor(logits: np.ndarray | None) -> torch.Tensor | None:
    return None if logits is None else torch.from_numpy(logits.copy())
