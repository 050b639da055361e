"""Host memory. Reads give views of what is stored, so a restore copies once, straight to where the state is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import xxhash

from statecache.errors import SegmentBad, TierFull
from statecache.tiers.base import Part, SegmentHeader, Take, nbytes_of, ordinary
from statecache.types import TierName

OVERHEAD_BYTES = 512
"""Charged per segment for the objects around its bytes, so that many tiny segments cannot outgrow the budget unseen."""


class RamTier:
    """Segments in process memory. A part that is read-only and has its memory to itself is kept as it is, others are copied.

    take: memory for what is copied. checksums: compute xxh3_64 per part when it is stored and compare it at every read. Off by
    default: a read costs no pass over the bytes then, and ordinary memory is as trustworthy as the pages the state is used
    from.
    """

    extent_blocks = 1

    def __init__(self, budget_bytes: int, *, name: TierName = "ram", checksums: bool = False, take: Take = ordinary) -> None:
        self.name: TierName = name
        self._budget = budget_bytes
        self._used = 0
        self._checksums = checksums
        self.stays = not checksums
        self._take = take
        self._segments: dict[bytes, tuple[SegmentHeader, dict[str, np.ndarray], dict[str, int], int]] = {}

    @property
    def budget_bytes(self) -> int:
        return self._budget

    @budget_bytes.setter
    def budget_bytes(self, value: int) -> None:
        """A smaller budget takes effect at the next eviction."""
        self._budget = value

    @property
    def used_bytes(self) -> int:
        return self._used

    def cost(self, header: SegmentHeader, parts: Mapping[str, int]) -> int:
        return OVERHEAD_BYTES + len(header.tokens) + sum(parts.values())

    @property
    def unsealed(self) -> Collection[bytes]:
        return ()

    def seal(self, keys: Iterable[bytes]) -> None:
        """Nothing here outlives the process."""

    def put(self, key: bytes, header: SegmentHeader, parts: Mapping[str, Part], *, sealed: bool = True) -> int:
        sizes = {name: nbytes_of(part) for name, part in parts.items()}
        cost = self.cost(header, sizes)
        old = self._segments.get(key)
        free = self._budget - self._used + (old[3] if old else 0)
        if cost > free:
            raise TierFull(self.name, cost, free)
        copies: dict[str, np.ndarray] = {}
        for name, part in parts.items():
            if isinstance(part, np.ndarray) and _is_ours(part):
                copies[name] = part.reshape(-1)
                continue
            copy, at = self._take(sizes[name]), 0
            for array in (part,) if isinstance(part, np.ndarray) else part:
                copy[at : at + array.nbytes].reshape(array.shape)[...] = array
                at += array.nbytes
            copy.flags.writeable = False
            copies[name] = copy
        sums = {name: xxhash.xxh3_64_intdigest(a.data) for name, a in copies.items()} if self._checksums else {}
        self.delete(key)
        self._segments[key] = (header, copies, sums, cost)
        self._used += cost
        return cost

    def header(self, key: bytes) -> SegmentHeader:
        return self._get(key)[0]

    def read(self, key: bytes, part: str) -> np.ndarray:
        _, parts, sums, _ = self._get(key)
        array = parts.get(part)
        if array is None:
            raise SegmentBad(self.name, key, f"no part {part!r}")
        if self._checksums and xxhash.xxh3_64_intdigest(array.data) != sums[part]:
            raise SegmentBad(self.name, key, f"checksum of part {part!r} differs")
        return array

    def read_into(self, key: bytes, part: str, out: np.ndarray, offset: int = 0) -> None:
        array = self.read(key, part)
        want = out.nbytes
        if array.nbytes < offset + want:
            raise SegmentBad(self.name, key, f"part {part!r} has {array.nbytes} bytes, need {offset + want}")
        np.copyto(out.reshape(-1), array[offset : offset + want])

    def delete(self, key: bytes) -> int:
        gone = self._segments.pop(key, None)
        if gone is None:
            return 0
        self._used -= gone[3]
        return gone[3]

    def set_aside(self, key: bytes, reason: str) -> None:
        self.delete(key)

    def sizes(self) -> dict[bytes, int]:
        return {key: segment[3] for key, segment in self._segments.items()}

    def keys(self) -> Iterator[bytes]:
        return iter(list(self._segments))

    def _get(self, key: bytes) -> tuple[SegmentHeader, dict[str, np.ndarray], dict[str, int], int]:
        try:
            return self._segments[key]
        except KeyError:
            raise SegmentBad(self.name, key, "missing") from None


def _is_ours(array: np.ndarray) -> bool:
    """Whether it can be kept without a copy: nobody may write to it, and it does not keep other bytes alive."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    plain = array.dtype == np.uint8 and array.flags.c_contiguous
    return plain and root.nbytes == array.nbytes and not (root.flags.writeable or array.flags.writeable)
