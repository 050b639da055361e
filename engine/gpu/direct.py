"""How fast the experts' own kernels read a part of an expert from pinned memory: what divisions below whole experts rest on.

A graph of many calls, each for one expert of its own, as a decode step with one miss a layer makes them: launches, the first
byte's latency and the gap between the two kernels are in the figures.
"""

from __future__ import annotations

from types import ModuleType

import torch

from engine.device.base import Device
from engine.device.tape import Tape
from engine.moe.cost import SHARE_ROWS
from engine.moe.host_bank import HostBank

LEAST_ROWS = 16
"""Kernels rely on parts of whole sixteens of rows."""
CALLS = 128
"""In one graph: what they read of the smallest part should be more than the device's caches hold."""


class DirectReads:
    """bank: pinned at least in part. Nothing of it changes."""

    def __init__(self, device: Device, ops: ModuleType, bank: HostBank, top_k: int) -> None:
        record, place = bank.record, device.torch_device
        self.record_bytes, self.inter = record.nbytes, record.inter
        self.calls = min(CALLS, bank.pinned_rows)
        self._shares = torch.zeros(1, dtype=torch.int32, device=place)
        x = torch.ones(1, record.hidden, dtype=record.dtype, device=place)
        ids = torch.tensor([[0] + [-1] * (top_k - 1)], dtype=torch.int32).to(place)
        weights = torch.full((1, top_k), 1 / top_k, device=place)
        counts = torch.tensor([0, 1, 0, 1], dtype=torch.int32).to(place)
        inner = torch.zeros(top_k, record.inter, dtype=record.dtype, device=place)
        out = torch.zeros(1, record.hidden, device=place)
        tape = Tape()
        for row in range(self.calls):
            one = record.views(bank.bytes[row : row + 1])
            args = (x, ids, weights, counts, self._shares, one.gate_up, one.down, inner, out)
            tape.add(lambda args=args: ops.bank_experts(*args))
        self._graph = device.capture(tape)

    def use(self, rows: int) -> None:
        """Read the last so many inner rows from now on."""
        self._shares.fill_(rows)

    def replay(self) -> None:
        """Enqueue all calls."""
        self._graph.replay()

    def nbytes(self, rows: int) -> int:
        """Of all calls."""
        return self.calls * self.record_bytes * rows // self.inter


def fitted(inter: int) -> tuple[int, int]:
    """Two parts of an expert, from whose times rate and fixed cost follow: about an eighth and a half of it, in the steps in
    which experts are divided where they have as many rows. inter: at least twice LEAST_ROWS."""
    step = SHARE_ROWS if inter >= 2 * SHARE_ROWS else LEAST_ROWS
    return max(step, inter // 8 // step * step), max(2 * step, inter // 2 // step * step)


def rate_and_cost(record_bytes: int, inter: int, seen: dict[int, int]) -> tuple[int, int]:
    """MB/s, and nanoseconds that a call takes beside its bytes. seen: nanoseconds of a call by rows, of two numbers of rows.

    Where noise makes a part cost more than its bytes' share of a larger one could, all is put down to the rate.
    """
    (few, short), (many, long) = sorted(seen.items())
    nbytes, more = record_bytes * many // inter, record_bytes * (many - few) // inter
    rate = more * 1000 // (long - short) if long > short else 0
    fixed = long - nbytes * 1000 // rate if rate else -1
    if fixed < 0:
        return max(1, nbytes * 1000 // max(1, long)), 0
    return max(1, rate), fixed
