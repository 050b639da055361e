"""What a tier is: a shelf for immutable segments with a byte budget. It knows nothing of prefixes, sharing or worth.

A segment is written once, whole, and never changed. Two kinds:

- *extent*: KV rows of consecutive full blocks [start, position); part "kv". Shared by every checkpoint behind it.
- *state*: what belongs to one position alone: "kv.tail" (rows of the partial block), one "state.NAME" for each recurrent
  component of the layout (a worker's has one, which is all that its engine has); and, as a segment of its own because it may
  come later, "logits".

The store writes extents in rising order, then the state that needs them, and only then makes the checkpoint visible; a
durable tier keeps that order on its medium. What may still turn out wrong is put unsealed: it can be read like the rest, and is
gone when the process ends before it is sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from statecache.types import TierName

Take = Callable[[int], np.ndarray]
"""Memory for bytes: uint8 [n] to write to, which ends with the last array over it. Beside a GPU it is memory that this copies
from by itself."""

Part = np.ndarray | Sequence[np.ndarray]
"""Bytes to be stored: a uint8 array of any shape, or several whose bytes follow one another."""


def ordinary(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, dtype=np.uint8)


def pieces_of(part: Part) -> list[np.ndarray]:
    """Its arrays, each uint8 [n]; views where that is possible."""
    if isinstance(part, np.ndarray):
        return [np.ascontiguousarray(part).reshape(-1)]
    return [np.ascontiguousarray(array).reshape(-1) for array in part]


def nbytes_of(part: Part) -> int:
    return part.nbytes if isinstance(part, np.ndarray) else sum([array.nbytes for array in part])


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says of itself; compared with what the reader wants before a byte is used.

    tokens: u32le ids of [start, position). key: block key at the last full block of `position` (empty when there is none).
    parent: block key before `start`. kind of boundary and item: state segments only.
    """

    what: Literal["extent", "state", "logits"]
    namespace: bytes
    salt: bytes
    key: bytes
    parent: bytes
    start: int
    position: int
    tokens: bytes
    kind: str = ""
    item: int = -1


@runtime_checkable
class Tier(Protocol):
    """One medium. The store calls it under its lock, except for reads, which may come from any thread.

    name: reported to users; each tier of a cache has another one. extent_blocks: how many blocks the store should gather in one
    extent (1 where each block can be freed alone). stays: what read() gave is as it was while its segment is here, so that
    it need not be read again.
    """

    name: TierName
    extent_blocks: int
    stays: bool

    @property
    def budget_bytes(self) -> int: ...
    @budget_bytes.setter
    def budget_bytes(self, value: int) -> None: ...

    @property
    def used_bytes(self) -> int:
        """Sum of cost() over the segments here; 0 when empty."""
        ...

    def cost(self, header: SegmentHeader, parts: Mapping[str, int]) -> int:
        """Bytes that put() will charge for parts of these sizes, overhead included."""
        ...

    def put(self, key: bytes, header: SegmentHeader, parts: Mapping[str, Part], *, sealed: bool = True) -> int:
        """Store a copy; the caller may overwrite its buffers after return.

        All or nothing. Returns the bytes charged. Raises TierFull or TierFailed. An existing key is replaced.
        sealed False: it must not outlive the process before seal().
        """
        ...

    @property
    def unsealed(self) -> Collection[bytes]:
        """Keys that wait for seal(); none where nothing outlives the process."""
        ...

    def seal(self, keys: Iterable[bytes]) -> None:
        """Let segments outlive the process, extents before what needs them, in whatever order they are named; several at once
        cost less than each alone. Keys that are sealed or unknown are ignored. Raises TierFailed; the rest may be sealed later.
        """
        ...

    def header(self, key: bytes) -> SegmentHeader:
        """Raises SegmentBad when missing or unreadable."""
        ...

    def read(self, key: bytes, part: str) -> np.ndarray:
        """One part as uint8 [nbytes], read-only, without a copy where the medium allows it. Raises SegmentBad."""
        ...

    def read_into(self, key: bytes, part: str, out: np.ndarray, offset: int = 0) -> None:
        """Fill `out` (uint8, C-contiguous) from byte `offset` of a part. Raises SegmentBad, also when the part is too short."""
        ...

    def delete(self, key: bytes) -> int:
        """Bytes freed; 0 when there was nothing."""
        ...

    def set_aside(self, key: bytes, reason: str) -> None:
        """Remove a bad segment; a durable tier keeps it where it can be looked at. Unknown keys are ignored."""
        ...

    def sizes(self) -> dict[bytes, int]:
        """Bytes charged for each segment that is here."""
        ...

    def keys(self) -> Iterator[bytes]: ...
