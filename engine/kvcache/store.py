"""Who owns which page and row: tables of running requests, holds, copies to the host. For the way back see loading.py.

Sharing rule. A page has one writer, the request that took it, and that request only appends. A hold at a position inside a
page shares the page with its writer: it reads rows before its position, the writer goes on behind them, so nothing is
copied when a hold is made. A request that restores a hold shares all its pages; before its first write into a partly filled
last page it takes a copy of the filled rows, unless nobody else references that page any more. So restoring costs at most
one page copy, whatever the length, and rows that a hold has seen are never written again.

Recurrent state has no such rule, since every token overwrites it: each request and each hold has its own row, and a row is
copied, or handed over when its owner ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.device.base import Device
from engine.elastic.plan import page_moves
from engine.errors import OutOfPages, OutOfRows, UnknownHold
from engine.kvcache.allocator import RefAllocator
from engine.kvcache.arriving import Arrivals
from engine.kvcache.device import DeviceKvPools, DeviceRecurrentPools, copy_to_host, device_pools
from engine.kvcache.leaving import Copied, Departures, Leaving
from engine.kvcache.pool import KvPools
from engine.kvcache.recurrent import RecurrentPools
from engine.kvcache.table import PageTable
from engine.models.base import ModelSpec
from engine.types import ROW, HoldId, KvRun, StateLayout, StateSnapshot

NO_ROW = -1


@dataclass(slots=True)
class Held:
    """One reference to a state: position tokens in pages (a reference to each) and row (owned; NO_ROW without recurrence).

    tokens: int64 [position], the ids that made the state (a view of an append-only buffer). logits: f32 [vocab] or None.
    """

    position: int
    pages: np.ndarray
    row: int
    tokens: np.ndarray
    logits: torch.Tensor | None


class StateStore:
    """Pools, their allocators and the holds. The only place where references to pages and rows are counted."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        rows: int,
        poison: bool = False,
        device: Device | None = None,
        room: int | None = None,
        memory: torch.Tensor | None = None,
        spare: int = 0,
    ) -> None:
        """device: where the pools lie; None = host memory, laid out for the CPU kernels. room: pages that there may be later,
        with memory, uint8, for their keys and values; the bytes of pages that there are not yet are not touched. spare: rows
        beside `rows`, for take_spare()."""
        self.page_size = page_size
        self._device = device
        self._arrivals: Arrivals | None = None
        self._departures = Departures()
        self.take: Callable[[int], np.ndarray] = _ordinary
        """Where copies on the host lie: uint8 [nbytes], of memory that the device writes by itself if there is such."""
        self.recurrent = bool(spec.delta_layers)
        rows, spare = (rows + spare, spare) if self.recurrent else (0, 0)
        if device is None:
            self.kv, self.states = KvPools(spec, pages, page_size), RecurrentPools(spec, rows)
        else:
            self._arrivals = arrivals = Arrivals(device)
            most = pages if room is None else room
            self.kv, self.states = device_pools(spec, most, page_size, rows, device, arrivals, memory)
        self.pages = RefAllocator(pages, OutOfPages, room)
        self.rows = RefAllocator(rows, OutOfRows)
        self._spare = self.rows.take(spare).tolist()
        self.total_rows = rows - spare
        self.holds: dict[HoldId, Held] = {}
        self.layout = StateLayout(self.kv.token_bytes, self.states.components if rows else (), spec.vocab_size)
        self._next_hold = 1
        self._poison = poison
        if poison:
            self.kv.fill(np.arange(pages), float("nan"))
            self.states.fill(np.arange(rows), float("nan"))

    # ── pages of a running request ──────────────────────────────────────────────────────────────────────────────

    def pages_needed(self, table: PageTable, position: int, target: int) -> int:
        """Fresh pages that grow(table, position, target) would take."""
        fresh = -(-target // self.page_size) - table.count
        if target > position and table.borrowed_tail and self.pages.refs[table.pages[-1]] > 1:
            fresh += 1
        return max(0, fresh)

    def grow(self, table: PageTable, position: int, target: int) -> None:
        """Make positions [position, target) writable; position tokens are filled. Raises OutOfPages, changing nothing."""
        needed = self.pages_needed(table, position, target)
        if needed > self.pages.free:
            raise OutOfPages(needed, self.pages.free)
        if target > position and table.borrowed_tail:
            self._own_tail(table, position)
        fresh = -(-target // self.page_size) - table.count
        if fresh > 0:
            table.append(self.pages.take(fresh))

    def _own_tail(self, table: PageTable, position: int) -> None:
        shared = table.pages[-1:].copy()
        if self.pages.refs[shared[0]] == 1:
            table.borrowed_tail = False
            return
        own = int(self.pages.take(1)[0])
        self.kv.copy_head(int(shared[0]), own, position % self.page_size)
        table.replace_tail(own)
        self.release_pages(shared)

    def release_pages(self, pages: np.ndarray) -> None:
        freed = self.pages.release(pages)
        if self._poison and len(freed):
            self.kv.fill(freed, float("nan"))

    # ── more pages and fewer ────────────────────────────────────────────────────────────────────────────────────────

    def leave_pages(self, keep: int) -> np.ndarray | None:
        """Use only the first `keep` pages from now on. What lies behind them moves to free ones before, in the pool and in all
        holds. Returns the new id of every page, for whoever else has ids, None if nothing moved.

        Raises OutOfPages, changing nothing, if there are too few free ones.
        """
        self.settle()
        sources, dests = page_moves(self.pages.refs, keep)
        renamed = None
        if len(sources):
            assert isinstance(self.kv, DeviceKvPools)
            self.kv.move(sources, dests)
            renamed = np.arange(len(self.pages.refs), dtype=np.int32)
            renamed[sources] = dests
            for held in self.holds.values():
                held.pages = renamed[held.pages]
            self.pages.move(sources, dests)
        self.pages.resize(keep)
        return renamed

    def enter_pages(self, pages: int) -> None:
        """Use so many pages from now on; the memory of the new ones is there."""
        before = self.pages.total
        self.pages.resize(pages)
        if self._poison:
            self.kv.fill(np.arange(before, pages), float("nan"))

    # ── recurrent rows ──────────────────────────────────────────────────────────────────────────────────────────

    def take_row(self) -> int:
        """A row of its own, content undefined; NO_ROW for a pure attention model. Raises OutOfRows."""
        return int(self.rows.take(1)[0]) if self.recurrent else NO_ROW

    def copy_row(self, source: int) -> int:
        """A fresh row with the content of source. Raises OutOfRows."""
        row = self.take_row()
        if row != NO_ROW:
            try:
                self.states.copy(source, row)
            except BaseException:
                self.release_row(row)
                raise
        return row

    def release_row(self, row: int) -> None:
        if row == NO_ROW:
            return
        ids = np.array([row], dtype=np.int32)
        self.rows.release(ids)
        if self._poison:
            self.states.fill(ids, float("nan"))

    def take_spare(self) -> int | None:
        """A row for the state one token further on, whose borrower may use it in the place of the one it has, and gives either
        back. NO_ROW for a pure attention model; None: all are lent."""
        if not self.recurrent:
            return NO_ROW
        return self._spare.pop() if self._spare else None

    def return_spare(self, row: int) -> None:
        if row != NO_ROW:
            self._spare.append(row)
            if self._poison:
                self.states.fill(np.array([row], dtype=np.int32), float("nan"))

    # ── holds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, table: PageTable, position: int, row: int, tokens: np.ndarray, logits: torch.Tensor | None) -> HoldId:
        """Keep the state after `position` tokens. Takes over `row`, adds a reference to each page; copies nothing."""
        pages = table.pages[: -(-position // self.page_size)].copy()
        self.pages.retain(pages)
        hold = HoldId(self._next_hold)
        self._next_hold += 1
        self.holds[hold] = Held(position, pages, row, tokens[:position], logits)
        return hold

    def get(self, hold: HoldId) -> Held:
        """Raises UnknownHold."""
        held = self.holds.get(hold)
        if held is None:
            raise UnknownHold(hold)
        return held

    def release(self, hold: HoldId) -> None:
        """Raises UnknownHold."""
        held = self.get(hold)
        del self.holds[hold]
        self.drop(held)

    def pin(self, hold: HoldId) -> Held:
        """A second reference to a hold's state, which outlives the hold. The row is shared until the pin is opened."""
        return self._retained(self.get(hold))

    def drop(self, held: Held) -> None:
        """Give up the references of a pin or of a hold that is no longer listed."""
        self.release_pages(held.pages)
        if held.row != NO_ROW:
            ids = np.array([held.row], dtype=np.int32)
            if len(self.rows.release(ids)) and self._poison:
                self.states.fill(ids, float("nan"))

    def open_pin(self, held: Held) -> tuple[PageTable, int]:
        """Turn a pin into a running request's table and row. Raises OutOfRows, leaving the pin as it was."""
        row = held.row
        if row != NO_ROW and self.rows.refs[row] > 1:
            row = self.copy_row(held.row)
            self.rows.release(np.array([held.row], dtype=np.int32))
        return PageTable(held.pages, borrowed_tail=held.position % self.page_size != 0), row

    def bytes_of(self, pages: int, rows: int) -> int:
        """Bytes of so many pages and rows."""
        return pages * self.page_size * self.kv.token_bytes + rows * self.layout.state_bytes

    def own_bytes(self, held: Held) -> int:
        """Bytes that nobody else references."""
        pages = int(np.count_nonzero(self.pages.refs[held.pages] == 1))
        return self.bytes_of(pages, int(held.row != NO_ROW and self.rows.refs[held.row] == 1))

    def held_bytes(self) -> int:
        """Bytes of all holds, shared pages once."""
        if not self.holds:
            return 0
        used = np.zeros(len(self.pages.refs), dtype=bool)
        for held in self.holds.values():
            used[held.pages] = True
        return self.bytes_of(int(np.count_nonzero(used)), sum(held.row != NO_ROW for held in self.holds.values()))

    # ── to the host ────────────────────────────────────────────────────────────────────────────────────

    def copy(self, held: Held, start: int, stop: int, each: int = 0, *, rest: bool = False) -> Leaving:
        """Begin to copy KV rows [start, stop) to the host, in arrays of `each` tokens (0: one), and with rest the recurrent
        components and logits. Until it is over pages and row stay referenced, whatever becomes of the hold."""
        if self._device is None:
            return Leaving(self._copied(held, start, stop, each, rest))
        kv, state, logits = self._places(held, _edges(start, stop, each), rest)
        sources = self._part(held, start, stop, rest)

        @torch.inference_mode()
        def enqueue() -> None:
            assert isinstance(self.kv, DeviceKvPools)
            assert isinstance(self.states, DeviceRecurrentPools)
            if kv:
                skipped = start // self.page_size * self.page_size  # what is in front of the first page of the sources
                self.kv.copy_out(sources.pages, start - skipped, stop - skipped, kv)
            if state is not None:
                self.states.copy_out(sources.row, state)
            if logits is not None and sources.logits is not None:
                copy_to_host((logits,), sources.logits.view(torch.uint8))

        try:
            moment = self._device.aside(enqueue)
        except BaseException:
            self._device.synchronize()  # what was enqueued before it went wrong
            self.drop(sources)
            raise
        for array in (*kv, state, logits):
            if array is not None:
                _close(array)
        row = {} if state is None else {ROW: state}
        copied = Copied(tuple(kv), row, None if logits is None else logits.view(np.float32))
        return self._departures.add(Leaving(copied, moment, sources, self.drop))

    def _copied(self, held: Held, start: int, stop: int, each: int, rest: bool) -> Copied:
        """The same at once, in host memory."""
        kv = [self.kv.read(held.pages, first, end) for first, end in _edges(start, stop, each)]
        state = {ROW: self.states.read(held.row)} if rest and held.row != NO_ROW else {}
        logits = held.logits.numpy().copy() if rest and held.logits is not None else None
        for array in (*kv, *state.values()):
            _close(array)
        return Copied(tuple(kv), state, logits)

    def _places(
        self, held: Held, edges: list[tuple[int, int]], rest: bool
    ) -> tuple[list[np.ndarray], np.ndarray | None, np.ndarray | None]:
        width, take = self.kv.token_bytes, self.take
        kv = [take((end - first) * width).reshape(end - first, width) for first, end in edges]
        state = take(self.layout.state_bytes) if rest and held.row != NO_ROW else None
        logits = take(held.logits.nbytes) if rest and held.logits is not None else None
        return kv, state, logits

    def _part(self, held: Held, start: int, stop: int, rest: bool) -> Held:
        """A second reference to what a copy reads: the pages of [start, stop), and with rest the row and logits."""
        first = start // self.page_size
        pages = held.pages[first : max(first, -(-stop // self.page_size))]
        return self._retained(Held(held.position, pages, held.row if rest else NO_ROW, held.tokens, held.logits))

    def _retained(self, held: Held) -> Held:
        """A second reference to all that is held."""
        self.pages.retain(held.pages)
        if held.row != NO_ROW:
            self.rows.retain(np.array([held.row], dtype=np.int32))
        return Held(held.position, held.pages, held.row, held.tokens, held.logits)

    def export(self, held: Held, kv_start: int = 0) -> StateSnapshot:
        """A copy on the host, now: KV rows from kv_start, the recurrent components, logits if held."""
        copied = self.copy(held, kv_start, held.position, rest=True).result()
        runs = tuple(KvRun(kv_start, rows) for rows in copied.kv)
        return StateSnapshot(held.position, runs, self.layout.split(copied.state), copied.logits)

    def look(self) -> None:
        """Let go of what copies that are over referred to. Waits for none."""
        self._departures.look()
        if self._arrivals is not None:
            self._arrivals.look()

    def forget_memory(self) -> None:
        """Copies go to any memory from now on, and the device reads and writes no other any more."""
        self.take = _ordinary
        if self._device is not None:
            self._device.synchronize()
        self.look()

    def settle(self) -> bool:
        """Wait for all copies to the host: only holds and requests refer to a page or row then. False: there were none."""
        return self._departures.settle()

    def check(self, tables: list[PageTable], rows: list[int], pins: list[Held]) -> None:
        """Assert that free + held + running = total and that every reference count is explained. For tests."""
        held = [*self.holds.values(), *pins, *self._departures.sources()]
        self.pages.check([*(t.pages for t in tables), *(h.pages for h in held)])
        used = [r for r in (*rows, *self._spare, *(h.row for h in held)) if r != NO_ROW]
        self.rows.check([np.array([r], dtype=np.int32) for r in used])


def _edges(start: int, stop: int, each: int) -> list[tuple[int, int]]:
    """[start, stop) in parts of `each`, the last one what is left; 0: one part."""
    if start == stop:
        return []
    return [(first, min(first + each, stop)) for first in range(start, stop, each)] if each else [(start, stop)]


def _close(array: np.ndarray) -> None:
    """Nobody writes to it any more, so that others may keep it as it is."""
    array.flags.writeable = False
    while isinstance(array.base, np.ndarray):
        array = array.base
        array.flags.writeable = False


def _ordinary(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, dtype=np.uint8)
