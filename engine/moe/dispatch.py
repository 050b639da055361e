"""Decode: where each active expert of one layer runs in this step. Integers only.

The table of fetches is indexed by the number of misses, so that measured rates (or a test) decide how many of them are worth a
transfer; the rest run where they lie, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.moe.slots import NONE, SlotMap


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy bank row `expert` of `layer` into `slot`, then publish it."""

    layer: int
    expert: int
    slot: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """fetches: in order, owners already cleared. cpu: experts to run from the host bank. slots: expert → slot or NONE (CPU)."""

    fetches: tuple[Fetch, ...]
    cpu: tuple[int, ...]
    slots: dict[int, int]


def plan_decode(slots: SlotMap, layer: int, experts: Sequence[int], fetch_table: Sequence[int]) -> DecodePlan:
    """Split the step's unique experts into hits, fetches and CPU work.

    experts: ids within the layer, repeats allowed; negative ones are ignored. fetch_table[m]: how many of m misses to
    fetch (its last entry serves every larger m). Victims' owners are cleared here; the caller copies and then calls `publish`.
    """
    slots.tick()
    unique = [e for e in dict.fromkeys(experts) if e >= 0]
    base = layer * slots.experts
    active = {base + e for e in unique}
    where: dict[int, int] = {}
    missing: list[int] = []
    for expert in unique:
        slot = slots.slot_for_id[base + expert]
        if slot == NONE:
            missing.append(expert)
        else:
            slots.touch(slot)
            where[expert] = slot
    slots.hits += len(where)
    slots.misses += len(missing)
    quota = fetch_table[min(len(missing), len(fetch_table) - 1)]
    fetches: list[Fetch] = []
    taken: set[int] = set()
    for expert in missing[:quota]:
        slot = slots.victim(active, layer, taken)
        if slot == NONE:
            break
        slots.clear(slot)
        taken.add(slot)
        fetches.append(Fetch(layer, expert, slot))
        where[expert] = slot
    cpu = tuple(missing[len(fetches) :])
    where.update(dict.fromkeys(cpu, NONE))
    return DecodePlan(tuple(fetches), cpu, where)


def publish(slots: SlotMap, fetch: Fetch) -> None:
    """The copy is complete: the expert may be hit from now on."""
    slots.assign(fetch.slot, fetch.layer * slots.experts + fetch.expert)


def fetch_table(limit: int, most: int) -> tuple[int, ...]:
    """Fetch up to `limit` misses of each step (−1: all of them), for 0 … most misses."""
    return tuple(m if limit < 0 else min(m, limit) for m in range(most + 1))
