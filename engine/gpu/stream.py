"""Streams whole layers of missing experts through a ring of borrowed slots, ahead of the layer that needs them.

The contract, kept with two lanes and their fences:
- Before a slot's bytes change its owner is cleared in both maps, on the device too: lending does it, and so does an exchange.
- begin-fence: copies start only after everything that MAIN was told before, so that no kernel still reads the old bytes.
- ready: MAIN computes with a part only after SIDE has copied all of it.
- release: a slot is filled again only after the compute that reads it was told to MAIN, that is, behind the next begin-fence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from engine.device.tape import Lane, Tape
from engine.gpu.experts import ExpertPool
from engine.moe.cost import RING_PART, keepers, ring_slots
from engine.moe.slots import NONE, SlotMap
from engine.moe.transfer import Ring

KEPT_SHARE = 8
"""Of a layer's experts, an eighth at most may stay from one pass: the others would push out what decoding uses."""


class Streamer:
    """One pass. slots: the maps as they are now, on the host; changed here and, for the slots that changed, on the device.

    layers: MoE layers that stream, in the order of the pass. part: most experts that are copied at a time. While a streamer is
    open nothing else may change owners.
    """

    def __init__(self, pool: ExpertPool, slots: SlotMap, layers: Sequence[int], part: int = RING_PART) -> None:
        self._pool, self._slots = pool, slots
        most = max((len(self._missing(layer)) for layer in layers), default=0)
        self._ring = Ring(slots, ring_slots(pool.slots, pool.layers, pool.experts, most, part))
        self._part = max(1, len(self._ring) // 2)
        pool.state.write_back(slots, list(slots.lent))
        self._todo: deque[tuple[int, list[int]]] = deque()
        for layer in layers:
            missing = self._missing(layer)
            parts = [missing[i : i + self._part] for i in range(0, len(missing), self._part)]
            self._todo += [(layer, part) for part in parts]
        self._coming: tuple[int, dict[int, int]] | None = None
        self._streamed: dict[int, list[int]] = {}
        self.copied_bytes = 0
        slots.tick()
        self._prefetch()

    def __len__(self) -> int:
        return len(self._ring)

    def _missing(self, layer: int) -> list[int]:
        base = layer * self._slots.experts
        return [e for e in range(self._slots.experts) if self._slots.slot_for_id[base + e] == NONE]

    def _prefetch(self) -> None:
        """Tell SIDE to copy the next part into slots that are free by then."""
        self._coming = None
        if not self._todo:
            return
        layer, experts = self._todo.popleft()
        base, where = layer * self._slots.experts, {}
        for expert in experts:
            slot = self._ring.begin(base + expert)
            assert slot != NONE, "a part is at most half of the ring, and the other half was released"
            where[expert] = slot
        self._coming = (layer, where)
        tape = Tape()
        tape.fork()
        bank, memory = self._pool.bank.bytes, self._pool.memory
        for expert, slot in where.items():
            tape.add(lambda row=base + expert, slot=slot: memory[slot].copy_(bank[row], non_blocking=True), Lane.SIDE)
        self.copied_bytes += len(where) * self._pool.bank.record.nbytes
        self._pool.device.run(tape)

    def parts(self, layer: int) -> Iterator[dict[int, int]]:
        """Expert → slot, a part at a time: first with the residents, together every expert of the layer. What is given must be
        told to MAIN before the next part is asked for."""
        base = layer * self._slots.experts
        first = {e: s for e in range(self._slots.experts) if (s := self._slots.slot_for_id[base + e]) != NONE}
        streamed: list[int] = []
        while self._coming is not None and self._coming[0] == layer:
            where = self._coming[1]
            tape = Tape()
            tape.join()
            self._pool.device.run(tape)
            for slot in where.values():
                self._ring.ready(slot)
            self._prefetch()
            yield {**first, **where}
            first = {}
            for slot in where.values():
                self._ring.release(slot)
            streamed += where
        if first:
            yield first
        self._streamed[layer] = streamed

    def keep_hot(self, layer: int, counts: Sequence[int]) -> int:
        """Let streamed experts of a layer that was computed stay, each in exchange for a resident of the layer that had less
        than half of its tokens. counts: of each expert. Returns how many stay. Must come before the next layer's parts."""
        slots, base = self._slots, layer * self._slots.experts
        hot = keepers(list(counts), self._streamed.pop(layer, []), slots.experts // KEPT_SHARE)
        here = [e for e in range(slots.experts) if slots.slot_for_id[base + e] != NONE]
        coldest = sorted(here, key=lambda e: (counts[e], e))
        changed: list[int] = []
        for expert, other in zip(hot, coldest, strict=False):
            slot, victim = self._ring.holder(base + expert), slots.slot_for_id[base + other]
            if slot == NONE or 2 * counts[other] > counts[expert]:
                break
            self._ring.exchange(slot, victim)
            changed += [slot, victim]
        self._pool.state.write_back(slots, changed)
        return len(changed) // 2

    def close(self) -> None:
        """Return the ring, with what lies in it whole. Waits for nothing: later readers are behind the same lanes."""
        tape = Tape()
        tape.join()
        self._pool.device.run(tape)
        lent = list(self._slots.lent)
        self._ring.close()
        self._pool.state.write_back(self._slots, lent)


def expert_counts(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Tokens of each expert, int32 [experts], without waiting for the device. ids: int32 [T, k]; −1 counts for nobody."""
    flat = ids.flatten().long() + 1
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))[1:]
