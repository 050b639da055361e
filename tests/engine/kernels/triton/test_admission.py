"""Admission on the device against the integer policies that define it: equal to the integer, on any sequence of steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.moe.dispatch import fetch_table, plan_decode, publish
from engine.moe.slots import NONE, SlotMap, make_policy
from engine.moe.transfer import Ring
from tests.budget import examples

from .common import DEVICE, ints

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops

POLICIES = ["lru", "lru_floor", "frequency"]
LENT = -2


@dataclass
class State:
    """The maps as tensors. memory: what lies in each slot, on the host: fingerprints."""

    layers: int
    experts: int
    slots: int
    policy: str
    pinned_ids: int
    slot_for_id: torch.Tensor = field(init=False)
    id_of_slot: torch.Tensor = field(init=False)
    last_use: torch.Tensor = field(init=False)
    heat: torch.Tensor = field(init=False)
    residents: torch.Tensor = field(init=False)
    step: torch.Tensor = field(init=False)
    totals: torch.Tensor = field(init=False)
    round_ids: torch.Tensor = field(init=False)
    round_left: torch.Tensor = field(init=False)
    floor: torch.Tensor = field(init=False)
    memory: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.floor = ints([self.slots // self.layers // 2])
        self.slot_for_id = ints([NONE] * (self.layers * self.experts))
        self.id_of_slot, self.heat = ints([NONE] * self.slots), ints([0] * self.slots)
        self.last_use, self.step = ints([0] * self.slots, torch.int64), ints([0], torch.int64)
        self.residents, self.totals = ints([0] * self.layers), ints([0] * 4, torch.int64)
        self.round_ids, self.round_left = ints([NONE] * self.experts), ints([0])
        self.memory = [NONE] * self.slots

    def host(self) -> SlotMap:
        return SlotMap(self.slots, self.layers, self.experts, make_policy(self.policy, self.slots, self.layers))

    def push(self, slots: SlotMap) -> None:
        """As the host writes the maps back between steps."""
        owners = [LENT if s in slots.lent else owner for s, owner in enumerate(slots.id_of_slot)]
        for tensor, values in (
            (self.slot_for_id, slots.slot_for_id), (self.id_of_slot, owners), (self.last_use, slots.last_use),
            (self.heat, slots.heat), (self.residents, slots.residents), (self.step, [slots.step]),
        ):  # fmt: skip
            tensor.copy_(torch.tensor(values))

    def check(self, slots: SlotMap) -> None:
        assert self.slot_for_id.tolist() == slots.slot_for_id
        assert self.id_of_slot.tolist() == [LENT if s in slots.lent else owner for s, owner in enumerate(slots.id_of_slot)]
        assert self.residents.tolist() == slots.residents
        assert self.step.tolist() == [slots.step]
        assert self.last_use.tolist() == slots.last_use
        # Heat of a slot without an owner is nobody's.
        owned = [s for s, owner in enumerate(slots.id_of_slot) if owner != NONE]
        assert [self.heat[s].item() for s in owned] == [slots.heat[s] for s in owned]
        for slot, owner in enumerate(slots.id_of_slot):
            assert owner == NONE or self.memory[slot] == owner, "a slot claims what is not in it"

    def copy(self, work: torch.Tensor, count: int) -> None:
        """What the fetch does."""
        for flat, slot in work[:count].tolist():
            self.memory[slot] = flat


def step(state: State, slots: SlotMap, layer: int, ids: list[list[int]], table: tuple[int, ...], room: int) -> torch.Tensor:
    """One decode step on both; everything must agree. Returns counts."""
    before = state.totals.clone()
    device_ids = ints(ids)
    outputs = [torch.full_like(device_ids, -7) for _ in range(3)]
    work, counts = ints([[-7, -7]] * room), ints([-7] * 4)
    ops.admit(state, layer, device_ids, ints(table), *outputs, work, counts)
    flat = [e for row in ids for e in row]
    base, hits, misses = layer * state.experts, slots.hits, slots.misses
    quotas = [min(q, room) for q in table]
    where_before = {e: slots.slot_for_id[base + e] for e in flat if e >= 0}
    unpinned = {e for e in flat if e >= 0 and base + e >= state.pinned_ids}
    plan = plan_decode(slots, layer, flat, quotas) if not unpinned else None
    if plan is not None:
        for fetch in plan.fetches:
            publish(slots, fetch)
        assert work[: len(plan.fetches)].tolist() == [[base + f.expert, f.slot] for f in plan.fetches]
        assert counts.tolist() == [len(plan.fetches), len(plan.cpu), slots.hits - hits, slots.misses - misses]
        for row, resident, fetched, cpu in zip(ids, *(o.tolist() for o in outputs), strict=True):
            for j, e in enumerate(row):
                here = where_before.get(e, NONE)
                assert resident[j] == here
                assert fetched[j] == (plan.slots[e] if e >= 0 and here == NONE else NONE)
                assert cpu[j] == (e if e in plan.cpu else NONE)
    state.copy(work, int(counts[0]))
    assert torch.equal(state.totals - before, counts.long())
    return counts


calls = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=1, max_size=9),
        st.sampled_from([-1, 0, 1, 2]),
        st.integers(1, 6),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(5, 15), deadline=None)
@given(sequence=calls)
def test_any_sequence_of_steps_equals_the_policies(policy: str, sequence: list) -> None:
    state = State(3, 7, 6, policy, 21)
    slots = state.host()
    for layer, ids, limit, room, ring in sequence:
        lent = Ring(slots, 2) if ring else None
        if lent is not None:
            state.push(slots)
        step(state, slots, layer, ids, fetch_table(limit, 7), room)
        if lent is not None:
            lent.close()
            state.push(slots)
        state.check(slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_run_equals_the_policies(policy: str) -> None:
    """Enough steps that slots age and counts halve."""
    state, generator = State(3, 7, 6, policy, 21), torch.Generator().manual_seed(0)
    slots = state.host()
    for i in range(examples(36, 60)):
        ids = (torch.rand(1, 7, generator=generator) ** 2).argsort().tolist()[0][:2]
        step(state, slots, i % 3, [ids], fetch_table(1 + i % 2, 7), 6)
        if i == 18:
            slots.step += 300
            state.push(slots)
    state.check(slots)


def test_more_experts_than_are_compared_at_once() -> None:
    state, generator = State(2, 300, 24, "lru_floor", 600), torch.Generator().manual_seed(0)
    slots = state.host()
    for i in range(4):
        ids = torch.rand(2, 300, generator=generator).argsort(1)[:, :8].tolist()
        counts = step(state, slots, i % 2, ids, fetch_table(6, 300), 16)
        assert counts[0] > 0
        state.check(slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_of_another_layer_takes_every_slot_and_the_old_experts_miss(policy: str) -> None:
    """The sequence that once gave stale hits: what lies in a slot is compared with what the maps claim."""
    state = State(2, 8, 4, policy, 16)
    slots = state.host()
    assert step(state, slots, 0, [[1, 2, 3, 4]], fetch_table(-1, 8), 8).tolist() == [4, 0, 0, 4]
    assert step(state, slots, 0, [[4, 3, 2, 1]], fetch_table(-1, 8), 8).tolist() == [0, 0, 4, 0]
    ring = Ring(slots, 4)
    for expert in range(4):
        slot = ring.begin(8 + expert)
        state.memory[slot] = 8 + expert
        ring.ready(slot)
        ring.release(slot)
    state.push(slots)
    assert step(state, slots, 0, [[1, 2]], fetch_table(-1, 8), 8).tolist() == [0, 2, 0, 2]
    ring.close()
    state.push(slots)
    assert step(state, slots, 0, [[1, 2, 3, 4]], fetch_table(-1, 8), 8).tolist()[2:] == [0, 4]
    state.check(slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slot_that_this_step_uses_is_never_taken(policy: str) -> None:
    state = State(1, 6, 3, policy, 6)
    slots = state.host()
    step(state, slots, 0, [[0, 1], [2, 2]], fetch_table(-1, 6), 6)
    assert step(state, slots, 0, [[0, 1], [2, 3]], fetch_table(-1, 6), 6).tolist() == [0, 1, 3, 1]
    assert step(state, slots, 0, [[0, 4], [2, 3]], fetch_table(-1, 6), 6).tolist() == [1, 1, 2, 2]
    state.check(slots)


def test_what_is_not_pinned_is_never_fetched() -> None:
    state = State(2, 4, 4, "lru", 6)
    slots = state.host()
    counts = step(state, slots, 1, [[3, 0], [2, 1]], fetch_table(-1, 4), 4)
    assert counts.tolist() == [2, 2, 0, 4]
    assert state.slot_for_id.tolist() == [-1, -1, -1, -1, 0, 1, -1, -1]


def expected_union(
    state: State, slots: SlotMap, layer: int, tokens: dict[int, int], rounds: list[int], table: list[int] | None, since: int
) -> tuple[set[int], list[tuple[list[tuple[int, int]], dict[int, int]]]]:
    """The CPU's experts, and for each round: the fetches in order, and which experts can be computed after it."""
    base, out = layer * state.experts, []
    slots.tick()
    hits = {e: slots.slot_for_id[base + e] for e in tokens if slots.slot_for_id[base + e] != NONE}
    for slot in hits.values():
        slots.touch(slot)
    missed = sorted((e for e in tokens if e not in hits), key=lambda e: (-tokens[e], e))
    quota = len(missed) if table is None else table[min(len(missed), len(table) - 1)]
    missing = [e for e in missed if base + e < state.pinned_ids][:quota]
    left_out = set(missed) - set(missing)
    for i, limit in enumerate(rounds):
        fetches: list[tuple[int, int]] = []
        for e in missing[:limit]:
            slot = slots.victim({base + t for t in tokens} if i == 0 else (), layer, {s for _, s in fetches}, since)
            if slot == NONE:
                break
            slots.clear(slot)
            slots.assign(slot, base + e)
            fetches.append((base + e, slot))
        missing = missing[len(fetches) :]
        out.append((fetches, {**(hits if i == 0 else {}), **{flat - base: slot for flat, slot in fetches}}))
    return left_out, out


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(5, 15), deadline=None)
@given(
    passes=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(st.lists(st.integers(-1, 8), min_size=2, max_size=2), min_size=1, max_size=20),
            st.sampled_from([None, [0, 1, 1, 2, 3], [0, 1, 2, 3, 4, 5, 5], [0]]),
            st.lists(st.integers(1, 7), min_size=1, max_size=3),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_union_fetches_the_busiest_first_in_rounds(policy: str, passes: list) -> None:
    state = State(2, 9, 6, policy, 16)
    slots = state.host()
    for layer, ids, table, rounds, ago in passes:
        since = slots.step - ago  # the pass may have been through a layer or two
        tokens: dict[int, int] = {}
        for e in (e for row in ids for e in row if e >= 0):
            tokens[e] = tokens.get(e, 0) + 1
        device_ids, slot_of, counts = ints(ids), ints([-7] * 9), ints([-7] * 4)
        cpu, work = torch.full_like(device_ids, -7), ints([[-7, -7]] * 5)
        known = {e for e in tokens if slots.slot_for_id[layer * 9 + e] != NONE}
        left_out, want = expected_union(state, slots, layer, tokens, [min(n, 5) for n in rounds], table, since)
        device_table = None if table is None else ints(table)
        for i, limit in enumerate(rounds):
            before = state.totals.clone()
            ops.union(state, layer, device_ids, limit, device_table, i == 0, since, slot_of, cpu, work, counts)
            fetches, where = want[i]
            assert [tuple(pair) for pair in work[: len(fetches)].tolist()] == fetches
            assert slot_of.tolist() == [where.get(e, NONE) for e in range(9)]
            assert counts.tolist() == [len(fetches), len(left_out), len(known), len(tokens) - len(known)]
            new = counts.long() if i == 0 else torch.tensor([len(fetches), 0, 0, 0], device=DEVICE)
            assert torch.equal(state.totals - before, new)
            state.copy(work, len(fetches))
        assert cpu.tolist() == [[e if e in left_out else NONE for e in row] for row in ids]
        waiting = len(tokens) - len(known) - len(left_out) - sum(len(fetches) for fetches, _ in want)
        assert state.round_left.tolist() == [waiting]
        state.check(slots)


def test_more_than_one_block_holds_is_refused() -> None:
    state = State(1, 2000, 2, "lru", 2000)
    ids = ints([[0]])
    with pytest.raises(ShapeMismatch, match="2000 experts"):
        ops.admit(state, 0, ids, ints([0]), ids.clone(), ids.clone(), ids.clone(), ints([[0, 0]]), ints([0] * 4))
