"""Experts behind fewer slots than there are experts: copies records into slots, computes from slots and from the host banks.

The decisions are dispatch.py's (decode) and transfer.py's (prefill); here are the bytes. On CPU tensors a "fetch" is a
plain copy: it buys no speed, it lets the bookkeeping that a GPU needs run and be tested everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.kernels import cpu, reference
from engine.moe.banks import ExpertBank, check_uniform
from engine.moe.dispatch import fetch_table, plan_decode, publish
from engine.moe.slots import NONE, SlotMap, VictimPolicy
from engine.moe.transfer import Ring

DECODE_TOKENS = 16


class ExpertOffload:
    """The slot pool of all MoE layers of a model.

    banks: one per MoE layer, all alike. native: compute with the C++ library, which sums a token's slot experts and its
    bank experts apart; without it they are summed in the router's order, so that results do not depend, to the bit, on what
    lay in a slot. fetch_limit: misses of a decode step that are fetched, −1 = all. decode_tokens: batches up to this size
    use the decode path.
    """

    def __init__(
        self,
        banks: Sequence[ExpertBank],
        slots: int,
        policy: VictimPolicy,
        native: bool = False,
        fetch_limit: int = -1,
        decode_tokens: int = DECODE_TOKENS,
    ) -> None:
        check_uniform(banks)
        self.banks = banks
        self.map = SlotMap(slots, len(banks), banks[0].rows, policy)
        self.pool = banks[0].empty_like(slots)
        self._native = native
        self._table = fetch_table(fetch_limit, banks[0].rows)
        self._decode_tokens = decode_tokens

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The routed experts of MoE layer `layer` (counted among MoE layers). As reference.experts_forward."""
        work = _Sum(x, weights) if self._native else _Ordered(x, ids, weights)
        if x.shape[0] <= self._decode_tokens:
            self._decode(layer, ids, work)
        else:
            self._prefill(layer, ids, work)
        return work.total()

    def _decode(self, layer: int, ids: torch.Tensor, work: _Work) -> None:
        bank = self.banks[layer]
        plan = plan_decode(self.map, layer, ids.flatten().tolist(), self._table)
        for fetch in plan.fetches:
            self.pool.copy_row(fetch.slot, bank, fetch.expert)
            publish(self.map, fetch)
        work.add(_rewrite(ids, plan.slots), self.pool)
        if plan.cpu:
            work.add(_rewrite(ids, {e: e for e in plan.cpu}), bank)

    def _prefill(self, layer: int, ids: torch.Tensor, work: _Work) -> None:
        """Residents are read in place; the others are streamed through a ring, as many at a time as it has slots."""
        bank, base = self.banks[layer], layer * self.map.experts
        self.map.tick()
        used = [e for e in torch.unique(ids).tolist() if e >= 0]
        resident = {e: self.map.slot_for_id[base + e] for e in used if self.map.slot_for_id[base + e] != NONE}
        missing = [e for e in used if e not in resident]
        self.map.hits += len(resident)
        self.map.misses += len(missing)
        for slot in resident.values():
            self.map.touch(slot)
        work.add(_rewrite(ids, resident), self.pool)
        if not missing:
            return
        ring = Ring(self.map, len(missing), active=[base + e for e in resident])
        if len(ring) == 0:
            work.add(_rewrite(ids, {e: e for e in missing}), bank)
        for start in range(0, len(missing), len(ring) or len(missing)):
            if len(ring) == 0:
                break
            part: dict[int, int] = {}
            for expert in missing[start : start + len(ring)]:
                slot = ring.begin(base + expert)
                self.pool.copy_row(slot, bank, expert)
                ring.ready(slot)
                part[expert] = slot
            work.add(_rewrite(ids, part), self.pool)
            for slot in part.values():
                ring.release(slot)
        ring.close()


class _Work(Protocol):
    """One layer's expert outputs of one batch, collected in parts."""

    def add(self, rows: torch.Tensor, bank: ExpertBank) -> None:
        """rows: int32 [tokens, top_k], rows of the bank; −1 where another part computes it."""
        ...

    def total(self) -> torch.Tensor:
        """f32 [tokens, hidden], weighted."""
        ...


class _Ordered:
    """Keeps every expert's output apart and sums them in the order of the router's choices."""

    def __init__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._x, self._weights = x, weights
        self._out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float32)

    def add(self, rows: torch.Tensor, bank: ExpertBank) -> None:
        reference.expert_outputs(self._x, rows, bank.gate_up, bank.down, self._out)

    def total(self) -> torch.Tensor:
        return reference.combine(self._out, self._weights)


class _Sum:
    """Adds up whole parts, each computed by the C++ library."""

    def __init__(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        self._x, self._weights = x, weights
        self._out = torch.zeros(x.shape, dtype=torch.float32)

    def add(self, rows: torch.Tensor, bank: ExpertBank) -> None:
        self._out += cpu.experts_forward(self._x, rows, self._weights, bank.gate_up, bank.down)

    def total(self) -> torch.Tensor:
        return self._out


def _rewrite(ids: torch.Tensor, rows: dict[int, int]) -> torch.Tensor:
    """ids with each expert replaced by its row, or −1 where it has none."""
    flat = [rows.get(e, NONE) for e in ids.flatten().tolist()]
    return torch.tensor(flat, dtype=torch.int32).view(ids.shape)
