"""Who leaves first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from statecache.eviction import Candidate, eviction_order, score
from statecache.policy import KIND_WEIGHT, Policy
from statecache.types import BoundaryKind

POLICY = Policy()
candidates = st.builds(
    Candidate,
    id=st.uuids().map(str),
    kind=st.sampled_from(list(BoundaryKind)),
    age_s=st.integers(0, 10**7),
    hits=st.integers(0, 1000),
    saved_tokens=st.integers(0, 10**6),
    exclusive_bytes=st.integers(0, 10**12),
    stranded=st.booleans(),
    held=st.booleans(),
)


def test_every_kind_has_a_weight():
    assert set(KIND_WEIGHT) == set(BoundaryKind)
    assert all(isinstance(w, int) and w > 0 for w in KIND_WEIGHT.values())


def test_with_all_else_equal_the_order_is_by_kind_and_stranded_ones_go_first():
    def one(kind, **kwargs):
        return Candidate(str(kind), kind, 60, 0, 1000, 1 << 20, **kwargs)

    kinds = [BoundaryKind.SYSTEM, BoundaryKind.TURN, BoundaryKind.SHADOW, BoundaryKind.LADDER]
    order = eviction_order([*map(one, kinds), replace(one(BoundaryKind.SYSTEM, stranded=True), id="broken")], POLICY)
    assert order == ["broken", "ladder", "shadow", "turn", "system"]


@given(st.lists(candidates, unique_by=lambda c: c.id))
def test_held_ones_never_leave_and_all_others_are_listed_once(pool):
    order = eviction_order(pool, POLICY)
    assert sorted(order) == sorted(c.id for c in pool if not c.held)
    by_id = {c.id: c for c in pool}
    stranded = [by_id[i].stranded for i in order]
    assert stranded == sorted(stranded, reverse=True)


@given(st.lists(candidates, unique_by=lambda c: c.id), st.randoms())
def test_the_order_does_not_depend_on_the_order_given(pool, random):
    shuffled = list(pool)
    random.shuffle(shuffled)
    assert eviction_order(shuffled, POLICY) == eviction_order(pool, POLICY)


@given(candidates, st.integers(1, 10**6))
def test_worth_falls_with_age_and_size_and_grows_with_hits_and_savings(c, more):
    assert score(replace(c, age_s=c.age_s + more), POLICY) <= score(c, POLICY)
    assert score(replace(c, exclusive_bytes=c.exclusive_bytes + more), POLICY) <= score(c, POLICY)
    assert score(replace(c, hits=c.hits + more), POLICY) >= score(c, POLICY)
    assert score(replace(c, saved_tokens=c.saved_tokens + more), POLICY) >= score(c, POLICY)
    assert isinstance(score(c, POLICY), int)
