"""Which ends of messages go to disk follows from what contexts come back to."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from statecache.policy import Policy, message_ends
from statecache.returns import MOST_ENDS, MOST_GROUPS, MOST_SESSIONS, RARE, TRIALS, Returns, Sort
from statecache.types import Boundary, BoundaryKind

USER, TURN, RESULT = BoundaryKind.USER, BoundaryKind.TURN, BoundaryKind.TOOL_RESULT
POLICY = Policy()


def turn(returns: Returns, at: int, last: BoundaryKind, *, calls: bool, group: bytes = b"a", session: str = "s") -> list[int]:
    """A turn whose last message ends at at + 80 and which itself ends at at + 100; what of it goes to disk."""
    placed = [Boundary(at + 80, last), Boundary(at + 100, TURN)]
    if calls:
        placed.append(Boundary(at + 90, BoundaryKind.CALL_OPEN))
    return [b.position - at for b in returns.durable(group, session, placed, at + 85, POLICY)]


def loop_of_calls(returns: Returns, count: int, comes_back: Callable[[int], int], group: bytes = b"a") -> list[int]:
    chosen: list[int] = []
    for number in range(count):
        at = 100 * number
        chosen = turn(returns, at, RESULT, calls=True, group=group)
        back = at + comes_back(number)
        returns.came(group, "s", back, back)
    return chosen


def test_nothing_is_left_out_before_it_was_tried_often() -> None:
    returns = Returns()
    assert loop_of_calls(returns, TRIALS, lambda number: 100) == [100, 80]


def test_an_agent_that_only_appends_to_its_calls_pays_for_one_end() -> None:
    returns = Returns()
    assert loop_of_calls(returns, TRIALS + 2, lambda number: 100) == [100]
    assert turn(returns, 0, RESULT, calls=False, session="t") == [100, 80], "other turns of it are watched for themselves"
    assert turn(returns, 0, RESULT, calls=True, group=b"b") == [100, 80], "and so are other principals"


def test_an_agent_that_drops_what_it_said_pays_for_the_end_before_that() -> None:
    returns = Returns()
    assert loop_of_calls(returns, TRIALS + 2, lambda number: 80) == [80]


def test_what_is_left_out_is_written_again_soon_after_contexts_come_back_to_it() -> None:
    returns = Returns()
    loop_of_calls(returns, 2 * TRIALS, lambda number: 100)
    assert loop_of_calls(returns, 2, lambda number: 80) == [100, 80]


def test_an_agent_that_rewrites_its_last_message_gets_a_third_end_and_others_do_not() -> None:
    returns = Returns()
    placed = [Boundary(40, TURN), Boundary(80, USER), Boundary(100, TURN)]

    def chosen(session: str) -> list[int]:
        return [b.position for b in returns.durable(b"a", session, placed, 85, POLICY)]

    assert chosen("s") == [100, 80]
    returns.came(b"a", "s", 45, 45)
    assert chosen("t") == [100, 80, 40]
    for number in range(2 * RARE):
        chosen(f"u{number}")
    assert 40 not in chosen("v"), "one in so many is not worth it"


def test_the_shallow_end_that_a_whole_chain_of_calls_returns_to_is_counted() -> None:
    returns = Returns()
    for session in map(str, range(TRIALS + 2)):
        first = turn(returns, 0, USER, calls=True, session=session)
        returns.came(b"a", session, 100, 100)
        for number in range(1, 5):
            turn(returns, 100 * number, RESULT, calls=True, session=session)
            returns.came(b"a", session, 100 * number + 100, 100 * number + 100)
        returns.came(b"a", session, 85, 85)  # the user speaks, and the template drops all thinking since
    assert first == [100, 80]
    assert turn(returns, 0, RESULT, calls=True, session="x") == [100]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 500), st.integers(0, 600), st.integers(0, 600), st.sampled_from("st"), st.sampled_from(BoundaryKind)
        ),
        max_size=80,
    )
)
def test_any_order_of_turns_leaves_at_least_one_end_and_stays_bounded(steps) -> None:
    returns = Returns()
    for at, restored, agreed, session, kind in steps:
        placed = [Boundary(at, kind), Boundary(at + 10, TURN)]
        returns.came(b"a", session, min(restored, agreed), agreed)
        chosen = returns.durable(b"a", session, placed, at + 5, POLICY)
        assert message_ends(chosen)
        assert set(chosen) <= set(placed)


def test_memory_is_bounded() -> None:
    returns = Returns()
    for number in range(MOST_SESSIONS + 10):
        group = number.to_bytes(4, "little")
        returns.left(group, f"s{number}", [(number, Sort(TURN, False, 0))])
        returns.left(b"one", "long", [(number, Sort(TURN, False, 0))])
    assert len(returns._ends) <= MOST_SESSIONS
    assert len(returns._counts) <= MOST_GROUPS
    assert len(returns._ends["long"]) <= MOST_ENDS
