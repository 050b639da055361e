"""Which earlier turn a context goes on from, where the client resends all of it and names no parent. Tokens only.

Reads no database: store.py brings the candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from agentserve.interfaces import Rendered
from agentserve.protocol.items import Item, Message


def first_words(items: Sequence[Item], rendered: Rendered) -> int:
    """Prompt position behind the first user message: contexts that share less of their tokens are other conversations."""
    first = next((i for i, item in enumerate(items) if isinstance(item, Message) and item.role == "user"), len(items))
    return rendered.item_starts[first + 1] if first + 1 < len(rendered.item_starts) else len(rendered.ids)


def predecessor(prompt: bytes, own_tokens: int, candidates: Iterable[tuple[str, bytes]]) -> str | None:
    """The candidate whose context (prompt and answer) `prompt` shares most of, None if none shares its first words.

    candidates: (id, ids) of turns with fewer items, most items first; of equals the first is taken. A turn with as many items
    is another try of the same one and no candidate. own_tokens: see first_words. Ids are little-endian uint32.
    """
    best: tuple[int, str] | None = None
    for name, context in candidates:
        shared = shared_tokens(context, prompt)
        if shared >= max(own_tokens, 1) and (best is None or shared > best[0]):
            best = (shared, name)
        if 4 * shared == len(context):
            break  # all of it is here, and those that follow are shorter
    return None if best is None else best[1]


def shared_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two rows of ids."""
    n = min(len(a), len(b)) // 4
    unequal = np.flatnonzero(np.frombuffer(a, "<u4", n) != np.frombuffer(b, "<u4", n))
    return int(unequal[0]) if len(unequal) else n
