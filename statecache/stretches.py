"""Runs of a long context in memory as they were read before, kept with the last of their blocks, so that a restore takes them.

A thousand blocks cost 4 to 5 µs each to be looked up, checked and described, and a device waits for all of them. Segments never
change while they are here, and a block keeps all before it here; so what was once checked needs only its tokens compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from statecache.blocks import Block
from statecache.checkpoint import Path
from statecache.types import KvRun

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


class Gathered:
    """The runs of one read of a path, in order; whole stretches of single blocks are remembered on the way."""

    def __init__(self, path: Path, join: Join) -> None:
        self.runs: list[KvRun] = []
        self._path = path
        self._join = join
        self._new: list[Block] = []

    def again(self, stretch: Stretch) -> None:
        """As it was read before."""
        self.runs += stretch.runs

    def add(self, run: KvRun, block: Block | None) -> None:
        """Checked rows; of this block alone where they may be remembered."""
        self.runs.append(run)
        if block is None:
            return
        if block.index % BLOCKS == 0:
            self._new = []
        self._new.append(block)
        if (block.index + 1) % BLOCKS == 0 and len(self._new) == BLOCKS:
            block.stretch = stretch_of(self._path, self._new[0], self.runs[-BLOCKS:], self._join)
            self.runs[-BLOCKS:] = block.stretch.runs


def stretch_of(path: Path, first: Block, runs: Sequence[KvRun], join: Join) -> Stretch:
    """From this block on; of the runs of its blocks, which were checked against the path."""
    width, start, joined = runs[0].rows.shape[1], runs[0].start, list[KvRun]()
    for array in join(run.rows for run in runs):
        rows = array.reshape(-1, width)
        rows.flags.writeable = False
        joined.append(KvRun(start, rows))
        start += len(rows)
    ids = path.block_ids(first.index, first.index + BLOCKS)
    return Stretch(path.namespace, path.salt, ids, first.parent, tuple(joined))
