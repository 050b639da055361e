"""Shadows move to where a client's edits land, and stay where they are as long as nothing says otherwise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from statecache.experience import BUCKETS, MOST_GROUPS, Divergences, Experience
from statecache.policy import Policy

POLICY = Policy()
distances = st.lists(st.integers(1, 10_000), max_size=200)


def test_without_experience_the_policy_holds():
    assert Divergences(POLICY).shadows == POLICY.shadows
    assert Experience(POLICY).policy(b"a") is POLICY


def test_a_few_sightings_where_the_shadows_are_change_nothing():
    seen = Divergences(POLICY)
    for distance in (60, 200, 250, 64, 40):
        seen.saw(distance)
    assert seen.shadows == POLICY.shadows


def test_shadows_follow_a_client_that_edits_further_back():
    seen = Divergences(POLICY)
    for _ in range(40):
        seen.saw(1000)
        seen.saw(60)
    assert seen.shadows == (64, 1024)
    for _ in range(1500):
        seen.saw(2000)
        seen.saw(30)
    assert seen.shadows == (32, 2048)


def test_groups_do_not_mix_and_are_bounded():
    experience = Experience(POLICY)
    for _ in range(50):
        experience.saw(b"far", 4000)
    assert 4096 in experience.policy(b"far").shadows
    assert experience.policy(b"near").shadows == POLICY.shadows
    for n in range(MOST_GROUPS):
        experience.saw(n.to_bytes(2, "big"), 60)
    assert experience.policy(b"far").shadows == POLICY.shadows


@given(distances)
def test_chosen_shadows_cost_no_more_than_the_configured_ones(seen):
    histogram = Divergences(POLICY)
    for distance in seen:
        histogram.saw(distance)
    shadows = histogram.shadows
    assert len(shadows) == len(POLICY.shadows)
    assert list(shadows) == sorted(set(shadows))
    assert all(1 << BUCKETS[0] <= d <= 1 << BUCKETS[-1] for d in shadows)

    def buckets(chosen):
        return tuple((d - 1).bit_length() for d in chosen)

    assert histogram._recomputed(buckets(shadows)) <= histogram._recomputed(buckets(POLICY.shadows))
