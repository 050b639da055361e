"""Bringing checkpoints from the first shelf to the next, one by one. Not thread-safe: StateCache calls it under its lock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from statecache.blocks import Draft
from statecache.checkpoint import Record
from statecache.errors import SegmentBad, TierError
from statecache.residency import Residency
from statecache.shelf import Shelf
from statecache.types import Payload


@dataclass
class Copy:
    """A checkpoint on its way down. payload: views of the upper shelf's bytes, good while the record is in use."""

    record: Record
    draft: Draft
    payload: Payload


class Copies:
    """The order is Residency.waiting."""

    def __init__(self, kept: Residency) -> None:
        self._kept = kept

    def want(self, checkpoint_ids: Iterable[str]) -> None:
        """Let these be copied to the next shelf, in this order after those that wait already."""
        if len(self._kept.shelves) < 2:
            return
        for checkpoint_id in checkpoint_ids:
            if checkpoint_id in self._kept.shelves[0].holdings and not self._is_below(checkpoint_id):
                self._kept.waiting.setdefault(checkpoint_id)

    def want_all(self) -> None:
        """Everything that only the first shelf has, most recently used first."""
        upper = [self._kept.records[i] for i in self._kept.shelves[0].holdings]
        self.want(r.id for r in sorted(upper, key=lambda r: (r.used_at, r.position), reverse=True))

    def begin(self) -> Copy | None:
        """Take the next that waits and make room for it; None when none is left. Ends with end().

        Raises TierError when it has to be given up; then it does not wait any more.
        """
        while self._kept.waiting:
            record = self._kept.records.get(self._kept.waiting.popitem(last=False)[0])
            if record is None or record.id not in self._kept.shelves[0].holdings:
                continue
            upper, lower = self._kept.shelves[0], self._kept.shelves[1]
            path = upper.path(record)
            record.in_use += 1
            try:
                tail, stored = lower.stored_blocks(path, self._kept.known_block(lower, path))
                if record.id in lower.holdings and not self._lacks_logits(record, lower):
                    record.in_use -= 1
                    continue
                payload = upper.read(record, path, first_block=stored)
                lower.hold(tail)
                try:
                    self._kept.make_room(lower, lower.cost(record, path, stored, payload))
                    return Copy(record, lower.draft(record, path, tail), payload)
                finally:
                    lower.drop(tail)
            except SegmentBad as error:
                record.in_use -= 1
                self._kept.quarantine(upper, error)
            except TierError:
                record.in_use -= 1
                lower.refused += 1
                raise
        return None

    def end(self, copy: Copy, *, stored: bool) -> int:
        """stored: whether Shelf.store() succeeded. Returns bytes charged."""
        copy.record.in_use -= 1
        lower = self._kept.shelves[1]
        if not stored:
            lower.abandon(copy.draft)
            lower.refused += 1
            return 0
        return lower.adopt(copy.draft)

    def _is_below(self, checkpoint_id: str) -> bool:
        record, lower = self._kept.records[checkpoint_id], self._kept.shelves[1]
        return checkpoint_id in lower.holdings and not self._lacks_logits(record, lower)

    def _lacks_logits(self, record: Record, lower: Shelf) -> bool:
        upper = self._kept.shelves[0].holdings.get(record.id)
        return upper is not None and upper.logits_key is not None and lower.holdings[record.id].logits_key is None
