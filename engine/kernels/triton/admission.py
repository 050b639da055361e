"""Which experts of a layer get slots: the integer policies of engine/moe (dispatch.py, slots.py) in one block on the device.

Everything is a vector over the layer's experts or over the slots, held in registers; victims are taken one after another, each
by a minimum over all slots, as the policies are defined. Integers only, so the result equals the policies' to the bit. Within
the block, one thread's store is read by another only across a barrier.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import launch, workspace
from engine.kernels.triton.group import count_blocks, sum_blocks
from engine.moe.device_state import SlotState

_POLICIES = {"lru": 0, "lru_floor": 1, "frequency": 2}
_MOST_EXPERTS, _MOST_SLOTS = 1024, 32768
_ADMIT_PAIRS = 16

_NEVER = tl.constexpr(2**62)
_LATER, _BEFORE = tl.constexpr(2**61), tl.constexpr(2**60)
"""Keys of slots are steps times the number of slots (2¹⁵ at most) plus the slot, far below these: see slots.pass_order."""
_ABSENT = tl.constexpr(2**30)


@triton.jit
def _aged(heat, idle):
    """Uses, halved for every 64 idle steps."""
    return heat >> tl.minimum(idle // 64, 31).to(tl.int32)


@triton.jit
def _hit(slot_for_id, last_use, heat, base, e, active, now):
    """The slot of each active expert that has one (else −1), touched."""
    slot = tl.load(slot_for_id + base + e, mask=active, other=-1)
    hit = slot >= 0
    idle = now - tl.load(last_use + slot, mask=hit, other=0)
    used = _aged(tl.load(heat + slot, mask=hit, other=0), idle) + 1
    tl.debug_barrier()
    tl.store(heat + slot, used, mask=hit)
    tl.store(last_use + slot, now + tl.zeros_like(idle), mask=hit)
    return slot


@triton.jit
def _take(
    queue, wanted, slot_for_id, id_of_slot, last_use, heat, residents, work, base, layer, now, since, slots, layers, experts,
    floor, FIRST: tl.constexpr, PASS: tl.constexpr, POLICY: tl.constexpr, EP: tl.constexpr, SP: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Give slots to the first `wanted` experts of queue, in order, while there are victims.

    PASS: victims go by slots.pass_order, for a pass that began in step `since`.
    FIRST: slots used in this step have experts that are needed, and stay. Returns how many got one, and each expert's slot.
    """
    given = tl.full((EP,), -1, tl.int32)
    done = wanted * 0
    if wanted > 0:
        e, s, every = tl.arange(0, EP), tl.arange(0, SP), tl.arange(0, LP)
        owner = tl.load(id_of_slot + s, mask=s < slots, other=-2)
        use = tl.load(last_use + s, mask=s < slots, other=0)
        free, owned = owner == -1, owner >= 0
        home = tl.where(owned, owner // experts, -1)
        # Free slots first, in order; then the longest unused, then the lowest.
        key = tl.where(free, s.to(tl.int64), (use + 1) * SP + s)
        eligible = free | owned
        if FIRST:
            eligible = free | (owned & (use < now))
        aged = tl.where(free, -1, _aged(tl.load(heat + s, mask=s < slots, other=0), now - use))
        if PASS:
            key += tl.where(owned & (home > layer), _LATER, tl.where(owned & (use > since), _BEFORE, 0))
        key = tl.where(eligible, key, _NEVER)
        left = tl.load(residents + every, mask=every < layers, other=0)
        kept = tl.load(floor)
        crowd = tl.load(residents + home, mask=owned, other=0)
        tl.debug_barrier()
        going = 1
        while (done < wanted) & (going > 0):
            best = key
            if POLICY == 1:
                best = tl.where(free | (home == layer) | (crowd > kept), key, _NEVER)
            if PASS:
                kind = tl.min(best, 0)
                kind = tl.where(kind < _BEFORE, _BEFORE, tl.where(kind < _LATER, _LATER, _NEVER))
                best = tl.where(best < kind, best, _NEVER)
                if kind > _BEFORE:
                    best = tl.where(crowd == tl.max(tl.where(best < _NEVER, crowd, 0), 0), best, _NEVER)
            if POLICY == 2:
                coldest = tl.min(tl.where(best < _NEVER, aged, 2147483647), 0)
                best = tl.where(aged == coldest, best, _NEVER)
            lowest = tl.min(best, 0)
            going = tl.where(lowest < _NEVER, 1, 0)
            if going > 0:
                slot = (lowest % SP).to(tl.int32)
                expert = tl.load(queue + done)
                old = tl.max(tl.where(s == slot, owner, -1), 0)
                tl.store(slot_for_id + old, -1, mask=old >= 0)
                tl.store(slot_for_id + base + expert, slot)
                tl.store(id_of_slot + slot, base + expert)
                tl.store(last_use + slot, now)
                tl.store(heat + slot, 1)
                tl.store(work + 2 * done, base + expert)
                tl.store(work + 2 * done + 1, slot)
                lost = tl.where(old >= 0, old // experts, -1)
                left += tl.where(every == layer, 1, 0) - tl.where(every == lost, 1, 0)
                crowd -= tl.where(home == lost, 1, 0)
                key = tl.where(s == slot, _NEVER, key)
                given = tl.where(e == expert, slot, given)
                done += 1
        tl.store(residents + every, left, mask=every < layers)
    return done, given


@triton.jit
def _line_up(queue, keys, order, waiting, most, experts, EP: tl.constexpr):
    """Write the first `most` waiting experts to queue by rising order (all distinct), −1 behind them. Returns which.

    keys: int64 [EP], scratch: comparing all with all at once would take more registers than a block has.
    """
    e = tl.arange(0, EP)
    mine = tl.where(waiting, order.to(tl.int64), _NEVER)
    tl.store(keys + e, mine)
    tl.debug_barrier()
    PART: tl.constexpr = EP if EP * EP <= 32768 else 32768 // EP
    rank = tl.zeros((EP,), tl.int32)
    for start in range(0, EP, PART):
        theirs = tl.load(keys + start + tl.arange(0, PART))
        rank += tl.sum(tl.where(theirs[:, None] < mine[None, :], 1, 0), 0)
    queued = waiting & (rank < most)
    count = tl.sum(tl.where(queued, 1, 0), 0)
    tl.store(queue + e, -1 + tl.zeros((EP,), tl.int32), mask=(e >= count) & (e < experts))
    tl.store(queue + rank, e, mask=queued)
    tl.debug_barrier()
    return queued


@triton.jit(do_not_specialize=["pairs", "layer"])
def _admit(
    ids, table, slot_for_id, id_of_slot, last_use, heat, residents, step, totals, queue, keys,
    resident, fetched, cpu, work, counts, floor,
    pairs, experts, slots, layers, layer, entries, room, pinned,
    POLICY: tl.constexpr, EP: tl.constexpr, SP: tl.constexpr, LP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    e, p, four = tl.arange(0, EP), tl.arange(0, PAIRS), tl.arange(0, 4)
    base = layer * experts
    now = tl.load(step) + 1
    first = tl.full((EP,), _ABSENT, tl.int32)
    for start in range(0, pairs, PAIRS):
        chosen = tl.load(ids + start + p, mask=start + p < pairs, other=-1)
        where = tl.where(chosen[:, None] == e[None, :], (start + p)[:, None], _ABSENT)
        first = tl.minimum(first, tl.min(where, 0))
    active = (first < _ABSENT) & (e < experts)
    slot = _hit(slot_for_id, last_use, heat, base, e, active, now)
    miss = active & (slot < 0)
    misses = tl.sum(tl.where(miss, 1, 0), 0)
    hits = tl.sum(tl.where(slot >= 0, 1, 0), 0)
    quota = tl.minimum(tl.load(table + tl.minimum(misses, entries - 1)), room)
    queued = miss & (quota > EP)
    if quota > 0:  # in most layers there is nothing to fetch, and both of these take microseconds
        queued = _line_up(queue, keys, first, miss & (base + e < pinned), quota, experts, EP)
    taken, given = _take(
        queue, tl.sum(tl.where(queued, 1, 0), 0), slot_for_id, id_of_slot, last_use, heat, residents, work, base, layer, now,
        now, slots, layers, experts, floor, True, False, POLICY, EP, SP, LP,
    )  # fmt: skip
    # One number for each expert: its slot times four, plus where it runs (0 resident, 1 fetched, 2 CPU).
    code = tl.where(slot >= 0, slot * 4, tl.where(given >= 0, given * 4 + 1, 2))
    for start in range(0, pairs, PAIRS):
        inside = start + p < pairs
        chosen = tl.load(ids + start + p, mask=inside, other=-1)
        mine = tl.sum(tl.where(chosen[:, None] == e[None, :], code[None, :], 0), 1)
        kind = tl.where(chosen >= 0, mine % 4, 3)
        tl.store(resident + start + p, tl.where(kind == 0, mine // 4, -1), mask=inside)
        tl.store(fetched + start + p, tl.where(kind == 1, mine // 4, -1), mask=inside)
        tl.store(cpu + start + p, tl.where(kind == 2, chosen, -1), mask=inside)
    result = tl.where(four == 0, taken, tl.where(four == 1, misses - taken, tl.where(four == 2, hits, misses)))
    tl.store(counts + four, result)
    tl.store(totals + four, tl.load(totals + four) + result)
    tl.debug_barrier()
    tl.store(step, now)


@triton.jit(do_not_specialize=["blocks", "layer", "since"])
def _union(
    sums, slot_for_id, id_of_slot, last_use, heat, residents, step, totals, round_ids, round_left, keys, on_cpu, slot_of, work,
    counts, table, floor, blocks, experts, slots, layers, layer, since, limit, entries, pinned,
    FIRST: tl.constexpr, TABLE: tl.constexpr, POLICY: tl.constexpr, EP: tl.constexpr, SP: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    e, four = tl.arange(0, EP), tl.arange(0, 4)
    base = layer * experts
    now = tl.load(step)
    slot = tl.full((EP,), -1, tl.int32)
    result = tl.where(four == 0, 0, tl.load(counts + four))
    if FIRST:
        now += 1
        tokens = sum_blocks(sums, blocks, experts, EP)
        active = tokens > 0
        slot = _hit(slot_for_id, last_use, heat, base, e, active, now)
        miss = active & (slot < 0)
        misses = tl.sum(tl.where(miss, 1, 0), 0)
        quota = misses
        if TABLE:
            quota = tl.load(table + tl.minimum(misses, entries - 1))
        # Most tokens first, then the lowest id.
        queued = _line_up(round_ids, keys, e - tokens.to(tl.int64) * EP, miss & (base + e < pinned), quota, experts, EP)
        left_out = miss & ~queued
        tl.store(on_cpu + e, tl.where(left_out, 1, 0), mask=e < experts)
        other = tl.sum(tl.where(left_out, 1, 0), 0)
        hits = tl.sum(tl.where(slot >= 0, 1, 0), 0)
        result = tl.where(four == 0, 0, tl.where(four == 1, other, tl.where(four == 2, hits, misses)))
    waiting = tl.sum(tl.where(tl.load(round_ids + e, mask=e < experts, other=-1) >= 0, 1, 0), 0)
    taken, given = _take(
        round_ids, tl.minimum(limit, waiting), slot_for_id, id_of_slot, last_use, heat, residents, work, base, layer, now,
        since, slots, layers, experts, floor, FIRST, True, POLICY, EP, SP, LP,
    )  # fmt: skip
    tl.store(slot_of + e, tl.where(given >= 0, given, slot), mask=e < experts)
    rest = tl.load(round_ids + taken + e, mask=taken + e < experts, other=-1)
    tl.debug_barrier()
    tl.store(round_ids + e, rest, mask=e < experts)
    tl.store(round_left, waiting - taken)
    result = tl.where(four == 0, taken, result)
    tl.store(counts + four, result)
    added = result
    if not FIRST:
        added = tl.where(four == 0, result, 0)
    tl.store(totals + four, tl.load(totals + four) + added)
    tl.debug_barrier()
    tl.store(step, now)


@triton.jit(do_not_specialize=["pairs"])
def _mark_cpu(ids, on_cpu, cpu, pairs, SPAN: tl.constexpr):
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    chosen = tl.load(ids + at, mask=at < pairs, other=-1)
    marked = tl.load(on_cpu + chosen, mask=chosen >= 0, other=0) > 0
    tl.store(cpu + at, tl.where(marked, chosen, -1), mask=at < pairs)


def admit(
    state: SlotState,
    layer: int,
    ids: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    fetched: torch.Tensor,
    cpu: torch.Tensor,
    work: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """One decode step of one layer: dispatch.plan_decode, and the new owners set.

    ids: int32 [T, k], −1 = padding. table: int32 [n], how many of m misses to fetch (its last entry serves every larger m).
    Out: resident, fetched (slots) and cpu (experts), int32 [T, k] with −1 elsewhere; work: int32 [W, 2], (flat id, slot) of
    the fetches, at most W; counts: int32 [4], fetches, CPU experts, hits, misses. The fetch must be joined before anything
    else reads the maps.
    """
    for name, part in (("ids", ids), ("resident", resident), ("fetched", fetched), ("cpu", cpu), ("work", work)):
        if not part.is_contiguous() or (name != "work" and part.shape != ids.shape):
            raise ShapeMismatch(f"admit: {name} is {list(part.shape)}, ids {list(ids.shape)}, all contiguous")
    queue = workspace("admission queue", state.experts, torch.int32, ids)
    launch(
        _admit, (1,),
        ids, table, state.slot_for_id, state.id_of_slot, state.last_use, state.heat, state.residents, state.step, state.totals,
        queue, _keys(state, ids), resident, fetched, cpu, work, counts, state.floor,
        ids.numel(), state.experts, len(state.id_of_slot), state.layers, layer, len(table), len(work), state.pinned_ids,
        PAIRS=_ADMIT_PAIRS, **_shape(state),
    )  # fmt: skip


def union(
    state: SlotState,
    layer: int,
    ids: torch.Tensor,
    limit: int,
    table: torch.Tensor | None,
    first: bool,
    since: int,
    slot_of: torch.Tensor,
    cpu: torch.Tensor,
    work: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """One round of fetching what a prefill batch routes to.

    ids: int32 [T, k]. The first round counts the step: residents are hit; misses line up, most tokens first, then the lowest
    id; of m misses the first table[m] of that line (its last entry serves every larger m; without a table all) will be fetched,
    and the others are the CPU's, as are those that are not pinned. Each round gives slots to at most min(limit, W) of the
    line, while there are victims; the first never takes one that ids uses, later ones may (it has been computed by then).
    since: the step in which the pass over all layers began; victims go by slots.pass_order.
    table: int32 [n] or None. slot_of: int32 [experts], the slots that can be computed after this round, −1 elsewhere. cpu:
    int32 [T, k], written in the first round. work, counts: as in `admit`.
    """
    if not (ids.is_contiguous() and cpu.is_contiguous() and work.is_contiguous()) or cpu.shape != ids.shape:
        raise ShapeMismatch(f"union: cpu is {list(cpu.shape)}, ids {list(ids.shape)}, both contiguous")
    pairs, shape = ids.numel(), _shape(state)
    on_cpu = workspace("union on cpu", state.experts, torch.int32, ids)
    sums, blocks, _ = count_blocks(ids, state.experts) if first else (ids, 0, 0)
    given = counts if table is None else table
    launch(
        _union, (1,),
        sums, state.slot_for_id, state.id_of_slot, state.last_use, state.heat, state.residents, state.step, state.totals,
        state.round_ids, state.round_left, _keys(state, ids), on_cpu, slot_of, work, counts,
        given, state.floor, blocks, state.experts, len(state.id_of_slot), state.layers, layer, since, min(limit, len(work)),
        len(given), state.pinned_ids, FIRST=first, TABLE=table is not None, **shape,
    )  # fmt: skip
    if first:
        launch(_mark_cpu, (config.blocks(pairs, 1024),), ids, on_cpu, cpu, pairs, SPAN=1024)


def _keys(state: SlotState, like: torch.Tensor) -> torch.Tensor:
    return workspace("admission keys", config.power(state.experts), torch.int64, like)


def _shape(state: SlotState) -> dict[str, int]:
    slots = len(state.id_of_slot)
    if state.experts > _MOST_EXPERTS or slots > _MOST_SLOTS:
        raise ShapeMismatch(
            f"{state.experts} experts in a layer and {slots} slots; admission holds {_MOST_EXPERTS} and {_MOST_SLOTS}"
        )
    return {
        "POLICY": _POLICIES[state.policy],
        "EP": config.power(state.experts),
        "SP": config.power(slots),
        "LP": config.power(state.layers),
        "num_warps": 8 if slots <= 2048 else 32,
    }
