"""A tier that fails on demand, and hands to damage what is stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from statecache.errors import SegmentBad, TierFailed
from statecache.tiers.ram import RamTier


class FaultyTier(RamTier):
    """fail_put_at: number of the put (from 1, counted from now) that fails. fail_reads: every read of bytes fails."""

    def __init__(self, budget_bytes: int = 1 << 20, **kwargs) -> None:
        super().__init__(budget_bytes, **kwargs)
        self.fail_put_at = 0
        self.fail_reads = False

    def put(self, key, header, parts, *, sealed=True):
        if self.fail_put_at:
            self.fail_put_at -= 1
            if self.fail_put_at == 0:
                raise TierFailed(f"tier {self.name}: no write")
        return super().put(key, header, parts, sealed=sealed)

    def read(self, key, part):
        if self.fail_reads:
            raise SegmentBad(self.name, key, "read error")
        return super().read(key, part)

    def all_keys(self, what: str) -> list[bytes]:
        """Keys of one kind of segment, by rising position."""
        found = [(header.position, key) for key, (header, *_) in self._segments.items() if header.what == what]
        return [key for _, key in sorted(found)]

    def change_header(self, key: bytes, **fields) -> None:
        header, *rest = self._segments[key]
        self._segments[key] = (replace(header, **fields), *rest)

    def change_part(self, key: bytes, name: str, data: np.ndarray | None) -> None:
        parts = self._segments[key][1]
        if data is None:
            del parts[name]
        else:
            parts[name] = data

    def swap(self, a: bytes, b: bytes) -> None:
        """Each segment under the other's key, as a torn or aged directory would have it."""
        segments = self._segments
        segments[a], segments[b] = segments[b], segments[a]

    def lose(self, key: bytes) -> None:
        """The bytes are gone and nobody was told."""
        cost = self._segments.pop(key)[3]
        self._used -= cost
