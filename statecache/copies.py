"""Bringing checkpoints from the first shelf to the next, one by one. Not thread-safe: StateCache calls it under its lock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from statecache.blocks import Draft
from statecache.checkpoint import Record
from statecache.errors import SegmentBad, TierError
from statecache.residency import Residency
from statecache.shelf import Shelf
from statecache.staging import Staged, Staging
from statecache.types import BLOCK_TOKENS, Payload


@dataclass
class Copy:
    """A checkpoint on its way down. payload: views of the upper shelf's bytes, good while the record is in use.

    staged: what it came from when it is not in the memory tier itself.
    """

    record: Record
    draft: Draft
    payload: Payload
    staged: Staged | None = None


class Copies:
    """The order is Residency.waiting."""

    def __init__(self, kept: Residency, staging: Staging) -> None:
        self._kept = kept
        self._staging = staging

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
            checkpoint_id = self._kept.waiting.popitem(last=False)[0]
            staged = self._staging.items.get(checkpoint_id)
            if staged is not None:
                return self._begin_staged(staged)
            record = self._kept.records.get(checkpoint_id)
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

    def end(self, copy: Copy, *, stored: bool, again: bool = False) -> int:
        """stored: whether Shelf.store() succeeded; if not, again: it waits at the head of the queue. Returns bytes charged."""
        lower, record, staged = self._kept.shelves[1], copy.record, copy.staged
        if staged is None:
            record.in_use -= 1
        elif staged is not self._staging.items.get(record.id):
            stored = again = False  # it was given up in the meantime
        if not stored:
            lower.abandon(copy.draft)
            lower.refused += 1
            if again:
                self._kept.waiting[record.id] = None
                self._kept.waiting.move_to_end(record.id, last=False)
            elif staged is not None:
                self._staging.drop(record.id)
            return 0
        written = lower.adopt(copy.draft)
        if staged is not None:
            self._kept.commit(record, staged.path)
            for session in staged.sessions:
                self._kept.join(record, session)
            self._staging.drop(record.id)
        for session in record.sessions:
            self._kept.tell(record, session)
        return written

    def _begin_staged(self, staged: Staged) -> Copy:
        """Raises TierError when what it builds on is not there, or there is no room."""
        lower, record, path = self._kept.shelves[1], staged.record, staged.path
        try:
            tail, stored = lower.stored_blocks(path, self._kept.known_block(lower, path))
            if staged.start > stored * BLOCK_TOKENS:
                raise TierError(f"what lies before token {staged.start} was not written, or is gone")
            payload = self._staging.payload(staged)
            lower.hold(tail)
            try:
                self._kept.make_room(lower, lower.cost(record, path, stored, payload))
                draft = lower.draft(record, path, tail)
            finally:
                lower.drop(tail)
        except TierError:
            lower.refused += 1
            self._staging.drop(record.id)
            raise
        self._staging.let_go(staged)
        return Copy(record, draft, payload, staged)

    def _is_below(self, checkpoint_id: str) -> bool:
        record, lower = self._kept.records[checkpoint_id], self._kept.shelves[1]
        return checkpoint_id in lower.holdings and not self._lacks_logits(record, lower)

    def _lacks_logits(self, record: Record, lower: Shelf) -> bool:
        upper = self._kept.shelves[0].holdings.get(record.id)
        return upper is not None and upper.logits_key is not None and lower.holdings[record.id].logits_key is None
