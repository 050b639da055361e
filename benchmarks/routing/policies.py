"""Replays a recording against one way of deciding which experts lie in the slots, and counts what decoding finds there.

The slot caches are the engine's own integers (engine/moe/slots.py and dispatch.py); the placements and the optimum are plain
references that exist only here.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from benchmarks.routing.trace import Trace
from engine.moe.cost import keepers, ring_slots
from engine.moe.dispatch import plan_decode, publish
from engine.moe.slots import NONE, SlotMap, make_policy
from engine.moe.transfer import Ring

UNION_TOKENS = 512
"""Longer prompts are streamed through a ring of the coldest slots, as in the engine; shorter ones fetch what they use."""
KEPT_SHARE = 8
"""Of a layer's experts, an eighth at most come to stay in one prefill."""


class Placement(Protocol):
    """One way. Flat ids are not its business: layers and experts are."""

    def prefill(self, routes: np.ndarray) -> int:
        """New prompt tokens go through: [tokens, layers, top_k]. Returns the experts that were moved to stay."""
        ...

    def token(self, layer: int, experts: list[int]) -> tuple[int, int]:
        """A generated token in one layer: how many of its experts were not in a slot, and how many of those are fetched."""
        ...


@dataclass(frozen=True)
class Outcome:
    """misses, fetched: int [generated tokens that count, layers]. moved: experts brought by prefill, in all."""

    top_k: int
    misses: np.ndarray
    fetched: np.ndarray
    moved: int

    @property
    def hit_rate(self) -> float:
        return 1 - float(self.misses.mean()) / self.top_k

    @property
    def hit_rate_by_layer(self) -> list[float]:
        return (1 - self.misses.mean(axis=0) / self.top_k).tolist()


def replay(trace: Trace, placement: Placement) -> Outcome:
    counted = trace.counted_from()
    misses: list[list[int]] = []
    fetched: list[list[int]] = []
    moved = 0
    for generated, start, end in trace.phases():
        if not generated:
            moved += placement.prefill(trace.routes[start:end])
            continue
        for token in range(start, end):
            row = [placement.token(layer, trace.routes[token, layer].tolist()) for layer in range(trace.layers)]
            if token >= counted:
                misses.append([m for m, _ in row])
                fetched.append([f for _, f in row])
    return Outcome(trace.top_k, np.array(misses), np.array(fetched), moved)


class SlotCache:
    """The engine's slots. table: of m misses, how many are fetched (and stay); the others run on the CPU."""

    def __init__(self, policy: str, slots: int, layers: int, experts: int, table: Sequence[int]) -> None:
        self.map = SlotMap(slots, layers, experts, make_policy(policy, slots, layers))
        self._table = table

    def prefill(self, routes: np.ndarray) -> int:
        slots, experts = self.map, self.map.experts
        slots.tick()
        ring = None
        if len(routes) > UNION_TOKENS:
            most = max(experts - residents for residents in slots.residents)
            ring = Ring(slots, ring_slots(slots.slots, slots.layers, experts, most))
        moved = 0
        for layer in range(slots.layers):
            counts = np.bincount(routes[:, layer].ravel(), minlength=experts).tolist()
            base = layer * experts
            active = {base + e for e in range(experts) if counts[e]}
            for flat_id in active:
                if slots.slot_for_id[flat_id] != NONE:
                    slots.touch(slots.slot_for_id[flat_id])
            missing = [e for e in range(experts) if counts[e] and slots.slot_for_id[base + e] == NONE]
            if ring is None:
                stay = sorted(missing, key=lambda e: (-counts[e], e))[: max(1, experts // KEPT_SHARE)]
            else:
                stay = keepers(counts, missing, max(1, experts // KEPT_SHARE))
            for expert in stay:
                slot = slots.victim(active, layer)
                if slot == NONE:
                    break
                slots.clear(slot)
                slots.assign(slot, base + expert)
                moved += 1
        if ring is not None:
            ring.close(keep=False)
        return moved

    def token(self, layer: int, experts: list[int]) -> tuple[int, int]:
        plan = plan_decode(self.map, layer, experts, self._table)
        for fetch in plan.fetches:
            publish(self.map, fetch)
        return len(plan.fetches) + len(plan.cpu), len(plan.fetches)


class Static:
    """Residents are placed and stay; every miss runs on the CPU. by_prefill: each prompt's most used experts of each layer are
    placed anew when it has been computed; else it is the first experts of each layer, whatever is asked for."""

    def __init__(self, slots: int, layers: int, experts: int, by_prefill: bool) -> None:
        self._by_prefill = by_prefill
        # An even share of each layer; what is left over goes to the first layers.
        self._share = [slots // layers + (layer < slots % layers) for layer in range(layers)]
        self.residents = [set(range(min(share, experts))) for share in self._share]
        self._experts = experts

    def prefill(self, routes: np.ndarray) -> int:
        if not self._by_prefill:
            return 0
        moved = 0
        for layer, share in enumerate(self._share):
            counts = np.bincount(routes[:, layer].ravel(), minlength=self._experts)
            before = self.residents[layer]
            # What is equally popular and already there stays.
            order = sorted(range(self._experts), key=lambda e: (-int(counts[e]), e not in before, e))
            self.residents[layer] = set(order[:share])
            moved += len(self.residents[layer] - before)
        return moved

    def token(self, layer: int, experts: list[int]) -> tuple[int, int]:
        return sum(e not in self.residents[layer] for e in experts), 0


class Belady:
    """The optimum: slots always hold what will be asked for soonest, of all that has passed by. Nobody can do better with so
    many slots, and nobody can know the future."""

    def __init__(self, slots: int, trace: Trace) -> None:
        self._slots, self._experts = slots, trace.experts
        self._uses: dict[int, list[int]] = defaultdict(list)
        step = 0
        for token in np.flatnonzero(trace.generated).tolist():
            for layer in range(trace.layers):
                for expert in trace.routes[token, layer].tolist():
                    self._uses[layer * trace.experts + expert].append(step)
                step += 1
        for uses in self._uses.values():
            uses.reverse()
        self._never = step
        self._step = 0
        self._next: dict[int, int] = {}
        """Of what lies in a slot, when it is asked for next."""
        self._latest: list[tuple[int, int]] = []

    def _put(self, flat_id: int) -> None:
        uses = self._uses.get(flat_id, [])
        self._next[flat_id] = uses[-1] if uses else self._never
        heapq.heappush(self._latest, (-self._next[flat_id], flat_id))

    def _drop(self) -> None:
        while len(self._next) > self._slots:
            latest, flat_id = heapq.heappop(self._latest)
            if self._next.get(flat_id) == -latest:
                del self._next[flat_id]

    def prefill(self, routes: np.ndarray) -> int:
        before = set(self._next)
        for layer in range(routes.shape[1]):
            for expert in np.unique(routes[:, layer]).tolist():
                flat_id = layer * self._experts + expert
                if flat_id not in self._next:
                    self._put(flat_id)
        self._drop()
        return len(self._next.keys() - before)

    def token(self, layer: int, experts: list[int]) -> tuple[int, int]:
        ids = [layer * self._experts + e for e in experts]
        missing = [i for i in ids if i not in self._next]
        for flat_id in ids:
            used = self._uses[flat_id].pop()
            assert used == self._step
            self._put(flat_id)
        self._step += 1
        self._drop()
        return len(missing), sum(i in self._next for i in missing)


SHARED, FETCHED, ON_CPU = "shared", "fetched", "on the CPU"


def placements(trace: Trace, slots: int, shared: Sequence[int]) -> dict[tuple[str, str], Callable[[], Placement]]:
    """(policy, what becomes of misses) → a fresh one. shared: the table that divides misses between link and CPU."""
    layers, experts = trace.layers, trace.experts
    every = tuple(range(trace.top_k + 1))
    made: dict[tuple[str, str], Callable[[], Placement]] = {}
    for name in ("lru", "lru_floor", "frequency"):
        for misses, table in ((FETCHED, every), (SHARED, tuple(shared))):
            made[name, misses] = lambda name=name, table=table: SlotCache(name, slots, layers, experts, table)
    made["static, by prefill", ON_CPU] = lambda: Static(slots, layers, experts, by_prefill=True)
    made["static, blind", ON_CPU] = lambda: Static(slots, layers, experts, by_prefill=False)
    made["belady", FETCHED] = lambda: Belady(slots, trace)
    return made
