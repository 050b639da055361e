"""`truncation: "auto"`: what is left out of a context that is too long. Items only; turn.py renders and counts.

The oldest exchanges go first, each whole: a user message and all that follows it up to the next one, so that no call is parted
from its result. What stands before the first of them (system and developer messages) stays, and so does the newest exchange.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from agentserve.protocol.items import Item, Message

T = TypeVar("T")


def exchanges(items: Sequence[Item]) -> tuple[int, ...]:
    """Where each begins."""
    return tuple(i for i, item in enumerate(items) if isinstance(item, Message) and item.role == "user")


def without_oldest(items: Sequence[Item], starts: Sequence[int], dropped: int) -> tuple[Item, ...]:
    """Items without the first `dropped` exchanges, which must be fewer than there are."""
    return tuple(items) if not dropped else (*items[: starts[0]], *items[starts[dropped] :])


async def fewest_dropped(exchanges: int, fits: Callable[[int], Awaitable[T | None]]) -> T | None:
    """The result of `fits` for the fewest exchanges dropped (at least one), None if even the newest alone does not fit.

    fits(n): something if the context fits without the oldest n, else None. Asked about log2 of them.
    """
    low, high, best = 1, exchanges - 1, None
    while low <= high:
        middle = (low + high) // 2
        found = await fits(middle)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle - 1
    return best
