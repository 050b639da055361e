"""What is known of workers' states, against plain sets of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentserve.worker.holdings import BLOCK_TOKENS, Holdings, block_digests

# A context as blocks that begin with its letters, so that contexts share prefixes.
contexts = st.text("ab", max_size=6)
WORKERS = 3


def ids(context: str, rest: int = 0) -> bytes:
    return b"".join(np.full(BLOCK_TOKENS, ord(c), "<u4").tobytes() for c in context) + bytes(4 * rest)


@given(
    story=st.lists(
        st.tuples(st.integers(0, WORKERS - 1), contexts, st.sampled_from(["s", "t"])) | st.integers(0, WORKERS - 1), max_size=30
    ),
    asked=contexts,
    rest=st.integers(0, BLOCK_TOKENS - 1),
)
def test_each_worker_has_the_longest_prefix_that_went_there_since_it_started(
    story: list[tuple[int, str, str] | int], asked: str, rest: int
) -> None:
    holdings = Holdings(WORKERS)
    plain: list[set[str]] = [set() for _ in range(WORKERS)]
    for event in story:
        if isinstance(event, int):
            holdings.lost(event)
            plain[event] = set()
        else:
            worker, context, session = event
            holdings.add(worker, block_digests(ids(context), b"salt"), session)
            plain[worker] |= {context[: i + 1] for i in range(len(context))}
            assert holdings.home(session) == worker
    wanted = [max(i for i in range(len(asked) + 1) if asked[:i] in has or i == 0) * BLOCK_TOKENS for has in plain]
    assert holdings.held(block_digests(ids(asked, rest), b"salt"), "other") == wanted
    assert holdings.held(block_digests(ids(asked, rest), b"another"), "other") == [0] * WORKERS


def test_a_session_found_on_disk_is_at_home_where_most_of_it_is_until_its_next_turn() -> None:
    holdings = Holdings(2)
    assert holdings.home("s") is None
    holdings.tell(0, {"s": 100})
    holdings.tell(1, {"s": 900, "t": 5})
    assert (holdings.home("s"), holdings.home("t")) == (1, 1)
    assert holdings.held((), "s") == [100, 900]
    holdings.lost(1)
    assert (holdings.home("s"), holdings.home("t")) == (0, None)
    holdings.add(1, (), "s")
    assert (holdings.home("s"), holdings.held((), "s")) == (1, [0, 0])
    holdings.forget("s")
    assert holdings.home("s") is None


def test_the_longest_unused_is_forgotten_first() -> None:
    holdings = Holdings(1, blocks=2, sessions=1)
    first, second = block_digests(ids("a"), b""), block_digests(ids("ba"), b"")
    holdings.add(0, first, "s")
    holdings.add(0, second, "t")
    assert holdings.held(first, "") == [0]
    assert holdings.held(second, "") == [2 * BLOCK_TOKENS]
    assert (holdings.home("s"), holdings.home("t")) == (None, 0)
