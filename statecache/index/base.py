"""What an index answers: how far a context agrees with what is known, and which checkpoints lie on that stretch.

It knows token ids, block keys and checkpoint ids; no bytes of state, no tiers. The index in memory answers every match; a
durable copy (SQL) only fills it at start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Walk(Protocol):
    """A context followed through the known token paths of one salt. Valid until the index changes."""

    @property
    def depth(self) -> int:
        """Tokens that agree with some known path."""
        ...

    @property
    def tip(self) -> bool:
        """Nothing known continues at `depth`: the context ran out, or appends to a known one."""
        ...

    def marks(self, limit: int) -> Iterator[tuple[int, str]]:
        """(position, checkpoint id) on the agreeing stretch with position ≤ limit, deepest first."""
        ...

    def at(self, position: int) -> str | None:
        """Checkpoint id at exactly this position of the agreeing stretch."""
        ...

    def keys(self) -> bytes:
        """Joined keys of the full blocks inside the agreeing stretch, as they were given to add()."""
        ...


class Index(Protocol):
    """Token ids are u32le bytes. A mark is a checkpoint id at a position of a path; ids are unique over all salts."""

    def walk(self, salt: bytes, ids: bytes) -> Walk: ...

    def add(self, salt: bytes, ids: bytes, keys: bytes, mark: str) -> None:
        """Mark the end of `ids`. keys: joined keys of all its full blocks. Marking again does nothing.

        Raises ValueError if the mark is known at another place.
        """
        ...

    def remove(self, mark: str) -> None:
        """Forget a mark and the tokens that only it held. Unknown marks are ignored."""
        ...

    def above(self, mark: str) -> Iterator[tuple[int, str]]:
        """Marks nearer to the start on the same path, deepest first. Unknown: nothing."""
        ...

    def knows(self, mark: str) -> bool: ...

    def agrees_elsewhere(self, salt: bytes, ids: bytes) -> Iterator[Walk]:
        """The same context followed under other salts, a bounded number of them."""
        ...

    @property
    def tokens(self) -> int:
        """Token ids held over all paths."""
        ...

    def __len__(self) -> int:
        """Marks held."""
        ...
