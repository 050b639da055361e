"""Keeping new checkpoints: which tier takes one, what is already there, what is refused. store.py says what callers may expect.

Called with the store's lock held or free; it takes it itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from statecache.blocks import Growing
from statecache.checkpoint import Path, PutResult, Record, validate
from statecache.copies import Copies
from statecache.errors import Collision, PayloadMismatch, TierError
from statecache.headers import extent_header
from statecache.index.base import Index, Walk
from statecache.keys import KEY_BYTES, Hash128, KeyChain, token_bytes
from statecache.lookup import Lookup
from statecache.moves import Moves
from statecache.policy import better_kind
from statecache.residency import DEVICE, Residency
from statecache.shelf import Shelf
from statecache.staging import Staged, Staging
from statecache.types import BLOCK_TOKENS, Boundary, Payload

log = logging.getLogger(__name__)
SPOILED = "one of this position was computed wrong and is still being read"


class Placing:
    """collisions: keys that named two paths. moves: set once there are an engine's pools. waiting(): see on_waiting there."""

    def __init__(
        self,
        namespace: bytes,
        index: Index,
        kept: Residency,
        staging: Staging,
        copies: Copies,
        lookup: Lookup,
        clock: Callable[[], float],
        hash128: Hash128,
        lock: threading.RLock,
        *,
        write_behind: bool,
        waiting: Callable[[], None],
    ) -> None:
        self._namespace = namespace
        self._index = index
        self._kept = kept
        self._staging = staging
        self._copies = copies
        self._lookup = lookup
        self._clock = clock
        self._hash128 = hash128
        self._lock = lock
        self._write_behind = write_behind
        self.moves: Moves | None = None
        self.collisions = 0
        self._waiting = waiting
        self._last: Path | None = None

    def kv_missing_from(self, tokens: np.ndarray, salt: bytes, position: int) -> int:
        """See StateCache.kv_missing_from."""
        ids = token_bytes(tokens)[: 4 * position]
        with self._lock:
            try:
                path, shelf = self._path(salt, ids, self._index.walk(salt, ids)), self._kept.target(position)
                if self._passes_memory(position):
                    return self._staging.missing_from(path)
                _, blocks = shelf.stored_blocks(path, self._kept.known_block(shelf, path))
            except Collision:
                return 0
        return blocks * BLOCK_TOKENS

    def put(
        self,
        tokens: np.ndarray,
        salt: bytes,
        boundary: Boundary,
        payload: Payload,
        *,
        session: str = "",
        proven: bool = True,
    ) -> PutResult:
        """See StateCache.put."""
        position = boundary.position
        ids = token_bytes(tokens)
        if not 1 <= position <= len(ids) // 4:
            raise PayloadMismatch(f"checkpoint at {position} of a context of {len(ids) // 4} tokens")
        validate(payload, position, self._kept.shelves[0].layout)
        ids = ids[: 4 * position]
        with self._lock:
            walk = self._index.walk(salt, ids)
            path = self._path(salt, ids, walk)
            mark = walk.at(position)
            checkpoint_id = self.id_of(path) if mark is None else mark
            if mark is None and self._index.knows(checkpoint_id):
                self.collisions += 1
                return PutResult(None, 0, False, "the checkpoint's id names another path")
            record = self._kept.records.get(checkpoint_id)
            if record is not None and record.spoiled:
                return PutResult(None, 0, False, SPOILED)
            if self._passes_memory(position):
                staged = self._staging.items.get(checkpoint_id)
                if record is None:
                    record = self._record(checkpoint_id, path, boundary, proven) if staged is None else staged.record
                return self._stage(record, staged, path, boundary, payload, session)
            shelf = self._kept.target(position)
            there = self._kept.shelf_of(record) if record is not None else None
            if record is not None and there is not None and self._kept.is_as_fast(there, shelf):
                return self._refresh(record, there, path, boundary, payload, session)
            known = record is not None
            if record is None:
                record = self._record(checkpoint_id, path, boundary, proven)
            record.in_use += 1  # one that lies on a lower tier must not leave it while room is made above
            try:
                written = self._kept.write(shelf, record, path, payload)
            except TierError as error:
                return PutResult(None, 0, False, self._refused(shelf, position, error))
            finally:
                record.in_use -= 1
            self._kept.commit(record, path)
            record.fresh = record.fresh or not known
            record.kind = better_kind(record.kind, boundary.kind)
            record.used_at = self._clock()
            self._kept.join(record, session)
            return PutResult(checkpoint_id, written, known, tier=shelf.tier.name)

    def grow(self, tokens: np.ndarray, salt: bytes, position: int) -> Growing | None:
        """Begin to place a checkpoint's blocks one by one, behind those that are there; put() finds them. None: it is too large
        for the first tier, or that takes none alone, and put() needs all rows at once. Ends with shrink()."""
        ids = token_bytes(tokens)[: 4 * position]
        with self._lock:
            shelf = self._kept.target(position)
            if shelf.tier.extent_blocks != 1 or shelf is not self._kept.shelves[0] or self._passes_memory(position):
                return None
            path = self._path(salt, ids, self._index.walk(salt, ids))
            try:
                tail, _ = shelf.stored_blocks(path, self._kept.known_block(shelf, path))
            except Collision:
                return None  # put() says so
            shelf.hold(tail)
            return Growing(path, shelf, tail)

    def add_rows(self, growing: Growing, blocks: Sequence[np.ndarray]) -> str:
        """The next blocks' rows, each an array of its own. Why they were refused, if they were."""
        shelf = growing.shelf
        with self._lock:
            index = growing.tokens // BLOCK_TOKENS
            header = extent_header(growing.path, index, index + 1)
            try:
                self._kept.make_room(shelf, sum(shelf.tier.cost(header, {"kv": rows.nbytes}) for rows in blocks))
                for rows in blocks:
                    growing.tail = shelf.append(growing.path, growing.tail, rows)
            except TierError as error:
                return self._refused(shelf, growing.path.position, error)
        return ""

    def put_grown(self, growing: Growing, record: Record, payload: Payload) -> PutResult:
        """put() of a checkpoint whose full blocks have all come: nothing is looked up again. To be copied is not to be used."""
        shelf, path = growing.shelf, growing.path
        assert growing.tokens == path.blocks * BLOCK_TOKENS
        validate(payload, record.position, shelf.layout)
        with self._lock:
            if record.spoiled:
                return PutResult(None, 0, False, SPOILED)
            if record.id in shelf.holdings:
                return PutResult(record.id, self._add_logits(record, shelf, path, payload), True, tier=shelf.tier.name)
            record.in_use += 1
            try:
                written = self._kept.write_after(shelf, record, path, payload, growing.tail)
            except TierError as error:
                return PutResult(None, 0, False, self._refused(shelf, path.position, error))
            finally:
                record.in_use -= 1
            return PutResult(record.id, written, True, tier=shelf.tier.name)

    def _refused(self, shelf: Shelf, position: int, error: TierError) -> str:
        shelf.refused += 1
        self.collisions += isinstance(error, Collision)
        log.info("checkpoint refused position=%d tier=%s reason=%s", position, shelf.tier.name, error)
        return str(error)

    def shrink(self, growing: Growing) -> None:
        """Forget what no checkpoint needs of it."""
        with self._lock:
            tail, growing.tail = growing.tail, None
            growing.shelf.drop(tail)

    def admit(
        self,
        tokens: np.ndarray,
        salt: bytes,
        boundary: Boundary,
        hold: int,
        *,
        logits: bool,
        session: str = "",
        stays: bool = True,
        proven: bool = True,
    ) -> PutResult:
        """See StateCache.admit."""
        position = boundary.position
        ids = token_bytes(tokens)[: 4 * position]
        if self._kept.device is None or self.moves is None:
            raise RuntimeError("admit() before attach()")
        with self._lock:
            walk = self._index.walk(salt, ids)
            path, mark = self._path(salt, ids, walk), walk.at(position)
            checkpoint_id = self.id_of(path) if mark is None else mark
            if mark is None and self._index.knows(checkpoint_id):
                self.collisions += 1
                self._kept.device.pools.release(hold)
                return PutResult(None, 0, False, "the checkpoint's id names another path")
            marks = walk.marks(position)
            known_tokens = next((p for p, known in marks if known in self._kept.records and known != checkpoint_id), 0)
            record = self._kept.records.get(checkpoint_id)
            existed = record is not None
            if record is not None and record.spoiled:
                self._kept.device.pools.release(hold)
                return PutResult(None, 0, False, SPOILED)
            if record is None:
                staged = self._staging.items.get(checkpoint_id)
                record = self._record(checkpoint_id, path, boundary, proven) if staged is None else staged.record
                if mark is None:
                    self._index.add(salt, ids, path.keys, checkpoint_id)
            self._kept.device.add(record, hold, logits=logits)
            self._kept.commit(record, path)
            record.kind = better_kind(record.kind, boundary.kind)
            record.used_at = self._clock()
            record.fresh = record.fresh or not existed
            self._kept.join(record, session)
            if stays:
                return PutResult(checkpoint_id, 0, existed, tier=DEVICE, known_tokens=known_tokens)
            result = self.moves.out(record)
            return replace(result, existed=existed, known_tokens=known_tokens)

    def put_prefetched(self, tokens: np.ndarray, salt: bytes, boundary: Boundary, payload: Payload) -> bool:
        """See StateCache.put_prefetched."""
        with self._lock:
            with self._lookup.peek(tokens[: boundary.position], salt) as match:
                record = match.record
            if record is None or record.position != boundary.position or self._kept.shelf_of(record) is self._kept.shelves[0]:
                return False
            used_at = record.used_at
            self.put(tokens, salt, boundary, payload)
            record.used_at = used_at
            if self._kept.shelf_of(record) is not self._kept.shelves[0]:
                return False
            record.prefetched = True
            self._kept.prefetched += 1
            return True

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, salt: bytes, ids: bytes, walk: Walk) -> Path:
        last = self._last
        if last is not None and last.ids == ids and last.salt == salt:  # one copy asks for the same path several times
            return last
        known = walk.keys()
        chain = KeyChain(self._namespace, salt, known=known, hash128=self._hash128)
        chain.extend(ids[len(known) // KEY_BYTES * 4 * BLOCK_TOKENS :])
        self._last = Path(self._namespace, salt, ids, chain.joined)
        return self._last

    def id_of(self, path: Path) -> str:
        """The same in every process: digest of the last full block's key, the position and the ids behind that block."""
        before = path.key(path.blocks - 1) or path.namespace + path.salt
        return self._hash128(before + path.position.to_bytes(8, "little") + path.tail_ids).hex()

    def _record(self, checkpoint_id: str, path: Path, boundary: Boundary, proven: bool) -> Record:
        position, kind, item = path.position, boundary.kind, boundary.item
        now = self._clock()
        return Record(checkpoint_id, path.namespace, path.salt, position, kind, item, path.tail_ids, now, proven=proven)

    def _passes_memory(self, position: int) -> bool:
        return self._write_behind and self._staging.passes(position)

    def _stage(
        self, record: Record, staged: Staged | None, path: Path, boundary: Boundary, payload: Payload, session: str
    ) -> PutResult:
        """Put of what is too large for the memory tier: the writer will bring it to the one below."""
        name, checkpoint_id = self._kept.shelves[1].tier.name, record.id
        if self._kept.shelf_of(record) is not None:
            record.kind = better_kind(record.kind, boundary.kind)
            record.used_at = self._clock()
            self._kept.join(record, session)
            self._copies.want([checkpoint_id])
            return PutResult(checkpoint_id, 0, True, tier=name)
        if staged is not None:
            self._staging.again(staged, boundary.kind, session)
            return PutResult(checkpoint_id, 0, True, tier=name)
        try:
            written = self._staging.put(record, path, payload, session)
        except TierError as error:
            self._kept.shelves[0].refused += 1
            log.info("checkpoint refused position=%d tier=%s reason=%s", path.position, name, error)
            return PutResult(None, 0, False, str(error))
        self._waiting()
        return PutResult(checkpoint_id, written, False, tier=name)

    def _refresh(
        self, record: Record, shelf: Shelf, path: Path, boundary: Boundary, payload: Payload, session: str
    ) -> PutResult:
        """Put of what is there already: at most its logits are new."""
        record.kind = better_kind(record.kind, boundary.kind)
        record.used_at = self._clock()
        self._kept.join(record, session)
        return PutResult(record.id, self._add_logits(record, shelf, path, payload), True, tier=shelf.tier.name)

    def _add_logits(self, record: Record, shelf: Shelf, path: Path, payload: Payload) -> int:
        """To what is on the shelf, if it has none; bytes charged."""
        written = 0
        if payload.logits is not None and shelf.holdings[record.id].logits_key is None:
            record.in_use += 1
            try:
                self._kept.make_room(shelf, shelf.logits_cost(record, path, payload.logits))
                written = shelf.write_logits(record, path, payload.logits)
            except TierError as error:
                log.info("logits not kept position=%d tier=%s reason=%s", record.position, shelf.tier.name, error)
            finally:
                record.in_use -= 1
        return written
