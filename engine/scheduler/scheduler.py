"""Who runs next: who is let in, pages for growth, and which slices one step takes.

Moves references, never numbers: passes.py runs the model, outcomes.py samples, order.py says who goes first. When pages
run out, in this order: the owner of holds is asked to release some (`reclaim`), states pinned for requests that still wait go
to host memory, the youngest running request goes to host memory and waits again. The oldest running request is never moved
for its pages, so it always comes to an end and nothing deadlocks. When rows run out and a turn cannot wait, a running request
is paused in the same way. A request that went to the host returns bit for bit, and nothing of it is computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import OutOfPages, OutOfRows
from engine.kvcache.loading import Loading
from engine.kvcache.store import NO_ROW, Held, StateStore
from engine.kvcache.table import PageTable
from engine.scheduler.growth import blend, planned_growth, to_pause
from engine.scheduler.order import GRACE_US, Claim, Service, order, pressed
from engine.scheduler.pace import LEAST_CHUNK, Pace, chunk_now, chunk_sizes
from engine.scheduler.prefill import choose_slices, next_edge
from engine.scheduler.sequence import Sequence

log = logging.getLogger(__name__)
RESUME_US = 2_000_000
"""A paused answer is to go on after so long; its deadline for coming back."""


class Slice(NamedTuple):
    """seq's tokens [start, end) run in this step. cuts: (position, row that receives the recurrent state there)."""

    seq: Sequence
    start: int
    end: int
    cuts: tuple[tuple[int, int], ...]

    @property
    def decode(self) -> bool:
        return self.start >= self.seq.prompt_length


class Scheduler:
    """Owns the requests that wait and those that run.

    gap_us: how long a step with prefill may take while others generate or wait; 0 = as long as it needs.
    clock(): µs, of the same clock as the deadlines.
    reclaim(pages): asks the owner of holds to release some worth about `pages` pages; returns how many holds it released.
    starved: requests that cannot go on although nothing else runs and reclaim gave nothing; the engine fails them.
    pace: what steps cost; the engine tells it. service: what each owner of requests has had. loaded_bytes: of saved states,
    copied back so far. short_pages: most that were asked for and not free, since somebody set it to 0.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        max_rows: int,
        chunk_tokens: int,
        step_tokens: int,
        restore_bytes: int = 32 << 20,
        gap_us: int = 0,
        clock: Callable[[], int] = lambda: 0,
    ) -> None:
        self.store = store
        self.max_rows = max_rows
        self.chunk_tokens = chunk_tokens
        self.step_tokens = step_tokens
        self.restore_bytes = restore_bytes
        self.gap_us = gap_us
        self.pace = Pace()
        self.service = Service()
        self.reclaim: Callable[[int], int] | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.starved: list[Sequence] = []
        self.preemptions = 0
        self.pauses = 0
        self.cuts_skipped = 0
        self.loaded_bytes = self.short_pages = 0
        self._clock = clock
        self._sizes = chunk_sizes(chunk_tokens, min(LEAST_CHUNK, chunk_tokens))
        self._typical_output: int | None = None
        self._ready: list[Sequence] = []
        self._ahead: dict[str, int] = {}
        self._now = 0

    # ── a step, in two halves ───────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Give decoding requests their next page, let in who waits, copy a piece of what is restored."""
        self._now = self._clock()
        for seq in tuple(self.running):
            # An earlier, older request may have sent this one to the host.
            if seq.table is not None and seq.decoding and seq.computed < seq.length:
                self._grow(seq)
        self._ahead = self.service.ahead({s.request.owner for s in (*self.running, *self.waiting) if not s.output_length})
        if self.waiting:
            self._let_in()
        self._load()
        self._ready = [seq for seq in self.running if seq.decoding and seq.computed < seq.length]

    def slices(self, prefill: bool = True) -> list[Slice]:
        """What this step runs: every decoding request, then prefill chunks in order within the token budget and the gap.

        prefill False: decoding requests alone, since a pass is open.
        """
        chosen: list[Slice] = []
        for seq in self._ready:
            end = seq.computed + 1
            # Asked here already: hardly any step has a cut, and this is done for every row of every step.
            cuts = self._cut_rows(seq, end) if seq.cuts and seq.cuts[0] <= end else ()
            chosen.append(Slice(seq, end - 1, end, cuts))
        turn = [seq for seq in self.running if prefill and not seq.decoding and seq.loading is None]
        if turn:
            if len(turn) > 1:
                turn = self._ordered(turn)
            size = self._chunk(turn)
            ends = [next_edge(seq.computed, seq.prompt_length, size, seq.edges) for seq in turn]
            lengths = [end - seq.computed for seq, end in zip(turn, ends, strict=True)]
            budget = self.step_tokens - len(chosen) if size == self.chunk_tokens else size
            for index in choose_slices(lengths, budget):
                seq = turn[index]
                chosen.append(Slice(seq, seq.computed, ends[index], self._cut_rows(seq, ends[index])))
                us = self.pace.prefill_us(seq.computed, lengths[index], self.chunk_tokens)
                self.service.charge(seq.request.owner, us)
        return chosen

    def _chunk(self, turn: list[Sequence]) -> int:
        """Tokens between the edges at which the next chunks may end. turn: prompts that can run, in order."""
        rows, context, start = len(self._ready), sum(seq.computed for seq in self._ready), max(seq.computed for seq in turn)
        costs = [self.claim(seq).cost for seq in (*self.running, *self.waiting) if not seq.output_length]
        presses = pressed(self.claim(turn[0]), self._now)
        return chunk_now(self.pace.step_us, self._sizes, self.gap_us, rows, context, start, costs, presses)

    # ── order ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _ordered(self, seqs: list[Sequence]) -> list[Sequence]:
        return [seqs[i] for i in order([self.claim(seq) for seq in seqs], self._now, self._ahead)]

    def claim(self, seq: Sequence) -> Claim:
        """What seq asks for: its first token, or to go on with an answer that was paused."""
        if seq.output_length:
            # Its first deadline is over already, so that the second, for good, is the one that counts.
            due, cost = seq.paused_us + RESUME_US - GRACE_US, 0
        else:
            due, cost = seq.due_us, self.pace.prefill_us(seq.done, seq.prompt_length - seq.done, self.chunk_tokens)
        request = seq.request
        return Claim(due, cost, request.share, request.priority, seq.order, request.owner)

    def _let_in(self) -> None:
        """Admit in order; the first that finds no room holds up those behind it, or large ones would wait for ever."""
        if len(self.waiting) > 1:
            self.waiting = self._ordered(self.waiting)
        while self.waiting:
            seq = self.waiting[0]  # who is paused for it comes before it
            if (len(self.running) >= self.max_rows and not self._pause_one(seq)) or not self._admit(seq):
                return

    def _pause_one(self, seq: Sequence) -> bool:
        """Free a row for a turn that cannot wait: first from a prompt that can, else from the answer that has run longest."""
        if not pressed(self.claim(seq), self._now):
            return False
        prompts = [other for other in self.running if not (other.output_length or other.busy_to)]
        easy = [other for other in self._ordered(prompts) if not pressed(self.claim(other), self._now)]
        if easy:
            victim = easy[-1]
        else:
            index = to_pause(
                [s.output_length - s.let_in_at if s.output_length and not s.busy_to else None for s in self.running]
            )
            if index is None:
                return False
            victim = self.running[index]
        self._to_host(victim)
        self.pauses += 1
        return True

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
        if length := seq.output_length:
            self._typical_output = length if self._typical_output is None else blend(self._typical_output, length)

    def _release(self, seq: Sequence) -> None:
        assert seq.table is not None
        self.store.release_pages(seq.table.pages)
        for row in (seq.row, *seq.cut_rows):
            self.store.release_row(row)
        self.store.return_spare(seq.ahead_row)
        seq.vacate()

    def _admit(self, seq: Sequence) -> bool:
        """Give a waiting request its row and pages for all its tokens, if they can be had, and let it run.

        What it restores from the host is copied by _load().
        """
        store = self.store
        # Also pages for what all answers are expected to grow to, unless it would run alone: else it, or the youngest of the
        # others, might have to leave again at once.
        spare = sum(self._growth(one) for one in (seq, *self.running)) if self.running else 0

        def needs() -> tuple[int, int]:
            held = seq.restore
            if not isinstance(held, Held):
                return -(-seq.length // store.page_size) + spare, int(store.recurrent)
            table = PageTable(held.pages, borrowed_tail=held.position % store.page_size != 0)
            own_row = held.row != NO_ROW and store.rows.refs[held.row] > 1
            return store.pages_needed(table, held.position, seq.length) + spare, int(own_row)

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
        self.waiting.remove(seq)
        seq.let_in_at = seq.output_length
        self.running.append(seq)
        store.grow(seq.table, seq.computed if seq.loading is None else seq.loading.snapshot.position, seq.length)
        return True

    def _restored(self, seq: Sequence, position: int, logits: torch.Tensor | None) -> None:
        seq.restore = seq.loading = None
        seq.computed = position
        if position == seq.length:
            seq.logits = logits

    def _load(self) -> None:
        """Copy at most `restore_bytes` of saved states to where they are used, in order.

        So no step waits for a whole restore: the others decode in between, and a cancelled one stops at once.
        """
        left = self.restore_bytes
        seqs = [seq for seq in self.running if seq.loading is not None]
        for seq in self._ordered(seqs) if len(seqs) > 1 else seqs:
            loading = seq.loading
            assert loading is not None
            copied = loading.advance(left)
            left, self.loaded_bytes = left - copied, self.loaded_bytes + copied
            if not loading.done:
                return
            self._restored(seq, loading.snapshot.position, _tensor(loading.snapshot.logits))
            if left <= 0:
                return

    def _growth(self, seq: Sequence) -> int:
        most = seq.request.sampling.max_tokens
        return planned_growth(seq.length, seq.output_length, most, self._typical_output or 0, self.store.page_size)

    # ── room ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _grow(self, seq: Sequence) -> None:
        """Make the next position writable, or send the youngest request away for it, maybe this one."""
        store, table, target = self.store, seq.table, seq.computed + 1
        assert table is not None
        if not table.borrowed_tail and target <= table.count * store.page_size:
            return

        def needs() -> tuple[int, int]:
            return store.pages_needed(table, seq.computed, target), 0

        while not self._make_room(needs, seq, spill=True):
            youngest = max((other for other in self.running if not other.busy_to), key=lambda other: other.order)
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
        self.short_pages = max(self.short_pages, needs()[0] - self.store.pages.free)
        while not self._free(*needs()):
            if not self._reclaim(*needs()) and not (spill and self._spill_one(seq)):
                return False
        return True

    def _free(self, pages: int, rows: int) -> bool:
        return pages <= self.store.pages.free and rows <= self.store.rows.free

    def _reclaim(self, pages: int, rows: int) -> bool:
        if self.store.settle():
            return True  # what copies still referred to may be enough
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
        """Move a running request to the host for its pages."""
        self._to_host(seq)
        self.preemptions += 1

    def _to_host(self, seq: Sequence) -> None:
        """Make a checkpoint of a running request and let it wait with that."""
        assert seq.table is not None
        log.debug("request paused id=%s computed=%d", seq.id, seq.computed)
        if seq.computed:
            seq.restore = self.store.export(Held(seq.computed, seq.table.pages, seq.row, seq.tokens, seq.logits))
        self._release(seq)
        seq.computed, seq.logits = 0, None
        seq.paused_us = self._now
        self.running.remove(seq)
        self.waiting.insert(0, seq)

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
        before, self.cuts_skipped = self.cuts_skipped, self.cuts_skipped + count
        # Told when their number has doubled: a context of a thousand tool results skips some in each of its chunks.
        if before.bit_length() < self.cuts_skipped.bit_length():
            log.warning("cuts skipped all=%d held=%d rows=%d", self.cuts_skipped, len(self.store.holds), self.store.total_rows)

    def take_starved(self) -> list[Sequence]:
        """The starved requests, once; those that found room after all are left out."""
        starved = [seq for seq in dict.fromkeys(self.starved) if seq.table is None]
        self.starved.clear()
        return starved

    def unprefilled_tokens(self) -> int:
        """Prompt tokens not yet in a state, over all requests: what a new one would wait behind."""
        return sum(max(0, seq.prompt_length - seq.done) for seq in (*self.running, *self.waiting))

    def shortage(self, seq: Sequence) -> str:
        """Why a starved request cannot go on."""
        store = self.store
        no_row = store.recurrent and not store.rows.free
        error = OutOfRows(1, 0) if no_row else OutOfPages(-(-(seq.length + 1) // store.page_size), store.pages.free)
        return f"{error}; {len(store.holds)} states are held and none could be released"


def _tensor(logits: np.ndarray | None) -> torch.Tensor | None:
    return None if logits is None else torch.from_numpy(logits.copy())
