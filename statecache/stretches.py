"""Runs of a long context in memory as a restore sends them, kept with the last of their blocks since that came.

A thousand blocks cost 4 to 5 µs each to be looked up, checked and described, and a device would wait for all of them. Segments
never change while they are here, and a block keeps all before it here; so only the tokens of a stretch are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from statecache.blocks import Block
from statecache.checkpoint import Path
from statecache.types import BLOCK_TOKENS, KvRun

BLOCKS = 64
"""Of a stretch, whose first block is a multiple of this."""
Join = Callable[[Iterable[np.ndarray]], Iterable[np.ndarray]]
"""Arrays that lie side by side as one, uint8 [n]; the results keep alive what they were made of."""


def separate(arrays: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    return (array.reshape(-1) for array in arrays)


@dataclass(frozen=True, slots=True)
class Stretch:
    """KV of blocks [first, first + BLOCKS) of every path that goes through its last one. before: the block in front of it."""

    namespace: bytes
    salt: bytes
    ids: bytes
    before: Block | None
    runs: tuple[KvRun, ...]

    def is_of(self, path: Path, first: int) -> bool:
        mine = self.namespace == path.namespace and self.salt == path.salt
        return mine and path.block_ids(first, first + BLOCKS) == self.ids


def stretch_of(path: Path, last: Block, rows_of: Callable[[Block], np.ndarray], join: Join) -> Stretch:
    """Of the blocks up to `last`, the last of a stretch, which is on the path. rows_of: uint8 [tokens, width] of one."""
    blocks = [last]
    while blocks[-1].index % BLOCKS:
        parent = blocks[-1].parent
        assert parent is not None
        blocks.append(parent)
    blocks.reverse()
    arrays = [rows_of(block) for block in blocks]
    width, start, runs = arrays[0].shape[1], blocks[0].index * BLOCK_TOKENS, list[KvRun]()
    for array in join(arrays):
        rows = array.reshape(-1, width)
        rows.flags.writeable = False
        runs.append(KvRun(start, rows))
        start += len(rows)
    ids = path.block_ids(blocks[0].index, last.index + 1)
    return Stretch(path.namespace, path.salt, ids, blocks[0].parent, tuple(runs))
