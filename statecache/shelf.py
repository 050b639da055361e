"""One tier's share of the cache: which blocks and states lie there, who needs them, what they weigh.

A shelf is complete in itself: every checkpoint on it finds all its blocks on the same shelf. Blocks form chains by parent and
are reference-counted; a state holds the last full block before it, a block holds its parent. Decides nothing: see store.py for
what is put and evicted. Not thread-safe except for `read`, `store` and `seal`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace

import numpy as np

from statecache.blocks import Block, Draft, Extent, Holding
from statecache.checkpoint import Path, Record, Rows, TierStats, rows_between
from statecache.errors import Collision, ReadStopped, SegmentBad
from statecache.headers import check_header, extent_header, segment_keys, state_header
from statecache.stretches import BLOCKS, Join, Stretch, separate, stretch_of
from statecache.tiers.base import SegmentHeader, Tier
from statecache.types import BLOCK_TOKENS, KvRun, Layout, Payload


class Shelf:
    """See the module."""

    def __init__(self, tier: Tier, layout: Layout, join: Join = separate) -> None:
        """join: see stretches.py."""
        self._join = join
        self._stretches = tier.stays and tier.extent_blocks == 1
        self.tier = tier
        self.layout = layout
        self._state = [(name, f"state.{name}", nbytes) for name, nbytes in layout.state]
        """Of each recurrent component: its name, its part's, its bytes."""
        self._state_sizes = {part: nbytes for _, part, nbytes in self._state}
        self.blocks: dict[bytes, Block] = {}
        self.holdings: dict[str, Holding] = {}
        self.evictions = 0
        self.hits = 0
        self.written_bytes = 0
        self.refused = 0
        self.quarantined = 0
        self.shrinking = False
        """More is here than a budget that was made smaller allows; see trim.py."""

    # ── what is here ─────────────────────────────────────────────────────────────────────────────────────────────

    def stored_blocks(self, path: Path, known: Block | None = None) -> tuple[Block | None, int]:
        """The last of the leading blocks of `path` that are here, and their number. Compares ids and parents, not keys alone.

        known: a block here that is on the path for sure; the search starts behind it. Raises Collision when a key is here for
        another path.
        """
        parent = known
        for index in range(known.index + 1 if known else 0, path.blocks):
            block = self.blocks.get(path.key(index))
            if block is None:
                return parent, index
            if block.parent is not parent or block.index != index or block.ids != path.block_ids(index, index + 1):
                raise Collision(f"block key {block.key.hex()} names two paths")
            parent = block
        return parent, path.blocks

    def stats(self) -> TierStats:
        return TierStats(
            used_bytes=self.tier.used_bytes,
            budget_bytes=self.tier.budget_bytes,
            checkpoints=len(self.holdings),
            blocks=len(self.blocks),
            evictions=self.evictions,
            hits=self.hits,
            written_bytes=self.written_bytes,
            refused=self.refused,
            quarantined=self.quarantined,
        )

    def context_bytes(self, position: int) -> int:
        """Bytes of KV and state of a context of that many tokens; what a restore reads."""
        return position * self.layout.kv_token_bytes + sum(n for _, n in self.layout.state)

    def whole_bytes(self, position: int) -> int:
        """Bytes that such a context is charged when nothing of it is here, headers and logits included."""
        ids = bytes(4 * BLOCK_TOKENS)
        extent = SegmentHeader("extent", bytes(32), bytes(32), bytes(16), bytes(16), 0, 0, ids * self.tier.extent_blocks)
        step = self.tier.extent_blocks * BLOCK_TOKENS
        state = replace(extent, what="state", tokens=ids)
        sizes = {"kv.tail": position % BLOCK_TOKENS * self.layout.kv_token_bytes}
        sizes |= self._state_sizes
        return (
            -(-(position // BLOCK_TOKENS * BLOCK_TOKENS) // step)
            * self.tier.cost(extent, {"kv": step * self.layout.kv_token_bytes})
            + self.tier.cost(state, sizes)
            + self.tier.cost(state, {"logits": 4 * self.layout.vocab_size})
        )

    def exclusive_bytes(self, record: Record) -> int:
        """Bytes that only this record needs. For extents of several blocks, their even share."""
        holding = self.holdings[record.id]
        total = holding.nbytes
        block = holding.tail
        while block is not None and block.refs == 1:
            total += block.extent.nbytes // len(block.extent.blocks)
            block = block.parent
        return total

    def chain(self, record: Record) -> Iterator[Block]:
        """Its blocks, last first."""
        block = self.holdings[record.id].tail
        while block is not None:
            yield block
            block = block.parent

    def path(self, record: Record) -> Path:
        """The token prefix of a checkpoint, from its blocks."""
        blocks = list(self.chain(record))[::-1]
        ids = b"".join(b.ids for b in blocks) + record.tail_ids
        return Path(record.namespace, record.salt, ids, b"".join(b.key for b in blocks))

    def depends_on(self, record: Record, segments: Set[bytes]) -> bool:
        """Whether a checkpoint is here and needs one of these."""
        holding = self.holdings.get(record.id)
        if holding is None:
            return False
        own = holding.state_key in segments or holding.logits_key in segments
        return own or any(block.extent.key in segments for block in self.chain(record))

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def cost(self, record: Record, path: Path, stored: int, payload: Payload) -> int:
        """Bytes that write() will charge when `stored` leading blocks are here."""
        total = 0 if payload.logits is None else self.logits_cost(record, path, payload.logits)
        if record.id in self.holdings:
            return total
        known: dict[tuple[int, int, int], int] = {}
        for first, end in self._extents(path, stored):
            # Headers of as many blocks differ in length by the digits of their positions alone.
            alike = (end - first, len(str(first * BLOCK_TOKENS)), len(str(end * BLOCK_TOKENS)))
            if alike not in known:
                parts = {"kv": (end - first) * BLOCK_TOKENS * self.layout.kv_token_bytes}
                known[alike] = self.tier.cost(extent_header(path, first, end), parts)
            total += known[alike]
        sizes = {"kv.tail": path.position % BLOCK_TOKENS * self.layout.kv_token_bytes} | self._state_sizes
        return total + self.tier.cost(state_header(path, "state", record), sizes)

    def logits_cost(self, record: Record, path: Path, logits: np.ndarray) -> int:
        return self.tier.cost(state_header(path, "logits", record), {"logits": 4 * logits.size})

    @staticmethod
    def logits_part(logits: np.ndarray) -> np.ndarray:
        """Logits as they are stored: f32 little-endian, as uint8."""
        return np.ascontiguousarray(logits, dtype="<f4").reshape(-1).view(np.uint8)

    def write(self, record: Record, path: Path, payload: Payload, tail: Block | None) -> int:
        """Store what is missing of the checkpoint; bytes charged. On any error nothing of it is left.

        tail: the last of the path's blocks that are here, as stored_blocks() found it. Raises TierError, and PayloadMismatch
        when the payload lacks rows that are missing here.
        """
        draft = self.draft(record, path, tail)
        try:
            self.store(draft, payload)
            if record.proven:
                self.seal([*self.unsealed_before(tail), *draft.stored])
        except BaseException:
            self.abandon(draft)
            raise
        return self.adopt(draft)

    def draft(self, record: Record, path: Path, tail: Block | None) -> Draft:
        """First of three steps of write(): decide what is missing, and keep what it builds on. Raises Collision.

        The draft ends with adopt() or abandon(); until then nothing else may be written here, only read and removed.
        """
        first_new = tail.index + 1 if tail else 0
        keys = [path.key(index) for index in range(first_new, path.blocks)]
        if len(set(keys)) < len(keys) or not self.blocks.keys().isdisjoint(keys):
            raise Collision(f"a key of blocks {first_new}…{path.blocks - 1} names two paths")
        self.hold(tail)
        extents = [(first, end, b"x" + path.key(end - 1)) for first, end in self._extents(path, first_new)]
        return Draft(record, path, tail, extents, record.id in self.holdings)

    def store(self, draft: Draft, payload: Payload) -> None:
        """Second step: extents in rising order, then state, then logits, none of them sealed. Takes back what it wrote on any
        error.

        Touches the tier only, so it needs no lock.
        """
        record, path = draft.record, draft.path
        state_key, logits_key = segment_keys(record)
        kv = Rows(payload)
        try:
            for first, end, key in draft.extents:
                rows = kv.between(first * BLOCK_TOKENS, end * BLOCK_TOKENS)
                parts = {"kv": rows[0] if len(rows) == 1 else rows}
                draft.stored[key] = self.tier.put(key, extent_header(path, first, end), parts, sealed=False)
            if not draft.logits_only:
                header = state_header(path, "state", record)
                draft.stored[state_key] = self.tier.put(state_key, header, self._state_parts(path, payload), sealed=False)
            if payload.logits is not None:
                draft.stored[logits_key] = self._put_logits(record, path, payload.logits, sealed=False)
        except BaseException:
            self._take_back(draft)
            raise

    def append(self, path: Path, tail: Block | None, rows: np.ndarray) -> Block:
        """Store one more block of `path` behind `tail`, or find it here; the caller's hold of tail is one of that block now.

        For what comes a little at a time, before there is a checkpoint of it, and a tier whose extents are single blocks.
        Raises TierError, changing nothing.
        """
        index = tail.index + 1 if tail else 0
        key, ids = path.key(index), path.block_ids(index, index + 1)
        block = self.blocks.get(key)
        if block is None:
            extent = Extent(b"x" + key)
            extent.nbytes = self.tier.put(extent.key, extent_header(path, index, index + 1), {"kv": rows})
            self.written_bytes += extent.nbytes
            block = self.blocks[key] = Block(key, tail, index, ids, extent)
            extent.blocks.append(block)
            self._completes(path, block)
        elif block.parent is not tail or block.index != index or block.ids != ids:
            raise Collision(f"block key {key.hex()} names two paths")
        self.hold(block)
        self.drop(tail)
        return block

    def adopt(self, draft: Draft) -> int:
        """Third step: what was stored counts from now on. Returns bytes charged."""
        path, tail = draft.path, draft.tail
        for first, end, key in draft.extents:
            extent = Extent(key)
            extent.nbytes = draft.stored[key]
            for index in range(first, end):
                block = Block(path.key(index), tail, index, path.block_ids(index, index + 1), extent)
                extent.blocks.append(block)
                self.blocks[block.key] = block
                # One hold for its maker, and its own of the block in front, which was its maker's until now.
                block.refs = 1
                extent.live += 1
                self._completes(path, block)
                tail = block
        state_key, logits_key = segment_keys(draft.record)
        if draft.logits_only:
            holding = self.holdings[draft.record.id]
            self.drop(tail)
        else:
            holding = self.holdings[draft.record.id] = Holding(tail, state_key, draft.stored[state_key])
        if logits_key in draft.stored:
            holding.logits_key, holding.logits_bytes = logits_key, draft.stored[logits_key]
        self.written_bytes += draft.written
        return draft.written

    def abandon(self, draft: Draft) -> None:
        """Instead of adopt()."""
        self._take_back(draft)
        self.drop(draft.tail)

    def write_logits(self, record: Record, path: Path, logits: np.ndarray) -> int:
        """Add final logits to a checkpoint that has none. Returns bytes charged."""
        holding = self.holdings[record.id]
        holding.logits_bytes = self._put_logits(record, path, logits, sealed=record.proven)
        holding.logits_key = segment_keys(record)[1]
        self.written_bytes += holding.logits_bytes
        return holding.logits_bytes

    def remove(self, record: Record) -> None:
        """Take the record off this shelf and free what nothing else needs."""
        holding = self.holdings.pop(record.id)
        if holding.logits_key is not None:
            self.tier.delete(holding.logits_key)
        self.tier.delete(holding.state_key)
        self.drop(holding.tail)

    def hold(self, block: Block | None) -> None:
        """Keep a block and all before it until drop()."""
        while block is not None:
            block.refs += 1
            if block.refs > 1:
                return
            block.extent.live += 1
            block = block.parent

    def drop(self, block: Block | None) -> None:
        """Take back one hold; what nothing needs any more is deleted."""
        while block is not None:
            block.refs -= 1
            if block.refs > 0:
                return
            extent = block.extent
            extent.live -= 1
            if extent.live == 0:
                self.tier.delete(extent.key)
                for member in extent.blocks:
                    if self.blocks.get(member.key) is member:
                        del self.blocks[member.key]
                # Each names the other; what was there when a process froze its objects would never be freed.
                extent.blocks = []
            block = block.parent

    # ── sealing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def unsealed(self, record: Record) -> list[bytes]:
        """What a checkpoint here still needs sealed, blocks in rising order."""
        unsealed, holding = self.tier.unsealed, self.holdings[record.id]
        if not unsealed:
            return []
        own = [key for key in (holding.state_key, holding.logits_key) if key is not None and key in unsealed]
        return self.unsealed_before(holding.tail) + own

    def unsealed_before(self, tail: Block | None) -> list[bytes]:
        """The same for the extents of a chain of blocks."""
        unsealed, found = self.tier.unsealed, list[bytes]()
        block = tail if unsealed else None
        while block is not None:
            if block.extent.key in unsealed:
                found.append(block.extent.key)
            block = block.extent.blocks[0].parent
        return found[::-1]

    def seal(self, keys: Iterable[bytes]) -> None:
        """Touches the tier only, so it needs no lock. Raises TierFailed."""
        self.tier.seal(keys)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def read(
        self,
        record: Record,
        path: Path,
        kv_out: np.ndarray | None = None,
        *,
        first_block: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> Payload:
        """All bytes of a checkpoint, each segment's header compared with `path` first. Read-only views where possible.

        path: of the *asking* context, cut at the record's position. kv_out: uint8 [≥ position, kv_token_bytes] to read rows
        into; then there is one run, a view of it. first_block: leave out extents that end before this block. stop: asked before
        each extent. Raises SegmentBad, ReadStopped.
        """
        holding = self.holdings.get(record.id)
        if holding is None:
            raise SegmentBad(self.tier.name, segment_keys(record)[0], "no longer here")
        width = self.layout.kv_token_bytes
        full = path.blocks * BLOCK_TOKENS
        runs: list[KvRun] = []
        whole = kv_out is None and not first_block
        for part in self._needed(holding, first_block, path if whole else None):
            if isinstance(part, Stretch):
                runs += part.runs
                continue
            first, end, extent = part
            if stop is not None and stop():
                raise ReadStopped(f"read up to token {first * BLOCK_TOKENS}")
            header = self.tier.header(extent.key)
            count = end - first
            check_header(self.tier.name, extent.key, header, path, first * BLOCK_TOKENS, end * BLOCK_TOKENS, "extent")
            nbytes = count * BLOCK_TOKENS * width
            if kv_out is not None:
                self.tier.read_into(extent.key, "kv", kv_out[first * BLOCK_TOKENS : end * BLOCK_TOKENS])
                continue
            data = self.tier.read(extent.key, "kv")
            if data.nbytes != len(extent.blocks) * BLOCK_TOKENS * width:
                raise SegmentBad(self.tier.name, extent.key, f"kv has {data.nbytes} bytes")
            runs.append(KvRun(first * BLOCK_TOKENS, data[:nbytes].reshape(count * BLOCK_TOKENS, width)))
        header = self.tier.header(holding.state_key)
        check_header(self.tier.name, holding.state_key, header, path, full, path.position, "state")
        tail = self._part(holding.state_key, "kv.tail", (path.position - full) * width).reshape(path.position - full, width)
        if kv_out is not None:
            kv_out[full : path.position] = tail
            runs = [KvRun(0, kv_out[: path.position])]
        elif len(tail):
            runs.append(KvRun(full, tail))
        state = {name: self._part(holding.state_key, part, size) for name, part, size in self._state}
        logits = None
        if holding.logits_key is not None:
            header = self.tier.header(holding.logits_key)
            check_header(self.tier.name, holding.logits_key, header, path, full, path.position, "logits")
            logits = self._part(holding.logits_key, "logits", 4 * self.layout.vocab_size).view("<f4")
        return Payload(path.position, tuple(runs), state, logits)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _needed(self, holding: Holding, first_block: int, known: Path | None) -> Iterator[Stretch | tuple[int, int, Extent]]:
        """(first block, end block, extent) over a chain, in order. known: take stretches of this path."""
        parts: list[Stretch | tuple[int, int, Extent]] = []
        block = holding.tail
        while block is not None and block.index >= first_block:
            if known is not None and block.stretch is not None and block.stretch.is_of(known, block.index + 1 - BLOCKS):
                parts.append(block.stretch)
                block = block.stretch.before
                continue
            first = block.extent.blocks[0]
            parts.append((first.index, block.index + 1, block.extent))
            block = first.parent
        return reversed(parts)

    def _completes(self, path: Path, block: Block) -> None:
        """A block of the path has come, and perhaps a stretch with it."""
        if not self._stretches or (block.index + 1) % BLOCKS:
            return
        shape = (BLOCK_TOKENS, self.layout.kv_token_bytes)
        # One of its blocks may have turned out bad; who reads it is told, and there is no stretch of it.
        with contextlib.suppress(SegmentBad):
            block.stretch = stretch_of(path, block, lambda b: self.tier.read(b.extent.key, "kv").reshape(shape), self._join)

    def _part(self, key: bytes, name: str, nbytes: int) -> np.ndarray:
        array = self.tier.read(key, name)
        if array.nbytes != nbytes:
            raise SegmentBad(self.tier.name, key, f"part {name!r} has {array.nbytes} bytes, the layout says {nbytes}")
        return array

    def _extents(self, path: Path, stored: int) -> Iterator[tuple[int, int]]:
        step = self.tier.extent_blocks
        for first in range(stored, path.blocks, step):
            yield first, min(first + step, path.blocks)

    def _state_parts(self, path: Path, payload: Payload) -> dict[str, np.ndarray]:
        parts = {"kv.tail": rows_between(payload, path.blocks * BLOCK_TOKENS, path.position)}
        for name, part, _ in self._state:
            parts[part] = payload.state[name]
        return parts

    def _put_logits(self, record: Record, path: Path, logits: np.ndarray, *, sealed: bool) -> int:
        part = {"logits": self.logits_part(logits)}
        return self.tier.put(segment_keys(record)[1], state_header(path, "logits", record), part, sealed=sealed)

    def _take_back(self, draft: Draft) -> None:
        for key in reversed(draft.stored):
            self.tier.delete(key)
        draft.stored.clear()
