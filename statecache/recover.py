"""Reconcile what a durable tier still holds with an empty store at start: rebuild blocks, checkpoints and index from headers.

Everything is derived again: block keys are hashed from the token ids in the headers and must equal the stored ones, and a
checkpoint counts only when every block before it is there. What cannot be read or is foreign is set aside; what belongs to no
checkpoint (an interrupted save, a lost block's descendants) is deleted; so the bytes counted are the bytes kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from statecache.checkpoint import Path, Record
from statecache.errors import SegmentBad
from statecache.keys import KEY_BYTES, Hash128, KeyChain
from statecache.residency import Residency
from statecache.shelf import Block, Extent, Holding, Shelf
from statecache.tiers.base import SegmentHeader
from statecache.types import BLOCK_TOKENS, BoundaryKind

_ID_BYTES = 4 * BLOCK_TOKENS
PROGRESS_EVERY = 64


@dataclass(frozen=True, slots=True)
class Known:
    """What an index remembers of a segment. nbytes: as the tier charged it. age_s, hits: of a state's use."""

    header: SegmentHeader
    nbytes: int
    age_s: float = 0.0
    hits: int = 0


Users = Mapping[bytes, Mapping[str, bool]]
"""State segment → session → whether it pinned it."""
Progress = Callable[[float, str], None]
"""(fraction done, what) is told while it goes on."""


def recover(
    shelf: Shelf,
    kept: Residency,
    namespace: bytes,
    checkpoint_id: Callable[[Path], str],
    hash128: Hash128,
    now: float,
    *,
    known: Mapping[bytes, Known] | None = None,
    users: Users | None = None,
    progress: Progress | None = None,
) -> int:
    """Adopt the segments of a tier that no record knows yet. Returns the number of checkpoints found.

    known: what an index remembers; a segment that still has the remembered size is not opened. A bad one is set aside.
    users: who joins, and pins, the checkpoints that are found.
    """
    known = known or {}
    adoption = _Adoption(shelf, kept, checkpoint_id, hash128, now, known, users or {})
    headers = _headers(shelf, namespace, known, progress)
    adoption.run(headers)
    doubtful = headers.keys() - adoption.adopted & known.keys()
    if doubtful:  # perhaps only the index is wrong: nothing is deleted on its word
        files = _headers(shelf, namespace, {key: known[key] for key in known.keys() - doubtful}, progress)
        adoption.run({key: header for key, header in files.items() if key not in adoption.adopted})
    adoption.discard_the_rest()
    return adoption.found


def _headers(
    shelf: Shelf, namespace: bytes, known: Mapping[bytes, Known], progress: Progress | None
) -> dict[bytes, SegmentHeader]:
    """Of every segment of this namespace that is there and sound; the others are set aside."""
    tier, headers = shelf.tier, dict[bytes, SegmentHeader]()
    sizes = tier.sizes()
    for number, (key, size) in enumerate(sizes.items()):
        if progress is not None and number % PROGRESS_EVERY == 0:
            progress(number / len(sizes), "looking through saved states")
        memory = known.get(key)
        try:
            if memory is not None and memory.nbytes == size:
                header = memory.header
            else:
                header = tier.header(key)
            if header.namespace != namespace:
                raise SegmentBad(tier.name, key, "other namespace")
        except SegmentBad as error:
            shelf.quarantined += 1
            tier.set_aside(key, error.reason)
        else:
            headers[key] = header
    return headers


class _Adoption:
    """Segments that join a shelf, extents first. adopted: their keys. salts: of the blocks among them."""

    def __init__(
        self,
        shelf: Shelf,
        kept: Residency,
        checkpoint_id: Callable[[Path], str],
        hash128: Hash128,
        now: float,
        known: Mapping[bytes, Known],
        users: Users,
    ) -> None:
        self._shelf = shelf
        self._kept = kept
        self._id = checkpoint_id
        self._hash128 = hash128
        self._now = now
        self._known = known
        self._users = users
        self._salts: dict[bytes, bytes] = {}
        self.adopted: set[bytes] = set()
        self.found = 0

    def run(self, headers: Mapping[bytes, SegmentHeader]) -> None:
        by_start = sorted((h.start, key) for key, h in headers.items() if h.what == "extent")
        self.adopted.update(key for _, key in by_start if self._extent(key, headers[key]))
        for key, header in headers.items():
            if header.what != "state":
                continue
            record = self._state(key, header)
            if record is None:
                continue
            self.found += 1
            self.adopted.add(key)
            memory = self._known.get(key)
            if memory is not None:
                record.hits, record.used_at = memory.hits, self._now - memory.age_s
            for session, pinned in self._users.get(key, {}).items():
                self._kept.join(record, session)
                if pinned:
                    record.pins.add(session)
        self.adopted.update(key for key, header in headers.items() if header.what == "logits" and self._logits(key, header))

    def discard_the_rest(self) -> None:
        shelf = self._shelf
        for extent in {block.extent for block in shelf.blocks.values()}:
            if extent.live == 0:
                self.adopted.discard(extent.key)
                for block in extent.blocks:
                    del shelf.blocks[block.key]
        for key in list(shelf.tier.keys()):
            if key not in self.adopted:
                shelf.tier.delete(key)

    def _extent(self, key: bytes, header: SegmentHeader) -> bool:
        shelf, salts = self._shelf, self._salts
        count = len(header.tokens) // _ID_BYTES
        first = header.start // BLOCK_TOKENS
        parent = shelf.blocks.get(header.parent) if header.parent else None
        if count == 0 or header.start % BLOCK_TOKENS or (first + count) * BLOCK_TOKENS != header.position:
            return False
        if first != (parent.index + 1 if parent else 0) or (parent and salts[parent.key] != header.salt):
            return False
        chain = KeyChain(header.namespace, header.salt, known=header.parent, hash128=self._hash128)
        chain.extend(header.tokens)
        keys = chain.joined[len(header.parent) :]
        names = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        if names[-1] != header.key or not shelf.blocks.keys().isdisjoint(names):
            return False
        extent = Extent(key)
        extent.nbytes = shelf.tier.cost(header, {"kv": len(names) * BLOCK_TOKENS * shelf.layout.kv_token_bytes})
        for i, name in enumerate(names):
            parent = Block(name, parent, first + i, header.tokens[i * _ID_BYTES : (i + 1) * _ID_BYTES], extent)
            extent.blocks.append(parent)
            shelf.blocks[name] = parent
            salts[name] = header.salt
        return True

    def _state(self, key: bytes, header: SegmentHeader) -> Record | None:
        shelf, kept, salts = self._shelf, self._kept, self._salts
        tail = shelf.blocks.get(header.key) if header.key else None
        blocks = header.position // BLOCK_TOKENS
        if blocks != (tail.index + 1 if tail else 0) or (tail and salts[tail.key] != header.salt):
            return None
        if header.start != blocks * BLOCK_TOKENS or len(header.tokens) != 4 * (header.position - header.start):
            return None
        chain: list[Block] = []
        block = tail
        while block is not None:
            chain.append(block)
            block = block.parent
        chain.reverse()
        ids = b"".join(b.ids for b in chain) + header.tokens
        path = Path(header.namespace, header.salt, ids, b"".join(b.key for b in chain))
        name = self._id(path)
        if key != b"s" + bytes.fromhex(name):
            return None
        record = kept.records.get(name)
        if record is None:
            kind = BoundaryKind(header.kind) if header.kind in set(BoundaryKind) else BoundaryKind.PARTIAL
            record = Record(name, header.namespace, header.salt, header.position, kind, header.item, header.tokens, self._now)
        sizes = {"kv.tail": len(header.tokens) // 4 * shelf.layout.kv_token_bytes}
        sizes |= {f"state.{component}": size for component, size in shelf.layout.state}
        shelf.holdings[name] = Holding(tail, key, shelf.tier.cost(header, sizes))
        shelf.hold(tail)
        kept.commit(record, path)
        return record

    def _logits(self, key: bytes, header: SegmentHeader) -> bool:
        """The state may have joined in an earlier run."""
        shelf, name = self._shelf, key[1:].hex()
        record, holding = self._kept.records.get(name), shelf.holdings.get(name)
        if record is None or holding is None or key != b"l" + bytes.fromhex(name):
            return False
        if holding.logits_key or (header.position, header.salt) != (record.position, record.salt):
            return False
        holding.logits_key = key
        holding.logits_bytes = shelf.tier.cost(header, {"logits": 4 * shelf.layout.vocab_size})
        return True
