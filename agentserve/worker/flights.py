"""Single flight: a turn whose prompt another one is computing already waits for that one's checkpoint. Only decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Flight(NamedTuple):
    """A turn under way: its prompt (uint32), prompt tokens in its state, positions where its state will be saved."""

    turn_id: str
    ids: np.ndarray
    processed: int
    cuts: Sequence[int]


def join(ids: np.ndarray, known: int, flights: Iterable[Flight], least: int) -> tuple[str, int] | None:
    """(turn, position) of the checkpoint to wait for: the deepest still to come that saves `least` tokens or more.

    ids: the new prompt. known: tokens that a checkpoint has already. A checkpoint at the very end of the prompt counts only
    where the other prompt ends there too, since only then its logits are kept. least 0: never wait.
    """
    best: tuple[str, int] | None = None
    for flight in flights if least > 0 else ():
        shared = shared_tokens(ids, flight.ids)
        deepest = shared if shared == len(ids) == len(flight.ids) else min(shared, len(ids) - 1)
        coming = [cut for cut in flight.cuts if flight.processed < cut <= deepest]
        if not coming or coming[-1] - max(known, 0) < least:
            continue
        if best is None or coming[-1] > best[1]:
            best = (flight.turn_id, coming[-1])
    return best


def shared_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Leading tokens that agree."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count
