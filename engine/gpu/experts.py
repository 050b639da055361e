"""The routed experts of a model on the device: slot pool, maps, worklists, the way to the CPU executor. One per model.

Knows bytes and where they lie; the steps (decode.py, prefill.py) say what runs when.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import torch

from engine.device.base import Device
from engine.elastic.plan import slot_moves
from engine.errors import DeviceError
from engine.moe.banks import ExpertBank
from engine.moe.cost import ASSUMED, Rates
from engine.moe.device_state import SlotState
from engine.moe.handoff import Executor, ExecutorState, Mailbox, explain, start_executor
from engine.moe.host_bank import HostBank
from engine.moe.modes import Mode
from engine.moe.split import MissSplit

HANDOFF_TOKENS = 1024
"""Most tokens of one request to the CPU executor."""
WAIT_LIMIT_US = 5_000_000
"""After this the device gives up waiting for the executor. The slowest right answer, 256 tokens over all experts of a layer on
a few cores, takes a tenth of it."""


class Reads(IntEnum):
    """What a decode step brings over the link: nothing, whole experts, or also the last rows of those that the CPU computes."""

    NOTHING = 0
    WHOLE = 1
    PARTS = 2


class ExpertPool:
    """slots over all layers, or every expert resident.

    bank: records of flat ids, layer · experts + expert; its memory is given back if all are resident. memory: uint8 [room,
    record bytes], for all slots that there may be; slots: how many there are now, None = all. top_k: choices of a token.
    max_rows: of a decode step. rates: as measured. mode: how decode misses are divided, "auto" = by what is seen to be fastest.
    divide: whether experts may be divided, too.
    """

    def __init__(
        self,
        device: Device,
        bank: HostBank,
        memory: torch.Tensor,
        experts: int,
        top_k: int,
        max_rows: int,
        policy: str,
        rates: Rates = ASSUMED,
        mode: Mode | Literal["auto"] = "auto",
        slots: int | None = None,
        divide: bool = True,
    ) -> None:
        self.device, self.bank, self.memory = device, bank, memory
        self.experts, self.top_k = experts, top_k
        self.layers = bank.rows // experts
        self._divide = divide
        self.room = len(memory)
        self.weights: ExpertBank = bank.record.views(memory)
        place = device.torch_device
        slots = self.room if slots is None else slots
        self.state = SlotState.empty(self.layers, experts, slots, policy, place, bank.pinned_rows, self.room)
        self.resident = slots >= bank.rows
        self.counts = torch.zeros(4, dtype=torch.int32, device=place)
        self.clock = torch.zeros(4, dtype=torch.int64, device=place)
        # Fetches of one layer of one step: never more than there are choices, experts or slots.
        most = max(1, min(max_rows * top_k, experts, self.room))
        self.work = torch.zeros(most, 2, dtype=torch.int32, device=place)
        self.table = torch.zeros(max_rows * top_k + 1, dtype=torch.int32, device=place)
        # Of m misses, how many inner rows of each expert on the CPU the device computes itself, over the link.
        self.shares = torch.zeros_like(self.table)
        self.no_shares = torch.zeros(1, dtype=torch.int32, device=place)
        self._no_fetches = (torch.zeros_like(self.table), torch.zeros_like(self.table), Reads.NOTHING)
        self.box = Mailbox(device, HANDOFF_TOKENS, bank.record.hidden, top_k, bank.record.dtype)
        self.nothing = torch.zeros(HANDOFF_TOKENS, bank.record.hidden, device=place)
        self.split = MissSplit(rates, bank.record.nbytes, top_k, max_rows, mode, self.divisible)
        self._tables: dict[tuple[Mode, int], tuple[torch.Tensor, torch.Tensor, Reads]] = {}
        self._current: tuple[torch.Tensor, torch.Tensor, Reads] | None = None
        self._executor: Executor | None = None
        if self.resident:
            for rows in bank.runs(0, bank.rows):
                memory[rows].copy_(bank.bytes[rows])
            bank.discard()
        else:
            self._executor = start_executor(self.box, bank, experts)

    @property
    def slots(self) -> int:
        """There are now."""
        return self.state.slots

    @property
    def total(self) -> int:
        return self.layers * self.experts

    @property
    def rates(self) -> Rates:
        """The newest."""
        return self.split.rates

    def layer(self, ordinal: int) -> ExpertBank:
        """The experts of one layer when all are resident: rows are experts."""
        rows = slice(ordinal * self.experts, (ordinal + 1) * self.experts)
        return ExpertBank(self.weights.gate_up[rows], self.weights.down[rows])

    def host_layer(self, ordinal: int) -> ExpertBank:
        """The experts of one layer where they lie in host memory."""
        return self.bank.record.views(self.bank.bytes[ordinal * self.experts : (ordinal + 1) * self.experts])

    @property
    def divisible(self) -> int:
        """Inner rows that may be divided: none if a part of the bank is out of the device's reach."""
        return self.bank.record.inter if self._divide and self.bank.pinned_rows == self.bank.rows else 0

    @property
    def reads(self) -> tuple[Reads, ...]:
        """Every kind of step that may come by the present rates."""
        if self.resident:
            return (Reads.NOTHING,)
        return tuple(Reads) if self.split.divides else (Reads.NOTHING, Reads.WHOLE)

    def use_table(self, rows: int, fetching: bool = True) -> Reads:
        """Set how the next decode steps of this many rows divide a layer's misses; graphs stay. fetching False: all to the CPU,
        for while a pass streams: the link is busy, and owners must not change. Returns what the device reads."""
        if not fetching:
            chosen = self._no_fetches
        else:
            key = (self.split.mode(rows), rows)
            if key not in self._tables:
                values = self.split.table(*key)
                full = [values[min(m, len(values) - 1)] for m in range(len(self.table))]
                assert all(0 <= q <= m and 0 <= r < self.bank.record.inter and r % 16 == 0 for m, (q, r) in enumerate(full))
                made = torch.tensor(full, dtype=torch.int32).t().contiguous().to(self.table.device)
                kind = Reads.PARTS if any(r for _, r in full) else Reads.WHOLE
                self._tables[key] = (made[0], made[1], kind) if any(q or r for q, r in full) else self._no_fetches
            chosen = self._tables[key]
        if chosen is not self._current:
            self.table.copy_(chosen[0])
            self.shares.copy_(chosen[1])
            self._current = chosen
        return chosen[2]

    def set_table(self, table: Sequence[int], taken: int = 0) -> None:
        """Always fetch so many of m misses, whatever was measured; the last entry serves every larger m. taken: inner rows of
        each of the other experts that the device computes, a multiple of 16."""
        self.split.fix(tuple((q, taken if self.divisible else 0) for q in table))
        self._tables.clear()

    def use_mode(self, mode: Mode | Literal["auto"], rates: Rates | None = None) -> None:
        """Divide decode misses in this way from the next step on, with other rates if they are given."""
        split = self.split
        chosen = split.rates if rates is None else rates
        self.split = MissSplit(chosen, self.bank.record.nbytes, self.top_k, split.max_rows, mode, self.divisible)
        self._tables.clear()

    def stepped(self, rows: int, step_ns: int) -> None:
        """A decode step took this long: learn which mode is fastest, and now and then what link and CPU really do."""
        if self._executor is None or not self.split.stepped(rows, step_ns):
            return
        state = self._executor.state()
        fetch_ns, fetched = self.clock[:2].tolist()
        if self.split.refit(fetch_ns, fetched * self.bank.record.nbytes, state.busy_ns, state.bytes):
            self._tables.clear()

    def leave(self, slots: int) -> int:
        """Use only the first so many slots from now on; returns when the device is done with the others, whose memory may go.

        What lay behind them and was used more lately than what lies before them moves there, the rest is forgotten: the bank
        has it. Owners are cleared in both maps before bytes change, and set after. No pass may be open. Returns how many
        experts moved.
        """
        maps = self.state.pull()
        moves = slot_moves(maps.id_of_slot, maps.last_use, slots)
        kept = [(maps.id_of_slot[source], maps.last_use[source], maps.heat[source]) for source, _ in moves]
        dests = [dest for _, dest in moves]
        for slot in (*range(slots, self.slots), *dests):
            maps.clear(slot)
        self.state.write_back(maps, [*range(slots, self.slots), *dests])
        for source, dest in moves:
            self.memory[dest].copy_(self.memory[source], non_blocking=True)
        for dest, (owner, used, heat) in zip(dests, kept, strict=True):
            maps.assign(dest, owner)
            maps.last_use[dest], maps.heat[dest] = used, heat
        self.state.write_back(maps, dests)
        self.state.resize(slots)
        self.device.synchronize()
        return len(moves)

    def enter(self, slots: int) -> None:
        """Use so many slots from now on; the memory of the new ones is there."""
        self.state.resize(slots)

    def wake(self) -> None:
        if self._executor is not None:
            self._executor.wake()

    def executor_state(self) -> ExecutorState | None:
        return None if self._executor is None else self._executor.state()

    def inject_fault(self, kind: int, epoch: int) -> None:
        """For tests: see Executor.fault."""
        assert self._executor is not None
        self._executor.fault(kind, epoch)

    def check(self) -> None:
        """After a step has run: raise DeviceError if the executor failed it."""
        status, epoch = self.box.status_host[:2].tolist()
        if status and self._executor is not None:
            raise DeviceError(explain(status, epoch, self._executor.state()))

    @property
    def hits(self) -> int:
        return self.totals()[2]

    @property
    def misses(self) -> int:
        return self.totals()[3]

    def totals(self) -> tuple[int, int, int, int]:
        """Since the start: fetches, experts on the CPU, hits, misses. Waits for the device."""
        fetches, on_cpu, hits, misses = self.state.totals.tolist()
        return fetches, on_cpu, hits, misses

    def close(self) -> None:
        """Stop the executor and let go of pinned memory. The device must be idle."""
        if self._executor is None or self._executor.stop():
            self.bank.unpin(self.device)
        self._executor = None
