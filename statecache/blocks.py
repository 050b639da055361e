"""What a shelf is made of: blocks in extents, what it has of a checkpoint, a checkpoint on its way. Plain state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statecache.checkpoint import Path, Record
from statecache.types import BLOCK_TOKENS

if TYPE_CHECKING:
    from statecache.shelf import Shelf
    from statecache.stretches import Stretch


class Extent:
    """A segment of consecutive blocks. live: how many of its blocks are needed; at 0 it is deleted."""

    __slots__ = ("blocks", "key", "live", "nbytes")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.blocks: list[Block] = []
        self.live = 0
        self.nbytes = 0


class Block:
    """64 tokens of KV. refs: needed child blocks + states that end here; 0 = only its extent keeps it.

    stretch: this and those before it as a restore sends them, see stretches.py.
    """

    __slots__ = ("extent", "ids", "index", "key", "parent", "refs", "stretch")

    def __init__(self, key: bytes, parent: Block | None, index: int, ids: bytes, extent: Extent) -> None:
        self.key = key
        self.parent = parent
        self.index = index
        self.ids = ids
        self.extent = extent
        self.refs = 0
        self.stretch: Stretch | None = None


class Holding:
    """What a shelf has of one checkpoint beside its blocks."""

    __slots__ = ("logits_bytes", "logits_key", "state_bytes", "state_key", "tail")

    def __init__(self, tail: Block | None, state_key: bytes, state_bytes: int) -> None:
        self.tail = tail
        self.state_key = state_key
        self.state_bytes = state_bytes
        self.logits_key: bytes | None = None
        self.logits_bytes = 0

    @property
    def nbytes(self) -> int:
        return self.state_bytes + self.logits_bytes


@dataclass
class Draft:
    """A checkpoint on its way onto a shelf. tail: the last of its blocks that are there, held. extents: first, end block, key.

    logits_only: the rest of it is there. stored: bytes charged per segment key, filled by Shelf.store().
    """

    record: Record
    path: Path
    tail: Block | None
    extents: list[tuple[int, int, bytes]]
    logits_only: bool
    stored: dict[bytes, int] = field(default_factory=dict)

    @property
    def written(self) -> int:
        return sum(self.stored.values())


@dataclass
class Growing:
    """Blocks of a path on a shelf, of which there will be a checkpoint. tail: the last of them, held; they come one by one."""

    path: Path
    shelf: Shelf
    tail: Block | None

    @property
    def tokens(self) -> int:
        return 0 if self.tail is None else (self.tail.index + 1) * BLOCK_TOKENS
