"""Routing by integers: sessions stay where they are, leave when that is clearly sooner, and never go to and fro."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentserve.worker.routing import STAY_US, Standing, choose, first_home, first_token_us, leaves

costs = st.lists(st.none() | st.integers(0, 10**9), min_size=1, max_size=6)
counts = st.integers(0, 10**6)
standings = st.builds(
    Standing,
    waiting_tokens=counts,
    decoding=st.integers(0, 100),
    turns=st.integers(0, 100),
    rows=st.integers(0, 32),
    turn_us=counts,
    held_tokens=counts,
    token_bytes=st.integers(0, 10**5),
    prefill_tokens_per_s=st.integers(1, 10**6),
    decode_step_us=st.integers(1, 10**6),
    restore_bytes_per_s=st.integers(1, 10**12),
)


@given(costs=costs, home=st.integers(0, 5))
def test_a_worker_that_takes_turns_is_chosen_whenever_there_is_one(costs: list[int | None], home: int) -> None:
    at = choose(costs, home)
    if all(cost is None for cost in costs):
        assert at is None
    else:
        assert at is not None
        assert costs[at] is not None


@given(costs=costs, home=st.integers(0, 5))
def test_a_session_leaves_only_for_the_soonest_and_only_by_more_than_the_margin(costs: list[int | None], home: int) -> None:
    at = choose(costs, home)
    own = costs[home] if home < len(costs) else None
    soonest = min((cost for cost in costs if cost is not None), default=0)
    if at is None or own is None:
        assert at is None or costs[at] == soonest
    elif at == home:
        assert not leaves(own, soonest)
    else:
        assert costs[at] == soonest
        assert own > soonest * 5 // 4 + STAY_US


@given(costs=costs, home=st.integers(0, 5))
def test_a_session_that_went_stays_while_nothing_changes(costs: list[int | None], home: int) -> None:
    at = choose(costs, home)
    if at is not None:
        assert choose(costs, at) == at


@given(base=st.integers(0, 10**8), noise=st.lists(st.tuples(*[st.integers(0, STAY_US)] * 3), max_size=50))
def test_costs_that_change_by_less_than_the_margin_move_nobody(base: int, noise: list[tuple[int, ...]]) -> None:
    home = 0
    for changes in noise:
        at = choose([base + change for change in changes], home)
        assert at == home


@given(base=st.integers(0, 10**7), rises=st.lists(st.integers(0, 10**7), max_size=60))
def test_every_move_is_paid_by_a_change_of_the_costs_beyond_the_margin(base: int, rises: list[int]) -> None:
    """Two workers, the cost of the second changing: each move needs the difference to travel by the margin at least."""
    home, last_move = 0, base
    for rise in rises:
        other = rise
        at = choose([base, other], home)
        assert at is not None
        if at != home:
            assert abs(other - base) > STAY_US
            if home == 1 or last_move != base:
                assert abs(other - last_move) > STAY_US
            home, last_move = at, other


@given(standing=standings, prompt=st.integers(0, 10**6), more=st.integers(1, 10**5))
def test_more_before_a_turn_never_makes_it_sooner(standing: Standing, prompt: int, more: int) -> None:
    from dataclasses import replace

    before = first_token_us(standing, prompt)
    assert before >= 0
    assert first_token_us(replace(standing, waiting_tokens=standing.waiting_tokens + more), prompt) >= before
    assert first_token_us(replace(standing, decoding=standing.decoding + more), prompt) > before
    assert first_token_us(replace(standing, turns=standing.turns + more), prompt) >= before
    assert first_token_us(standing, prompt + more) >= before


def test_a_turn_waits_for_a_row_where_all_are_taken() -> None:
    busy = Standing(turns=4, rows=4, turn_us=8_000_000)
    assert first_token_us(busy, 0) == 2_000_000
    assert first_token_us(Standing(turns=3, rows=4, turn_us=8_000_000), 0) == 0


def test_held_state_is_restored_at_the_rate_of_bytes_and_the_rest_computed_at_that_of_tokens() -> None:
    standing = Standing(held_tokens=1000, token_bytes=2000, restore_bytes_per_s=1_000_000, prefill_tokens_per_s=100)
    assert first_token_us(standing, 1500) == 2_000_000 + 5_000_000
    assert first_token_us(standing, 500) == 1_000_000


@given(seed=st.integers(0, 2**64 - 1), workers=st.integers(1, 64))
def test_an_unknown_session_begins_at_some_worker(seed: int, workers: int) -> None:
    assert 0 <= first_home(seed, workers) < workers
