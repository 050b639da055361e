"""How many pages a request will need, and who gives way. Integers only.

Answers are short of what they may be: reserving `max_tokens` would leave most pages empty, and reserving nothing would send
requests to the host again and again. So what answers have taken lately is planned for.
"""

from __future__ import annotations

from collections.abc import Sequence

QUANTUM_TOKENS = 64
"""An answer that was let in generates at least so many tokens before it may be paused for another turn."""


def planned_growth(length: int, produced: int, most: int, typical: int, page_size: int) -> int:
    """Pages that a request of `length` known tokens will still take for its answer, at least one if any token may come.

    produced: generated so far. most: that it may generate at all. typical: tokens of a usual answer.
    """
    left = max(0, most - produced)
    more = min(left, max(1, typical - produced))
    return -(-(length + more) // page_size) - -(-length // page_size) if more else 0


def blend(old: int, new: int) -> int:
    """Average over about the last eight answers, rounded so that it reaches a constant input."""
    return old + (new - old + (7 if new > old else 0)) // 8


def to_pause(produced: Sequence[int | None]) -> int | None:
    """Index of the answer that is paused for a turn that cannot wait: the one that has gone on longest since it was let in.

    produced: tokens since then, None for a request that is still in its prompt. None: all are within their quantum.
    """
    best: int | None = None
    for index, tokens in enumerate(produced):
        if tokens is not None and tokens >= QUANTUM_TOKENS and (best is None or tokens > (produced[best] or 0)):
            best = index
    return best
