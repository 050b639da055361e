"""Admission over device tensors against the integer policies: the same slots, to the integer, for any sequence of steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import plain
from engine.moe.device_state import LENT, SlotState, floor_of
from engine.moe.dispatch import plan_decode, publish
from engine.moe.slots import NONE, SlotMap, make_policy
from engine.moe.transfer import Ring
from tests.budget import examples

LAYERS, EXPERTS, TOP_K = 3, 6, 2
steps = st.tuples(
    st.integers(0, LAYERS - 1),
    st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K), min_size=1, max_size=4),
    st.integers(-1, 4),
)


def fresh(slots: int, policy: str) -> tuple[SlotState, SlotMap]:
    state = SlotState.empty(LAYERS, EXPERTS, slots, policy, torch.device("cpu"))
    return state, SlotMap(slots, LAYERS, EXPERTS, make_policy(policy, slots, LAYERS, floor_of(slots, LAYERS)))


def outputs(tokens: int) -> list[torch.Tensor]:
    return [torch.full((tokens, TOP_K), -9, dtype=torch.int32) for _ in range(3)]


@pytest.mark.parametrize("policy", ["lru", "lru_floor", "frequency"])
@settings(max_examples=examples(40, 120), deadline=None)
@given(slots=st.integers(1, 12), script=st.lists(steps, max_size=25))
def test_admission_is_plan_decode(policy, slots, script):
    state, oracle = fresh(slots, policy)
    for layer, ids, quota in script:
        table = [m if quota < 0 else min(m, quota) for m in range(EXPERTS + 1)]
        plan = plan_decode(oracle, layer, [e for row in ids for e in row], table)
        for fetch in plan.fetches:
            publish(oracle, fetch)
        wanted = torch.tensor(ids, dtype=torch.int32)
        resident, fetched, cpu = outputs(len(ids))
        work, counts = torch.zeros(EXPERTS, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        tensors = (torch.tensor(table, dtype=torch.int32), resident, fetched, cpu, work, counts)
        plain.admit(state, layer, wanted, *tensors)
        fetches = {f.expert: f.slot for f in plan.fetches}
        assert work[: counts[0]].tolist() == [[layer * EXPERTS + f.expert, f.slot] for f in plan.fetches]
        for t, row in enumerate(ids):
            for j, e in enumerate(row):
                slot = plan.slots.get(e, NONE)
                assert fetched[t, j] == fetches.get(e, NONE)
                assert resident[t, j] == (NONE if e in fetches else slot)
                assert cpu[t, j] == (e if e in plan.cpu else NONE)
        pulled = state.pull()
        for name in ("slot_for_id", "id_of_slot", "last_use", "heat", "residents", "step"):
            assert getattr(pulled, name) == getattr(oracle, name), name
    assert state.totals[2:].tolist() == [oracle.hits, oracle.misses]


def test_what_is_not_pinned_is_never_fetched():
    state = SlotState.empty(1, EXPERTS, 6, "lru", torch.device("cpu"), pinned_ids=3)
    resident, fetched, cpu = outputs(2)
    work, counts = torch.zeros(6, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    table = torch.arange(7, dtype=torch.int32)
    plain.admit(state, 0, torch.tensor([[5, 1], [2, 4]], dtype=torch.int32), table, resident, fetched, cpu, work, counts)
    assert cpu.tolist() == [[5, -1], [-1, 4]]
    assert counts.tolist() == [2, 2, 0, 4]


def test_lent_slots_survive_the_way_to_the_host_and_back():
    state, _ = fresh(6, "lru")
    resident, fetched, cpu = outputs(1)
    work, counts = torch.zeros(6, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    table = torch.arange(7, dtype=torch.int32)
    plain.admit(state, 0, torch.tensor([[0, 1]], dtype=torch.int32), table, resident, fetched, cpu, work, counts)
    pulled = state.pull()
    ring = Ring(pulled, 4)
    state.write_back(pulled, list(pulled.lent))
    assert (state.id_of_slot == LENT).sum() == 4
    again = state.pull()
    assert again.lent == pulled.lent
    # With a ring of four, two slots are left, and both are in use.
    plain.admit(state, 0, torch.tensor([[0, 1]], dtype=torch.int32), table, resident, fetched, cpu, work, counts)
    plain.admit(state, 1, torch.tensor([[2, 3]], dtype=torch.int32), table, resident, fetched, cpu, work, counts)
    assert counts.tolist() == [2, 0, 0, 2]
    ring.close()


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    slots=st.integers(1, 12),
    policy=st.sampled_from(["lru", "lru_floor", "frequency"]),
    before=st.lists(steps, max_size=6),
    ids=st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K), min_size=1, max_size=12),
    quota=st.none() | st.integers(0, 5),
    width=st.integers(1, 6),
)
def test_union_rounds_bring_every_expert_exactly_once(slots, policy, before, ids, quota, width):
    from engine.gpu.experts_pass import union_rounds

    state, _ = fresh(slots, policy)
    memory = [-1] * slots
    for layer, some, _ in before:
        work, counts = torch.zeros(EXPERTS, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        table = torch.arange(EXPERTS + 1, dtype=torch.int32)
        plain.admit(state, layer, torch.tensor(some, dtype=torch.int32), table, *outputs(len(some)), work, counts)
        for flat_id, slot in work[: counts[0]].tolist():
            memory[slot] = flat_id
    wanted = torch.tensor(ids, dtype=torch.int32)
    slot_of, cpu = torch.zeros(EXPERTS, dtype=torch.int32), torch.zeros_like(wanted)
    work, counts = torch.zeros(width, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    seen: list[int] = []
    layer = 1
    table = None if quota is None else torch.tensor([min(m, quota) for m in range(EXPERTS + 1)], dtype=torch.int32)
    resident = {e for e in range(EXPERTS) if state.slot_for_id[layer * EXPERTS + e] >= 0}
    for turn in range(union_rounds(EXPERTS, slots, width, LAYERS, floor_of(slots, LAYERS), wanted.numel())):
        plain.union(state, layer, wanted, slots, table, turn == 0, int(state.step) - 2, slot_of, cpu, work, counts)
        for flat_id, slot in work[: counts[0]].tolist():
            memory[slot] = flat_id
        here = {e: s for e, s in enumerate(slot_of.tolist()) if s >= 0}
        assert all(memory[slot] == layer * EXPERTS + e for e, slot in here.items())
        seen += here
    used = {e for row in ids for e in row if e >= 0}
    on_cpu = {e for e in cpu.flatten().tolist() if e >= 0}
    assert sorted([*seen, *on_cpu]) == sorted(used)
    tokens = [e for row in ids for e in row]
    misses = sorted(used - resident, key=lambda e: (-tokens.count(e), e))
    assert on_cpu == (set() if quota is None else set(misses[quota:]))
    assert int(state.round_left) == 0
    slots_now = state.pull()
    for slot, owner in enumerate(slots_now.id_of_slot):
        if owner >= 0:
            assert memory[slot] == owner
            assert slots_now.slot_for_id[owner] == slot
