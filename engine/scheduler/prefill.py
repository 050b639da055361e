"""Where prefill chunks end and which of them a step takes. Integers only.

Chunk ends are canonical: multiples of chunk_tokens in absolute position, whatever was restored or cut, so that a warm run
and a cold run put the same tokens through the same matrix products from the first common edge on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def next_edge(context: int, prompt: int, chunk_tokens: int, edges: Sequence[int] = ()) -> int:
    """End of the chunk that starts at position context < prompt. edges: extra ends, rising."""
    end = min(prompt, (context // chunk_tokens + 1) * chunk_tokens)
    at = bisect_right(edges, context)
    return min(end, edges[at]) if at < len(edges) else end


def choose_slices(lengths: Sequence[int], budget: int) -> list[int]:
    """Indices of the prefill slices that one step runs, given in turn order with their lengths.

    The first always runs, even beyond the budget, so that prefill never starves; the others only while they fit. A slice is
    taken whole or not at all: shortening it would move a canonical edge.
    """
    chosen: list[int] = []
    for index, length in enumerate(lengths):
        if not chosen or length <= budget:
            chosen.append(index)
            budget -= length
    return chosen
