"""The slot cache as a state machine against a plain dict, and the sequence that once produced stale hits.

Rows carry a fingerprint: what lies in a slot is compared with the expert that the maps claim.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from engine.errors import InvalidRequest
from engine.moe.dispatch import fetch_table, plan_decode, publish
from engine.moe.slots import NONE, SlotMap, make_policy
from engine.moe.transfer import Ring
from tests.budget import examples

LAYERS, EXPERTS = 3, 5
POLICIES = ["lru", "lru_floor", "frequency"]


class SlotCache(RuleBasedStateMachine):
    """bytes_in: what each slot's memory holds. resident: the model, flat id → slot."""

    rings = Bundle("rings")
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotMap(6, LAYERS, EXPERTS, make_policy(self.policy, 6, LAYERS))
        self.bytes_in: list[int | None] = [None] * 6
        self.resident: dict[int, int] = {}
        self.open: list[Ring] = []
        self.ring_holds: dict[int, int] = {}

    @rule(
        layer=st.integers(0, LAYERS - 1),
        ids=st.lists(st.integers(-1, EXPERTS - 1), min_size=1, max_size=6),
        q=st.integers(-1, 3),
    )
    def decode(self, layer: int, ids: list[int], q: int) -> None:
        base = layer * EXPERTS
        unique = {e for e in ids if e >= 0}
        expected_hits = {e for e in unique if base + e in self.resident}
        plan = plan_decode(self.slots, layer, ids, fetch_table(q, EXPERTS))
        assert set(plan.slots) == unique
        assert len(plan.fetches) <= len(unique - expected_hits)
        for expert in expected_hits:
            assert plan.slots[expert] == self.resident[base + expert]
        for fetch in plan.fetches:
            assert fetch.slot not in {self.resident[base + e] for e in expected_hits}
            assert self.slots.id_of_slot[fetch.slot] == NONE
            self.resident = {i: s for i, s in self.resident.items() if s != fetch.slot}
            self.bytes_in[fetch.slot] = base + fetch.expert
        for fetch in plan.fetches:
            publish(self.slots, fetch)
            self.resident[base + fetch.expert] = fetch.slot
        assert set(plan.cpu) == {e for e in unique if plan.slots[e] == NONE}
        for expert in unique - set(plan.cpu):
            assert self.bytes_in[plan.slots[expert]] == base + expert

    @rule(target=rings, count=st.integers(0, 6), keep=st.sets(st.integers(0, LAYERS * EXPERTS - 1), max_size=2))
    def borrow(self, count: int, keep: set[int]) -> Ring:
        kept = {i: s for i, s in self.resident.items() if i in keep}
        ring = Ring(self.slots, count, active=keep)
        self.open.append(ring)
        self.resident = {i: s for i, s in self.resident.items() if s not in self.slots.lent}
        assert all(self.resident.get(i) == s for i, s in kept.items())
        return ring

    @rule(ring=rings, flat_id=st.integers(0, LAYERS * EXPERTS - 1), finish=st.booleans())
    def stream(self, ring: Ring, flat_id: int, finish: bool) -> None:
        slot = ring.begin(flat_id)
        if slot == NONE:
            return
        assert slot in self.slots.lent
        assert not ring.readable(slot, flat_id)
        self.bytes_in[slot] = None
        self.ring_holds.pop(slot, None)
        if finish:
            self.bytes_in[slot] = flat_id
            self.ring_holds[slot] = flat_id
            ring.ready(slot)
            assert ring.readable(slot, flat_id)
            ring.release(slot)
            assert not ring.readable(slot, flat_id)

    @rule(ring=rings, keep=st.booleans())
    def close(self, ring: Ring, keep: bool) -> None:
        if ring not in self.open:
            return
        self.open.remove(ring)
        before = set(self.slots.lent)
        ring.close(keep)
        for slot in before - self.slots.lent:
            flat_id = self.ring_holds.pop(slot, None)
            if keep and flat_id is not None and flat_id not in self.resident:
                self.resident[flat_id] = slot

    @invariant()
    def maps_are_exact_inverses(self) -> None:
        slots = self.slots
        forward = {i: s for i, s in enumerate(slots.slot_for_id) if s != NONE}
        backward = {i: s for s, i in enumerate(slots.id_of_slot) if i != NONE}
        assert forward == backward == self.resident
        assert not slots.lent & set(forward.values())
        assert slots.residents == [sum(i // EXPERTS == layer for i in forward) for layer in range(LAYERS)]

    @invariant()
    def an_owned_slot_holds_its_owners_bytes(self) -> None:
        for slot, owner in enumerate(self.slots.id_of_slot):
            if owner != NONE:
                assert self.bytes_in[slot] == owner


@pytest.mark.parametrize("policy", POLICIES)
def test_slot_cache_agrees_with_a_dict(policy):
    class Machine(SlotCache):
        pass

    Machine.policy = policy
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=settings(max_examples=examples(25, 60), stateful_step_count=30, deadline=None))


def run_step(slots: SlotMap, layer: int, ids: list[int], memory: list[int], table: tuple[int, ...]) -> int:
    """One decode step over fingerprinted rows. Returns the number of fetches."""
    plan = plan_decode(slots, layer, ids, table)
    for fetch in plan.fetches:
        memory[fetch.slot] = layer * slots.experts + fetch.expert
        publish(slots, fetch)
    for expert, slot in plan.slots.items():
        assert slot == NONE or memory[slot] == layer * slots.experts + expert
    return len(plan.fetches)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("keep", [True, False])
def test_prefill_of_another_layer_takes_every_slot_and_the_old_experts_miss(policy, keep):
    slots, memory, table = SlotMap(4, 2, 8, make_policy(policy, 4, 2)), [-1] * 4, fetch_table(-1, 8)
    assert run_step(slots, 0, [1, 2, 3, 4], memory, table) == 4
    assert run_step(slots, 0, [4, 3, 2, 1], memory, table) == 0
    ring = Ring(slots, 4)
    for expert in range(4):
        slot = ring.begin(8 + expert)
        memory[slot] = 8 + expert
        ring.ready(slot)
        ring.release(slot)
    # Decode while the ring is out: nothing may be hit, and no slot is to be had.
    assert plan_decode(slots, 0, [1, 2], table).cpu == (1, 2)
    ring.close(keep)
    hits, misses = slots.hits, slots.misses
    fetched = run_step(slots, 0, [1, 2, 3, 4], memory, table)
    assert (slots.hits, slots.misses) == (hits, misses + 4)
    assert fetched == (3 if policy == "lru_floor" and keep else 4)  # the floor leaves layer 1 one of its four


def test_a_slot_that_was_still_filling_when_the_ring_closed_has_no_owner():
    slots = SlotMap(2, 1, 4, make_policy("lru", 2, 1))
    ring = Ring(slots, 2)
    done, _half = ring.begin(0), ring.begin(1)
    ring.ready(done)
    ring.release(done)
    ring.close()
    assert slots.slot_for_id == [done, NONE, NONE, NONE]


def test_a_ring_takes_the_coldest_slots():
    slots, table = SlotMap(4, 1, 8, make_policy("lru", 4, 1)), fetch_table(-1, 8)
    memory = [-1] * 4
    for expert in (0, 1, 2, 3, 1):
        run_step(slots, 0, [expert], memory, table)
    lent = Ring(slots, 2)
    assert len(lent) == 2
    assert {slots.slot_for_id[e] != NONE for e in (1, 3)} == {True}
    assert {slots.slot_for_id[e] for e in (0, 2)} == {NONE}


def test_a_floor_keeps_hits_where_plain_lru_cycles_to_none():
    def hit_rate(policy: str) -> float:
        slots = SlotMap(4, 4, 4, make_policy(policy, 4, 4, floor=1))
        memory = [-1] * 4
        for _ in range(20):
            for layer in range(4):
                run_step(slots, layer, [0, 1], memory, fetch_table(1, 4))
        return slots.hits / (slots.hits + slots.misses)

    assert hit_rate("lru") < hit_rate("lru_floor")
    assert hit_rate("lru_floor") >= 0.4


def test_frequency_keeps_what_is_used_often_over_what_was_used_last():
    slots, memory, table = SlotMap(2, 1, 4, make_policy("frequency", 2, 1)), [-1, -1], fetch_table(-1, 4)
    for expert in (0, 0, 0, 1, 2):
        run_step(slots, 0, [expert], memory, table)
    assert slots.slot_for_id[0] != NONE
    assert slots.slot_for_id[1] == NONE


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="slot_policy"):
        make_policy("random", 4, 1)


@given(limit=st.integers(-1, 6), most=st.integers(0, 9))
def test_the_fetch_table_never_asks_for_more_than_there_is(limit, most):
    table = fetch_table(limit, most)
    assert len(table) == most + 1
    assert all(0 <= q <= m for m, q in enumerate(table))
    assert limit < 0 or max(table) <= limit


def test_an_expert_that_was_streamed_can_stay_for_another_resident():
    slots, memory, table = SlotMap(4, 1, 8, make_policy("lru", 4, 1)), [-1] * 4, fetch_table(-1, 8)
    for expert in (0, 1, 2, 3):
        run_step(slots, 0, [expert], memory, table)
    ring = Ring(slots, 2)
    slot = ring.begin(5)
    assert ring.holder(5) == NONE
    ring.ready(slot)
    assert ring.holder(5) == NONE
    ring.release(slot)
    assert ring.holder(5) == slot
    victim = slots.slot_for_id[3]
    ring.exchange(slot, victim)
    assert slots.slot_for_id[5] == slot
    assert slots.slot_for_id[3] == NONE
    assert slots.lent == {victim, *ring._state}
    assert len(ring) == 2
    assert ring.holder(5) == NONE
    ring.close()
    assert slots.lent == set()
    assert slots.slot_for_id[5] == slot


def pass_misses(slots: SlotMap, since: bool) -> int:
    """One pass that uses every expert of each layer in turn. Returns how many had to be fetched."""
    fetched, began = 0, slots.step
    for layer in range(slots.layers):
        slots.tick()
        base = layer * slots.experts
        active = range(base, base + slots.experts)
        missing = [flat_id for flat_id in active if slots.slot_for_id[flat_id] == NONE]
        for flat_id in active:
            if flat_id not in missing:
                slots.touch(slots.slot_for_id[flat_id])
        for flat_id in missing:
            slot = slots.victim(active, layer, since=began if since else None)
            slots.clear(slot)
            slots.assign(slot, flat_id)
        fetched += len(missing)
    return fetched


@pytest.mark.parametrize("policy", ["lru", "lru_floor", "frequency"])
def test_a_pass_through_all_layers_does_not_push_out_what_it_is_about_to_use(policy):
    layers, experts, count = 6, 8, 40
    slots = SlotMap(count, layers, experts, make_policy(policy, count, layers, floor=2))
    pass_misses(slots, since=True)
    for _ in range(3):
        # What has no slot, and a layer's share more for the first layer, which has nobody before it to take from.
        assert layers * experts - count <= pass_misses(slots, since=True) <= layers * experts - count + experts
        assert max(slots.residents) - min(slots.residents) <= experts // 2
    by_age = SlotMap(count, layers, experts, make_policy("lru", count, layers))
    assert [pass_misses(by_age, since=False) for _ in range(3)] == [layers * experts] * 3
