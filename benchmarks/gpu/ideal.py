"""What caches could reach on the same routes: stands beside every measured hit rate."""

from __future__ import annotations

import heapq

import numpy as np

from benchmarks.gpu.geometry import Shape
from benchmarks.routing.policies import Belady, Outcome, replay
from benchmarks.routing.sources import uniform
from benchmarks.routing.trace import Trace


class Lru:
    """routing/policies.SlotCache("lru") where every miss is fetched, to the slot, but fast enough for thousands of them."""

    def __init__(self, slots: int, experts: int) -> None:
        self._experts = experts
        self._free = list(range(slots))
        self._held: dict[int, tuple[int, int]] = {}
        """Flat id → (last use, slot)."""
        self._oldest: list[tuple[int, int, int]] = []
        self._step = 0

    def prefill(self, routes: np.ndarray) -> int:
        return 0

    def _use(self, flat_id: int, slot: int) -> None:
        self._held[flat_id] = (self._step, slot)
        heapq.heappush(self._oldest, (self._step, slot, flat_id))

    def _victim(self) -> int:
        """The slot unused for longest, the lowest of equals; −1 if all are in use in this step."""
        if self._free:
            return heapq.heappop(self._free)
        while self._oldest and self._oldest[0][0] < self._step:
            used, slot, flat_id = heapq.heappop(self._oldest)
            if self._held.get(flat_id) == (used, slot):
                del self._held[flat_id]
                return slot
        return -1

    def token(self, layer: int, experts: list[int]) -> tuple[int, int]:
        self._step += 1
        ids = [layer * self._experts + e for e in experts]
        missing = [i for i in ids if i not in self._held]
        for flat_id in ids:
            if flat_id in self._held:
                self._use(flat_id, self._held[flat_id][1])
        fetched = 0
        for flat_id in missing:
            slot = self._victim()
            if slot < 0:
                break
            self._use(flat_id, slot)
            fetched += 1
        return len(missing), fetched


def walked(trace: Trace, tokens: int) -> Trace:
    """The first tokens of a programmed trace, as decoding walks them."""
    return Trace(trace.name, trace.experts, trace.routes[:tokens], trace.generated[:tokens])


def uniform_like(shape: Shape, tokens: int) -> Trace:
    return uniform(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, turns=1, prompt=0, output=tokens, seed=1)


def hit_rates(trace: Trace, slots: int) -> dict[str, float]:
    """Of a global LRU and of the optimum, with so many slots."""
    outcomes: dict[str, Outcome] = {
        "lru": replay(trace, Lru(slots, trace.experts)),
        "belady": replay(trace, Belady(slots, trace)),
    }
    return {f"{name}_hit_rate": round(outcome.hit_rate, 4) for name, outcome in outcomes.items()}
