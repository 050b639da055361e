"""Bringing checkpoints from the first shelf to the next: the queue, and the steps of a copy.

A few are written one after another and then sealed together, which costs a disk less than each alone. What is not proven yet
is copied too, because a context that memory cannot hold has nowhere else to go; it is sealed when it is proven, and ends with
the process before that. Takes the store's lock where the records are touched; bytes are written without it when nobody may wait
for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

from statecache.blocks import Block, Draft
from statecache.checkpoint import Path, Record
from statecache.errors import SegmentBad, TierError, TierFailed
from statecache.residency import Residency
from statecache.shelf import Shelf
from statecache.staging import Staged, Staging
from statecache.types import BLOCK_TOKENS, Payload

log = logging.getLogger(__name__)
SEALED_TOGETHER = 8
TOGETHER_BYTES = 32 << 20
"""Checkpoints and, about, bytes: beside more of them what a seal costs is little."""


@dataclass
class Copy:
    """A checkpoint on its way down.

    draft, payload: what is written, views of the upper shelf's bytes, good while the record is in use; None when it is all
    there and only waits to be sealed. staged: what it came from when it is not in the memory tier itself.
    """

    record: Record
    draft: Draft | None = None
    payload: Payload | None = None
    staged: Staged | None = None


class Copies:
    """The order is Residency.waiting. write_behind: see StateCache."""

    def __init__(self, kept: Residency, staging: Staging, lock: threading.RLock, *, write_behind: bool) -> None:
        self._kept = kept
        self._staging = staging
        self._lock = lock
        self._write_behind = write_behind
        self._copying = threading.RLock()
        self._late: TierError | None = None
        """What went wrong with one behind others that were written; told by the next call."""

    # ── the queue ────────────────────────────────────────────────────────────────────────────────────────────────

    def want(self, checkpoint_ids: Iterable[str]) -> None:
        """Let these be copied to the next shelf, in this order after those that wait already. Called under the lock."""
        if len(self._kept.shelves) < 2:
            return
        for checkpoint_id in checkpoint_ids:
            if checkpoint_id in self._kept.shelves[0].holdings and not self._is_below(checkpoint_id):
                self._kept.waiting.setdefault(checkpoint_id)

    def want_all(self) -> None:
        """Everything that only the first shelf has, most recently used first; what is not proven would be lost there too."""
        upper = [self._kept.records[i] for i in self._kept.shelves[0].holdings]
        self.want(r.id for r in sorted(upper, key=lambda r: (r.used_at, r.position), reverse=True) if r.proven)

    def prove(self, records: Iterable[Record]) -> bool:
        """Let what lies below of these outlive the process. Whether some of that is still to be done."""
        waits = False
        for record in records:
            record.proven = True
            if self._unsealed(record):
                self._kept.waiting.setdefault(record.id)
                waits = True
        return waits

    def copy_next(self, most: int) -> int | None:
        """See StateCache.copy_next."""
        with self._copying, self._lock if not self._write_behind else nullcontext():
            late, self._late = self._late, None
            if late is not None:
                raise late
            done: list[Record] = []
            written = 0
            try:
                while len(done) < most and written < TOGETHER_BYTES:
                    with self._lock:
                        shelves = self._kept.shelves
                        copy = None if len(shelves) < 2 or shelves[-1].shrinking else self._begin()
                    if copy is None:
                        break
                    written += self._write(copy)
                    done.append(copy.record)
            except TierError as error:
                if not done:
                    raise
                self._late = error
            finally:
                self._seal(done)
            return written if done else None

    def write_back(self, max_bytes: int) -> int:
        """See StateCache.write_back."""
        written = 0
        while written < max_bytes:
            try:
                count = self.copy_next(SEALED_TOGETHER)
            except TierError as error:
                log.info("checkpoint not copied reason=%s", error)
                if isinstance(error, TierFailed):
                    break
                continue
            if count is None:
                break
            written += count
        return written

    # ── one copy ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> Copy | None:
        """Take the next that waits and make room for it; None when none is left. Ends with _end().

        Raises TierError when it has to be given up; then it does not wait any more.
        """
        upper, lower = self._kept.shelves[:2]
        while self._kept.waiting:
            checkpoint_id = self._kept.waiting.popitem(last=False)[0]
            staged = self._staging.items.get(checkpoint_id)
            if staged is not None:
                return self._begin_staged(staged)
            record = self._kept.records.get(checkpoint_id)
            if record is None or record.spoiled:
                continue
            if record.id in lower.holdings and not self._lacks_logits(record, lower):
                if self._unsealed(record):
                    return Copy(record)
                continue
            if record.id not in upper.holdings:
                continue
            path = upper.path(record)
            record.in_use += 1
            try:
                tail, stored = lower.stored_blocks(path, self._kept.known_block(lower, path))
                payload = upper.read(record, path, first_block=stored)
                return Copy(record, self._draft(record, path, tail, stored, payload), payload)
            except SegmentBad as error:
                record.in_use -= 1
                self._kept.quarantine(upper, error, record)
            except TierError:
                record.in_use -= 1
                lower.refused += 1
                raise
        return None

    def _begin_staged(self, staged: Staged) -> Copy:
        """Raises TierError when what it builds on is not there, or there is no room."""
        lower, record, path = self._kept.shelves[1], staged.record, staged.path
        try:
            tail, stored = lower.stored_blocks(path, self._kept.known_block(lower, path))
            if staged.start > stored * BLOCK_TOKENS:
                raise TierError(f"what lies before token {staged.start} was not written, or is gone")
            payload = self._staging.payload(staged)
            draft = self._draft(record, path, tail, stored, payload)
        except TierError:
            lower.refused += 1
            self._staging.drop(record.id)
            raise
        self._staging.let_go(staged)
        return Copy(record, draft, payload, staged)

    def _draft(self, record: Record, path: Path, tail: Block | None, stored: int, payload: Payload) -> Draft:
        """Make room below for what is missing there behind `tail`."""
        lower = self._kept.shelves[1]
        lower.hold(tail)
        try:
            self._kept.make_room(lower, lower.cost(record, path, stored, payload))
            return lower.draft(record, path, tail)
        finally:
            lower.drop(tail)

    def _write(self, copy: Copy) -> int:
        """Bytes charged; it can be read below then, and waits to be sealed. Raises TierError: it is not wanted any more, unless
        the tier failed and will be tried again."""
        if copy.draft is None or copy.payload is None:
            return 0
        written, again = False, False
        try:
            self._kept.shelves[1].store(copy.draft, copy.payload)
            written = True
        except TierFailed:
            again = True
            raise
        finally:
            with self._lock:
                count = self._written(copy, copy.draft, written=written, again=again)
        return count

    def _written(self, copy: Copy, draft: Draft, *, written: bool, again: bool) -> int:
        """again: if it was not written, it waits at the head of the queue. Returns bytes charged."""
        lower, record, staged, count = self._kept.shelves[1], copy.record, copy.staged, 0
        if staged is None:
            record.in_use -= 1
        elif staged is not self._staging.items.get(record.id):
            written = again = False  # it was given up in the meantime
        if written:
            count = lower.adopt(draft)
            if staged is not None:
                self._kept.commit(record, staged.path)
                for session in staged.sessions:
                    self._kept.join(record, session)
                self._staging.drop(record.id)
        else:
            lower.abandon(draft)
            lower.refused += 1
            if again:
                self._wait_first(record)
            elif staged is not None:
                self._staging.drop(record.id)
        self._kept.go_if_spoiled(record)
        return count

    def _seal(self, records: list[Record]) -> None:
        """Let what was written of these outlive the process, as far as it is proven. Raises TierFailed; then it waits for that.

        A segment may go while it is sealed, so nothing is held for it.
        """
        if not records:
            return
        lower, sealed = self._kept.shelves[1], False
        with self._lock:
            # What outlives the process must not build on what does not, so their blocks are among them.
            keys = [key for record in records for key in self._unsealed(record)]
        try:
            lower.seal(keys)
            sealed = True
        finally:
            with self._lock:
                for record in reversed(records):
                    if self._unsealed(record):
                        if sealed:  # it was proven meanwhile
                            self._kept.waiting.setdefault(record.id)
                        else:
                            self._wait_first(record)
                    for session in record.sessions:
                        self._kept.tell(record, session)

    def _unsealed(self, record: Record) -> list[bytes]:
        """What is to be sealed of one."""
        lower = self._kept.shelves[-1]
        return lower.unsealed(record) if record.proven and record.id in lower.holdings else []

    def _wait_first(self, record: Record) -> None:
        self._kept.waiting[record.id] = None
        self._kept.waiting.move_to_end(record.id, last=False)

    def _is_below(self, checkpoint_id: str) -> bool:
        record, lower = self._kept.records[checkpoint_id], self._kept.shelves[1]
        return checkpoint_id in lower.holdings and not self._lacks_logits(record, lower)

    def _lacks_logits(self, record: Record, lower: Shelf) -> bool:
        upper = self._kept.shelves[0].holdings.get(record.id)
        return upper is not None and upper.logits_key is not None and lower.holdings[record.id].logits_key is None
