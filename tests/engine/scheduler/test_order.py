"""Who goes first, as arithmetic: a total order, deadlines before cost, fair shares, and nobody starves."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.order import GRACE_US, Claim, Service, order

SECOND = 1_000_000
times = st.integers(0, 100 * SECOND)
costs = st.integers(0, 20 * SECOND)


@st.composite
def some_claims(draw, most=12):
    count = draw(st.integers(1, most))
    return [
        Claim(draw(times), draw(costs), draw(st.sampled_from("abc")), draw(st.integers(-2, 2)), arrival)
        for arrival in range(count)
    ]


@given(claims=some_claims(), now=times, data=st.data())
def test_order_is_a_permutation_that_does_not_depend_on_how_the_claims_are_listed(claims, now, data):
    found = [claims[i] for i in order(claims, now)]
    assert sorted(c.arrival for c in found) == list(range(len(claims)))
    shuffled = data.draw(st.permutations(claims))
    assert [shuffled[i] for i in order(shuffled, now)] == found


@st.composite
def tight_claims(draw):
    """Due within what all of them cost together, each of another share and due at another time."""
    count = draw(st.integers(1, 6))
    dues = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count, unique=True))
    return [Claim(due * SECOND, draw(st.integers(SECOND // 10, 8 * SECOND)), str(i), 0, i) for i, due in enumerate(dues)]


def on_time(claims, cost):
    """How many are, one after the other."""
    at = met = 0
    for claim in claims:
        met += at + claim.cost <= claim.due
        at += cost(claim)
    return met


@given(claims=tight_claims())
def test_as_many_turns_are_on_time_as_in_the_best_of_all_orders(claims):
    def with_margin(claim):
        return claim.cost * 9 // 8

    best = max(on_time(line, with_margin) for line in permutations(claims))
    assert on_time([claims[i] for i in order(claims, 0)], with_margin) >= best


@given(claims=some_claims())
def test_within_a_share_cheaper_turns_go_first_if_all_have_time_and_no_priority_says_otherwise(claims):
    found = [claims[i] for i in order(claims, -1000 * SECOND)]
    for share in "abc":
        for first, second in pairwise([c for c in found if c.share == share]):
            assert first.cost.bit_length() <= second.cost.bit_length() or first.priority > second.priority


def test_of_equally_long_turns_the_newest_of_the_least_priority_is_given_up():
    same = [Claim(10 * SECOND, 9 * SECOND, "a", priority, arrival) for arrival, priority in enumerate((0, 1, 0))]
    for line in permutations(same):
        assert [line[i].arrival for i in order(line, 0)] == [1, 0, 2]


def test_a_long_turn_is_given_up_for_several_short_ones():
    long, short = Claim(10 * SECOND, 9 * SECOND, "a", 0, 0), [Claim(12 * SECOND, SECOND, f"s{i}", 0, i + 1) for i in range(4)]
    assert order([long, *short], 0) == [1, 2, 3, 4, 0]
    assert order([long, short[0]], 0) == [0, 1], "one can wait for it"


@given(claims=some_claims(), now=times, cost=costs)
def test_once_its_second_deadline_is_over_no_turn_that_comes_later_goes_before_a_turn(claims, now, cost):
    """Nothing starves: what may still go first was there, or was due, long before."""
    old = Claim(now - GRACE_US - SECOND, cost, "a", -100, -1)
    newer = [Claim(now + c.due, c.cost, c.share, 100, c.arrival) for c in claims]
    assert order([*newer, old], now)[0] == len(newer)


@given(flood=st.integers(2, 30), cost=st.integers(SECOND, 2 * SECOND))
def test_many_turns_of_one_share_stand_once_before_the_turn_of_another(flood, cost):
    far = 3600 * SECOND
    many = [Claim(far, cost, "many", 0, i) for i in range(flood)]
    few = Claim(far, cost, "few", 0, flood)
    assert order([*many, few], 0).index(flood) <= 1


def test_priority_decides_between_equals_only():
    near = [Claim(SECOND, 950_000, "a", 0, 0), Claim(SECOND + 1000, 950_000, "b", 1, 1)]
    assert order(near, 0) == [1, 0]
    apart = [Claim(SECOND, 950_000, "a", 0, 0), Claim(2 * SECOND, 1_950_000, "b", 1, 1)]
    assert order(apart, 0) == [0, 1]
    easy = [Claim(90 * SECOND, 1000, "a", 0, 0), Claim(90 * SECOND, 1020, "b", 1, 1), Claim(90 * SECOND, 9000, "c", 9, 2)]
    assert order(easy, 0) == [1, 0, 2]


def test_a_turn_that_cannot_be_on_time_lets_those_pass_that_can():
    late, in_time = Claim(SECOND, 3 * SECOND, "a", 0, 0), Claim(4 * SECOND, 3 * SECOND, "b", 0, 1)
    assert order([late, in_time], 0) == [1, 0]
    assert order([late, Claim(60 * SECOND, SECOND, "c", 0, 2)], GRACE_US - 2 * SECOND) == [0, 1], "until it has waited enough"


@given(arrivals=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=25))
def test_a_server_that_follows_the_order_never_idles_and_serves_everybody(arrivals):
    """One server, 100 ms at a time, switching whenever the order says so."""
    tick = 100_000
    todo = [Claim(t * SECOND + d * SECOND, c * tick, str(i % 3), 0, i) for i, (t, c, d) in enumerate(arrivals)]
    begins = {i: t * SECOND for i, (t, _, _) in enumerate(arrivals)}
    left = {c.arrival: c.cost for c in todo}
    now, idle = 0, 0
    while left:
        there = [
            Claim(c.due, left[c.arrival], c.share, 0, c.arrival) for c in todo if c.arrival in left and begins[c.arrival] <= now
        ]
        if there:
            chosen = there[order(there, now)[0]]
            left[chosen.arrival] -= tick
            if left[chosen.arrival] <= 0:
                del left[chosen.arrival]
        else:
            idle += 1
        now += tick
    total = sum(c.cost for c in todo)
    assert now == total + idle * tick
    assert now <= max(begins.values()) + total + tick


# ── owners ───────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def owned_claims(draw):
    count, far = draw(st.integers(1, 14)), 3600 * SECOND
    owners, shares = st.sampled_from("xyz"), st.sampled_from("abcd")
    return [Claim(far, draw(costs), draw(shares), draw(st.integers(-2, 2)), i, draw(owners)) for i in range(count)]


@given(claims=owned_claims(), had=st.fixed_dictionaries(dict.fromkeys("xyz", costs)))
def test_no_owner_gets_ahead_of_one_that_waits_by_more_than_that_ones_next_turn(claims, had):
    left = [claims[i] for i in order(claims, 0, had)]
    served = dict(had)
    while left:
        turn, *left = left
        served[turn.owner] += turn.cost
        for other in {c.owner for c in left} - {turn.owner}:
            following = next(c for c in left if c.owner == other)
            assert served[turn.owner] <= served[other] + following.cost


@given(claims=owned_claims(), now=times)
def test_the_turns_of_one_owner_go_in_the_order_that_they_have_alone(claims, now):
    found = [claims[i] for i in order(claims, now, {"x": 5 * SECOND})]
    for owner in "xyz":
        mine = [c for c in claims if c.owner == owner]
        assert [c for c in found if c.owner == owner] == [mine[i] for i in order(mine, now)]


@given(sessions=st.integers(1, 40), cost=st.integers(1, SECOND), other=st.integers(1, SECOND), rounds=st.integers(10, 120))
def test_an_owner_with_many_sessions_gets_no_more_than_one_with_a_single_one(sessions, cost, other, rounds):
    """Both ask again as soon as they are answered; deadlines are far."""
    service, far = Service(), 3600 * SECOND
    waiting = [Claim(far, cost, f"s{i}", 0, -i, "many") for i in range(sessions)] + [Claim(far, other, "s", 0, 1, "one")]
    got = {"many": 0, "one": 0}
    for arrival in range(2, rounds + 2):
        turn = waiting.pop(order(waiting, 0, service.ahead({c.owner for c in waiting}))[0])
        service.charge(turn.owner, turn.cost)
        got[turn.owner] += turn.cost
        waiting.append(Claim(far, turn.cost, turn.share, 0, arrival, turn.owner))
    assert abs(got["many"] - got["one"]) <= cost + other


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, SECOND)), max_size=40), st.integers(0, SECOND))
def test_who_was_alone_owes_nothing_for_it(history, cost):
    service = Service()
    for owner, us in history:
        service.ahead({"x", "y", "z"})
        service.charge(owner, us)
    for _ in range(3):
        service.ahead({"x"})
        service.charge("x", 100 * SECOND + cost)
    assert service.ahead({"x", "new"})["x"] <= 100 * SECOND + cost + sum(us for _, us in history)
    assert min(service.ahead({"x", "new"}).values()) == 0


def test_who_comes_back_owes_what_it_had_more_and_is_given_nothing_for_the_time_away():
    service = Service()
    service.ahead({"x", "y"})
    service.charge("x", 7)
    assert service.ahead({"y"}) == {"y": 0}
    assert service.ahead({"x", "y"}) == {"x": 7, "y": 0}
    for _ in range(10):
        service.ahead({"x"})
        service.charge("x", 7)
    assert service.ahead({"x", "y"}) == {"x": 7, "y": 0}
