"""StateCache: match, read, put, evict. The one place that decides; bytes are in shelf.py and tiers/, worth in eviction.py.

Threads: every method may be called from any thread; one lock guards the records. `Match.read` copies outside of it, safe
because a matched record is in use and segments never change. put() holds the lock while it copies, so a match waits for at
most one checkpoint's copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from statecache.checkpoint import CacheStats, CheckpointInfo, PutResult, Record, TierStats
from statecache.errors import PayloadMismatch, SegmentBad, TierError, TierFull
from statecache.eviction import Candidate, eviction_order
from statecache.index.base import Index, Walk
from statecache.keys import KEY_BYTES, Hash128, KeyChain, token_bytes, xxh3_128
from statecache.policy import Policy, better_kind
from statecache.shelf import Collision, Path, Shelf
from statecache.tiers.base import Tier
from statecache.types import BLOCK_TOKENS, Boundary, BoundaryKind, Divergence, Layout, Payload, TierName

log = logging.getLogger(__name__)


class Match:
    """The longest usable checkpoint of a context, pinned until release(). A context manager.

    position 0: nothing was found (checkpoint_id, kind and tier are None). read() may lower `position` and replace the other
    fields when the checkpoint turns out bad. Use one Match from one thread.
    """

    def __init__(self, cache: StateCache, ids: bytes, salt: bytes, session: str, divergence: Divergence) -> None:
        self._cache = cache
        self._ids = ids
        self._salt = salt
        self._session = session
        self._record: Record | None = None
        self.divergence = divergence
        self.position = 0
        self.checkpoint_id: str | None = None
        self.kind: BoundaryKind | None = None
        self.tier: TierName | None = None
        self.nbytes = 0
        """Bytes that read() will deliver; what a restore costs."""

    def read(self, kv_out: np.ndarray | None = None) -> Payload:
        """The checkpoint's bytes, verified. Arrays are read-only and valid after release().

        kv_out: uint8 [≥ position, kv_token_bytes] to read the KV rows into; the payload then has one run, a view of it. Without
        it there is one run per stored extent. A bad component quarantines the checkpoint and the next shorter one is read
        instead; when none is left the payload is empty at position 0. So look at `payload.position`.
        """
        return self._cache._read(self, kv_out)

    def release(self) -> None:
        """Unpin. Does nothing the second time."""
        self._cache._release(self)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class StateCache:
    """Checkpoints of one namespace over an ordered list of tiers, fastest first.

    New checkpoints go to the first tier; what is evicted from a tier moves to the next one, out of the last one it is gone.
    index: must be empty. clock: seconds, only differences matter. hash128: for tests of collisions.
    """

    def __init__(
        self,
        namespace: bytes,
        layout: Layout,
        *,
        tiers: Sequence[Tier],
        index: Index,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        hash128: Hash128 = xxh3_128,
    ) -> None:
        if not tiers:
            raise ValueError("a state cache needs at least one tier")
        self.namespace = namespace
        self.layout = layout
        self.policy = policy or Policy()
        self._shelves = [Shelf(tier, layout) for tier in tiers]
        self._index = index
        self._clock = clock
        self._hash128 = hash128
        self._lock = threading.RLock()
        self._records: dict[str, Record] = {}
        self._sessions: dict[str, dict[str, None]] = {}
        self._evicted: OrderedDict[str, None] = OrderedDict()  # marks left in the index to explain misses, oldest first
        self._matches = self._misses = self._matched_tokens = self._asked_tokens = self._collisions = 0

    # ── match ────────────────────────────────────────────────────────────────────────────────────────────────────

    def match(self, tokens: np.ndarray, salt: bytes, *, limit: int | None = None, session: str = "") -> Match:
        """The longest committed checkpoint that is a prefix of `tokens`, pinned in the same step.

        limit: deepest position allowed. The whole context counts only when its logits were saved, else at most n − 1.
        session: is listed as a user of the checkpoint; never part of the match.
        """
        ids = token_bytes(tokens)
        count = len(ids) // 4
        with self._lock:
            walk = self._index.walk(salt, ids)
            record, evicted_at = self._deepest(walk, count, count if limit is None else limit)
            match = Match(self, ids, salt, session, self._divergence(walk, ids, salt, record, evicted_at))
            self._matches += 1
            self._asked_tokens += count
            if record is None:
                self._misses += 1
            else:
                self._attach(match, record)
                self._matched_tokens += record.position
            return match

    def kv_missing_from(self, tokens: np.ndarray, salt: bytes, position: int) -> int:
        """First token, block aligned and ≤ position, whose KV rows a put() at `position` must bring along."""
        ids = token_bytes(tokens)[: 4 * position]
        with self._lock:
            try:
                _, blocks = self._shelves[0].stored_blocks(self._path(salt, ids, self._index.walk(salt, ids)))
            except Collision:
                return 0
        return blocks * BLOCK_TOKENS

    # ── put ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, tokens: np.ndarray, salt: bytes, boundary: Boundary, payload: Payload, *, session: str = "") -> PutResult:
        """Keep the state after tokens[: boundary.position]. The caller may reuse its buffers after return.

        payload.kv: contiguous runs ending at the position and starting at or before kv_missing_from(). Nothing is visible
        before all of it is written. Not kept (checkpoint_id None) when the tier has no room even after eviction, a write
        fails, or the rows begin too late because blocks were evicted in between. Raises PayloadMismatch when components do
        not fit.
        """
        position = boundary.position
        ids = token_bytes(tokens)
        if not 1 <= position <= len(ids) // 4:
            raise PayloadMismatch(f"checkpoint at {position} of a context of {len(ids) // 4} tokens")
        self._validate(payload, position)
        ids = ids[: 4 * position]
        with self._lock:
            walk = self._index.walk(salt, ids)
            path = self._path(salt, ids, walk)
            tail_key = path.key(path.blocks - 1)
            mark = walk.at(position)
            checkpoint_id = self._id(tail_key, salt, position, ids) if mark is None else mark
            if mark is None and self._index.knows(checkpoint_id):
                self._collisions += 1
                return PutResult(None, 0, False, "the checkpoint's id names another path")
            record = self._records.get(checkpoint_id)
            shelf = self._shelves[0]
            if record is not None and record.id in shelf.holdings:
                return self._refresh(record, shelf, path, boundary, payload, session)
            known = record is not None
            if record is None:
                record = Record(
                    checkpoint_id,
                    salt,
                    position,
                    boundary.kind,
                    boundary.item,
                    tail_key,
                    ids[256 * path.blocks :],
                    self._clock(),
                )
            try:
                written = self._write(shelf, record, path, payload)
            except TierError as error:
                shelf.refused += 1
                self._collisions += isinstance(error, Collision)
                log.info("checkpoint refused position=%d tier=%s reason=%s", position, shelf.tier.name, error)
                return PutResult(None, 0, False, str(error))
            if not known:
                if mark is None:
                    self._index.add(salt, ids, path.keys, checkpoint_id)
                self._records[checkpoint_id] = record
                self._evicted.pop(checkpoint_id, None)
            record.kind = better_kind(record.kind, boundary.kind)
            record.used_at = self._clock()
            self._join(record, session)
            return PutResult(checkpoint_id, written, known)

    # ── lists, pins ──────────────────────────────────────────────────────────────────────────────────────────────

    def checkpoints(self, session: str | None = None) -> list[CheckpointInfo]:
        """What a session placed or used (None: everything), by rising position."""
        with self._lock:
            ids = list(self._records) if session is None else list(self._sessions.get(session, ()))
            now = self._clock()
            infos: list[CheckpointInfo] = []
            for record in sorted((self._records[i] for i in ids), key=lambda r: (r.position, r.id)):
                shelf = self._shelf_of(record)
                assert shelf is not None
                infos.append(
                    CheckpointInfo(
                        record.id,
                        record.position,
                        record.kind,
                        shelf.tier.name,
                        shelf.restored_bytes(record),
                        shelf.exclusive_bytes(record),
                        record.hits,
                        max(0.0, now - record.used_at),
                        bool(record.pins),
                    )
                )
            return infos

    def forget(self, session: str) -> None:
        """Drop a session's pins and its list; its checkpoints stay for others until evicted. Unknown sessions are ignored."""
        with self._lock:
            for checkpoint_id in self._sessions.pop(session, ()):
                record = self._records[checkpoint_id]
                record.sessions.discard(session)
                record.pins.discard(session)

    def pin(self, checkpoint_id: str, session: str = "") -> bool:
        """Protect from eviction until unpin() by the same session. False when there is no such checkpoint."""
        with self._lock:
            record = self._records.get(checkpoint_id)
            if record is None:
                return False
            record.pins.add(session)
            self._join(record, session)
            return True

    def unpin(self, checkpoint_id: str, session: str = "") -> bool:
        """False when it was not pinned by this session."""
        with self._lock:
            record = self._records.get(checkpoint_id)
            if record is None or session not in record.pins:
                return False
            record.pins.discard(session)
            return True

    def stats(self) -> CacheStats:
        with self._lock:
            tiers: dict[TierName, TierStats] = {}
            for shelf in self._shelves:
                tiers[shelf.tier.name] = TierStats(
                    used_bytes=shelf.tier.used_bytes,
                    budget_bytes=shelf.tier.budget_bytes,
                    checkpoints=len(shelf.holdings),
                    blocks=len(shelf.blocks),
                    evictions=shelf.evictions,
                    hits=shelf.hits,
                    written_bytes=shelf.written_bytes,
                    refused=shelf.refused,
                    quarantined=shelf.quarantined,
                )
            return CacheStats(
                tiers,
                len(self._records),
                self._matches,
                self._misses,
                self._matched_tokens,
                self._asked_tokens,
                self._collisions,
                self._index.tokens,
                len(self._index),
            )

    def evict(self, checkpoint_id: str) -> bool:
        """Remove a checkpoint from every tier now. False when unknown, pinned or in use."""
        with self._lock:
            record = self._records.get(checkpoint_id)
            if record is None or record.in_use or record.pins:
                return False
            for shelf in self._shelves:
                if record.id in shelf.holdings:
                    shelf.remove(record)
                    shelf.evictions += 1
            self._gone(record, remember=True)
            return True

    # ── matching, inside ─────────────────────────────────────────────────────────────────────────────────────────

    def _deepest(self, walk: Walk, count: int, limit: int) -> tuple[Record | None, int]:
        """(record, position of the deepest evicted checkpoint beyond it or 0)."""
        evicted_at = 0
        for position, mark in walk.marks(limit):
            record = self._records.get(mark)
            if record is None:
                evicted_at = max(evicted_at, position if position < count else 0)
                continue
            if position == count and not self._has_logits(record):
                continue
            return record, evicted_at
        return None, evicted_at

    def _has_logits(self, record: Record) -> bool:
        shelf = self._shelf_of(record)
        return shelf is not None and shelf.holdings[record.id].logits_key is not None

    def _divergence(self, walk: Walk, ids: bytes, salt: bytes, record: Record | None, evicted_at: int) -> Divergence:
        depth = walk.depth
        if record is None and self.policy.tell_other_salts:
            for other in self._index.agrees_elsewhere(salt, ids):
                if other.depth > depth and any(mark in self._records for _, mark in other.marks(other.depth)):
                    return Divergence(depth, "salt")
        if depth == 0:
            return Divergence(0, "cold")
        if evicted_at > (record.position if record else 0):
            return Divergence(depth, "evicted")
        if depth == len(ids) // 4 or walk.tip:
            return Divergence(depth, "none")
        return Divergence(depth, "tokens")

    def _attach(self, match: Match, record: Record) -> None:
        shelf = self._shelf_of(record)
        assert shelf is not None
        record.in_use += 1
        record.hits += 1
        record.used_at = self._clock()
        shelf.hits += 1
        self._join(record, match._session)
        match._record = record
        match.position = record.position
        match.checkpoint_id = record.id
        match.kind = record.kind
        match.tier = shelf.tier.name
        match.nbytes = shelf.restored_bytes(record)

    def _release(self, match: Match) -> None:
        with self._lock:
            if match._record is not None:
                match._record.in_use -= 1
                match._record = None

    def _read(self, match: Match, kv_out: np.ndarray | None) -> Payload:
        while True:
            record = match._record
            if record is None:
                if match.position:
                    raise RuntimeError("read() of a released match")
                return Payload(0, (), {}, None)
            with self._lock:
                shelf = self._shelf_of(record)
                ids = match._ids[: 4 * record.position]
                path = Path(self.namespace, match._salt, ids, b"")
            if shelf is None:  # it was bad in every tier
                with self._lock:
                    self._fall_back(match, record)
                continue
            try:
                return shelf.read(record, path, kv_out)
            except SegmentBad as error:
                with self._lock:
                    self._quarantine(shelf, error)

    def _fall_back(self, match: Match, record: Record) -> None:
        self._release(match)
        match.position = match.nbytes = 0
        match.checkpoint_id = match.kind = match.tier = None
        walk = self._index.walk(match._salt, match._ids)
        shorter, _ = self._deepest(walk, len(match._ids) // 4, record.position - 1)
        if shorter is not None:
            self._attach(match, shorter)

    def _quarantine(self, shelf: Shelf, error: SegmentBad) -> None:
        """Take every checkpoint that needs a bad segment off its shelf."""
        broken = [r for r in self._records.values() if shelf.depends_on(r, error.key)]
        log.warning("segment quarantined tier=%s reason=%s checkpoints=%d", shelf.tier.name, error.reason, len(broken))
        shelf.quarantined += 1
        for record in broken:
            shelf.remove(record)
            if self._shelf_of(record) is None:
                self._gone(record, remember=False)

    # ── placing, inside ──────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, salt: bytes, ids: bytes, walk: Walk) -> Path:
        known = walk.keys()
        chain = KeyChain(self.namespace, salt, known=known, hash128=self._hash128)
        chain.extend(ids[len(known) // KEY_BYTES * 4 * BLOCK_TOKENS :])
        return Path(self.namespace, salt, ids, chain.joined)

    def _id(self, tail_key: bytes, salt: bytes, position: int, ids: bytes) -> str:
        """The same in every process: digest of the last full block's key, the position and the ids behind that block."""
        tail = ids[position // BLOCK_TOKENS * BLOCK_TOKENS * 4 :]
        return self._hash128((tail_key or self.namespace + salt) + position.to_bytes(8, "little") + tail).hex()

    def _validate(self, payload: Payload, position: int) -> None:
        layout = self.layout
        if payload.position != position:
            raise PayloadMismatch(f"state is at {payload.position}, its checkpoint at {position}")
        at = payload.kv[0].start if payload.kv else position
        for run in payload.kv:
            if run.rows.dtype != np.uint8 or run.rows.ndim != 2 or run.rows.shape[1] != layout.kv_token_bytes:
                raise PayloadMismatch(
                    f"KV rows {run.rows.dtype} {run.rows.shape}, layout has {layout.kv_token_bytes} bytes a token"
                )
            if run.start != at:
                raise PayloadMismatch(f"KV run starts at {run.start}, the one before ends at {at}")
            at += len(run.rows)
        if at != position:
            raise PayloadMismatch(f"KV rows end at {at}, the checkpoint is at {position}")
        sizes = {name: array.nbytes for name, array in payload.state.items()}
        if sizes != dict(layout.state):
            raise PayloadMismatch(f"state components {sizes}, layout has {dict(layout.state)}")
        if payload.logits is not None and payload.logits.size != layout.vocab_size:
            raise PayloadMismatch(f"{payload.logits.size} logits, vocabulary has {layout.vocab_size}")

    def _write(self, shelf: Shelf, record: Record, path: Path, payload: Payload) -> int:
        """Make room and write. Raises TierError; then nothing of it is left."""
        tail, stored = shelf.stored_blocks(path)
        starts_at = payload.kv[0].start if payload.kv else record.position
        if starts_at > stored * BLOCK_TOKENS:
            raise TierError(f"KV rows begin at {starts_at}, stored are {stored * BLOCK_TOKENS} tokens")
        shelf.hold(tail)  # making room must not take the blocks that this checkpoint builds on
        try:
            self._make_room(shelf, shelf.cost(path, stored, payload))
            return shelf.write(record, path, payload)
        finally:
            shelf.drop(tail)

    def _refresh(
        self, record: Record, shelf: Shelf, path: Path, boundary: Boundary, payload: Payload, session: str
    ) -> PutResult:
        """Put of what is there already: at most its logits are new."""
        written = 0
        record.kind = better_kind(record.kind, boundary.kind)
        record.used_at = self._clock()
        self._join(record, session)
        if payload.logits is not None and shelf.holdings[record.id].logits_key is None:
            record.in_use += 1
            try:
                self._make_room(shelf, shelf.logits_cost(path, payload.logits))
                written = shelf.write_logits(record, path, payload.logits)
            except TierError as error:
                log.info("logits not kept position=%d tier=%s reason=%s", record.position, shelf.tier.name, error)
            finally:
                record.in_use -= 1
        return PutResult(record.id, written, True)

    def _make_room(self, shelf: Shelf, needed: int) -> None:
        """Evict until `needed` bytes fit. Raises TierFull when what is left is held, or the budget is smaller than `needed`."""
        tier = shelf.tier
        if tier.used_bytes + needed <= tier.budget_bytes:
            return
        if needed > tier.budget_bytes:
            raise TierFull(tier.name, needed, tier.budget_bytes)
        target = max(0, tier.budget_bytes - needed - tier.budget_bytes * self.policy.slack_permille // 1000)
        for checkpoint_id in eviction_order(self._candidates(shelf), self.policy):
            if tier.used_bytes <= target:
                break
            self._evict_from(shelf, self._records[checkpoint_id])
        if tier.used_bytes + needed > tier.budget_bytes:
            raise TierFull(tier.name, needed, max(0, tier.budget_bytes - tier.used_bytes))

    def _candidates(self, shelf: Shelf) -> list[Candidate]:
        now = self._clock()
        found: list[Candidate] = []
        for checkpoint_id in shelf.holdings:
            record = self._records.get(checkpoint_id)
            if record is None or record.in_use or record.pins:
                continue
            fallback = next((p for p, mark in self._index.above(checkpoint_id) if mark in self._records), 0)
            found.append(
                Candidate(
                    checkpoint_id,
                    record.kind,
                    max(0, int(now - record.used_at)),
                    record.hits,
                    record.position - fallback,
                    shelf.exclusive_bytes(record),
                )
            )
        return found

    def _evict_from(self, shelf: Shelf, record: Record) -> None:
        """Take a record off a shelf; it moves to the next tier when there is one with room."""
        lower = self._shelves[self._shelves.index(shelf) + 1 :]
        if lower and record.id not in lower[0].holdings:
            self._demote(record, shelf, lower[0])
        shelf.remove(record)
        shelf.evictions += 1
        if self._shelf_of(record) is None:
            self._gone(record, remember=True)

    def _demote(self, record: Record, source: Shelf, target: Shelf) -> None:
        ids = b"".join(b.ids for b in reversed(list(source.chain(record)))) + record.tail_ids
        path = self._path(record.salt, ids, self._index.walk(record.salt, ids))
        try:
            self._write(target, record, path, source.read(record, path))
        except TierError as error:
            target.refused += 1
            log.info("checkpoint not moved position=%d tier=%s reason=%s", record.position, target.tier.name, error)

    def _gone(self, record: Record, *, remember: bool) -> None:
        """A record has left its last shelf. Its tokens stay in the index for a while if `remember`."""
        del self._records[record.id]
        for session in record.sessions:
            ids = self._sessions[session]
            del ids[record.id]
            if not ids:
                del self._sessions[session]
        if not remember:
            self._index.remove(record.id)
            return
        self._evicted[record.id] = None
        policy = self.policy
        while self._evicted and (
            len(self._evicted) > policy.remembered_checkpoints or self._index.tokens > policy.remembered_tokens
        ):
            self._index.remove(self._evicted.popitem(last=False)[0])

    def _join(self, record: Record, session: str) -> None:
        if session:
            record.sessions.add(session)
            self._sessions.setdefault(session, {})[record.id] = None

    def _shelf_of(self, record: Record) -> Shelf | None:
        """The fastest shelf that has it."""
        return next((shelf for shelf in self._shelves if record.id in shelf.holdings), None)
