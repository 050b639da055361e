"""Stop strings end the visible text before themselves, however it is cut."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from agentserve.stops import StopText

texts = st.text("ab\n", max_size=20)


@given(pieces=st.lists(texts), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_whatever_the_chunking(pieces: list[str], stops: list[str]) -> None:
    whole, shown = "".join(pieces), ""
    filter_ = StopText(stops)
    for piece in pieces:
        shown += filter_.push(piece)
        if filter_.found is not None:
            break
        assert whole.startswith(shown)
    found = re.search("|".join(re.escape(s) for s in stops), whole) if stops else None
    if found is None:
        assert (shown + filter_.flush(), filter_.found) == (whole, None)
    else:
        # A longer stop string may still be incomplete where a shorter one that begins later is whole.
        assert filter_.found in stops
        assert whole.startswith(shown + str(filter_.found))
        assert not any(s in shown for s in stops)
        assert filter_.flush() == ""


def test_only_what_could_become_a_stop_string_waits() -> None:
    filter_ = StopText(["END", "\n\n"])
    assert [filter_.push(p) for p in ("one E", "N", "d two\n", "three")] == ["one ", "", "ENd two", "\nthree"]
