"""Which experts of a layer get slots, one at a time as the policies of engine/moe (dispatch.py, slots.py) say it."""

from __future__ import annotations

import torch

from engine.moe.device_state import FREE, SlotState
from engine.moe.slots import NONE, pass_order

Tensor = torch.Tensor


def admit(
    state: SlotState,
    layer: int,
    ids: Tensor,
    table: Tensor,
    resident: Tensor,
    fetched: Tensor,
    cpu: Tensor,
    work: Tensor,
    counts: Tensor,
) -> None:
    """Decide where each active expert of a decode step runs, as dispatch.plan_decode does, and take the slots for the fetches.

    ids: int32 [T, k], experts of the layer or −1. table: int32 [n], how many of m misses to fetch. Out: resident, fetched
    (slots) and cpu (experts), each int32 [T, k] with −1 elsewhere; work int32 [W, 2] (flat id, slot); counts int32 [4]:
    fetches, CPU experts, hits, misses. Owners change in both maps here; the copies follow before anything else reads them.
    """
    _tick(state)
    flat = ids.flatten().tolist()
    active = [e for e in dict.fromkeys(flat) if e >= 0]
    base = layer * state.experts
    where = {e: int(state.slot_for_id[base + e]) for e in active}
    hits = [e for e in active if where[e] >= 0]
    for e in hits:
        _touch(state, where[e])
    misses = [e for e in active if where[e] < 0]
    quota = min(int(table[min(len(misses), len(table) - 1)]), len(work))
    taken: dict[int, int] = {}
    fetchable = [e for e in misses if base + e < state.pinned_ids]
    for e in fetchable[:quota]:
        slot = _victim(state, {base + a for a in active}, layer, set(taken.values()))
        if slot == NONE:
            break
        _assign(state, slot, base + e)
        work[len(taken)] = torch.tensor([base + e, slot], dtype=torch.int32)
        taken[e] = slot
    left = [e for e in misses if e not in taken]
    _count(state, counts, (len(taken), len(left), len(hits), len(misses)))
    _rewrite(resident, ids, {e: where[e] for e in hits})
    _rewrite(fetched, ids, taken)
    _rewrite(cpu, ids, {e: e for e in left})


def union(
    state: SlotState,
    layer: int,
    ids: Tensor,
    limit: int,
    table: Tensor | None,
    first: bool,
    since: int,
    slot_of: Tensor,
    cpu: Tensor,
    work: Tensor,
    counts: Tensor,
) -> None:
    """One round of fetching what a prefill batch routes to: slot_of int32 [E] says which experts can be computed after it.

    since: the step in which the pass over all layers began; victims go by slots.pass_order.

    Misses with the most tokens first, then the lowest id; at most min(limit, W) and as many as there are victims, never one
    that ids uses. first: the step is counted; of m misses the first table[m] of that order are fetched over all rounds, and
    the others are the CPU's (cpu int32 [T, k]), as are those that are not pinned; without a table all are fetched. In later
    rounds slot_of has only what that round fetched. counts as in `admit`.
    """
    flat = ids.flatten().tolist()
    tokens: dict[int, int] = {}
    for e in flat:
        if e >= 0:
            tokens[e] = tokens.get(e, 0) + 1
    base = layer * state.experts
    where = {e: int(state.slot_for_id[base + e]) for e in tokens}
    slot_of.fill_(NONE)
    hits = [e for e in tokens if where[e] >= 0] if first else []
    if first:
        _tick(state)
        cpu.fill_(NONE)
        for e in hits:
            _touch(state, where[e])
            slot_of[e] = where[e]
        misses = sorted((e for e in tokens if where[e] < 0), key=lambda e: (-tokens[e], e))
        fetchable = [e for e in misses if base + e < state.pinned_ids]
        quota = len(misses) if table is None else int(table[min(len(misses), len(table) - 1)])
        waiting = fetchable[:quota]
        on_cpu = set(misses) - set(waiting)
        state.round_ids.fill_(NONE)
        state.round_ids[: len(waiting)] = torch.tensor(waiting, dtype=torch.int32)
        state.round_left.fill_(len(waiting))
        _rewrite(cpu, ids, {e: e for e in on_cpu})
        _count(state, counts, (0, len(on_cpu), len(hits), len(misses)))
        active = {base + e for e in tokens}
    else:
        # What earlier rounds fetched has been computed; its slots may go.
        waiting = [e for e in state.round_ids.tolist() if e >= 0]
        active = set()
    taken: dict[int, int] = {}
    for e in waiting[: min(limit, len(work))]:
        slot = _victim(state, active, layer, set(taken.values()), since)
        if slot == NONE:
            break
        _assign(state, slot, base + e)
        work[len(taken)] = torch.tensor([base + e, slot], dtype=torch.int32)
        taken[e] = slot
        slot_of[e] = slot
    rest = waiting[len(taken) :]
    state.round_ids.fill_(NONE)
    state.round_ids[: len(rest)] = torch.tensor(rest, dtype=torch.int32)
    state.round_left.fill_(len(rest))
    counts[0] = len(taken)
    state.totals[0] += len(taken)


def _rewrite(out: Tensor, ids: Tensor, rows: dict[int, int]) -> None:
    out.copy_(torch.tensor([rows.get(e, NONE) for e in ids.flatten().tolist()], dtype=torch.int32).view(ids.shape))


def _count(state: SlotState, counts: Tensor, figures: tuple[int, int, int, int]) -> None:
    new = torch.tensor(figures, dtype=torch.int32)
    counts.copy_(new)
    state.totals.add_(new.to(state.totals.device))


def _tick(state: SlotState) -> None:
    state.step += 1


def _touch(state: SlotState, slot: int) -> None:
    idle = int(state.step) - int(state.last_use[slot])
    state.heat[slot] = (int(state.heat[slot]) >> min(idle // 64, 31)) + 1
    state.last_use[slot] = int(state.step)


def _victim(state: SlotState, active: set[int], layer: int, taken: set[int], since: int | None = None) -> int:
    """As SlotMap.victim: a free slot, else the policy's choice among slots whose owner is not active; NONE if there is none.

    since: while a pass goes through all layers, see slots.pass_order.
    """
    owners = state.id_of_slot.tolist()
    usable = [s for s, owner in enumerate(owners) if owner >= FREE and s not in taken and owner not in active]
    free = next((s for s in usable if owners[s] == FREE), NONE)
    if free != NONE or not usable:
        return free
    last, step = state.last_use.tolist(), int(state.step)

    residents = state.residents.tolist()

    def order(slot: int) -> tuple[int, int]:
        home = owners[slot] // state.experts
        return (0, 0) if since is None else pass_order(layer, home, last[slot], residents[home], since)

    if state.policy == "frequency":
        heat = state.heat.tolist()

        def cooled(slot: int) -> tuple[int, ...]:
            return *order(slot), heat[slot] >> min((step - last[slot]) // 64, 31), last[slot], slot

        return min(usable, key=cooled)
    if state.policy == "lru_floor":
        floor = int(state.floor)
        usable = [s for s in usable if owners[s] // state.experts == layer or residents[owners[s] // state.experts] > floor]
    return min(usable, key=lambda s: (*order(s), last[s], s)) if usable else NONE


def _assign(state: SlotState, slot: int, flat_id: int) -> None:
    owner = int(state.id_of_slot[slot])
    if owner >= 0:
        state.slot_for_id[owner] = NONE
        state.residents[owner // state.experts] -= 1
    state.id_of_slot[slot] = flat_id
    state.slot_for_id[flat_id] = slot
    state.residents[flat_id // state.experts] += 1
    state.heat[slot] = 0
    _touch(state, slot)
