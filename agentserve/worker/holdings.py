"""What each of several workers has computed, as far as the server knows: prefixes by digest, sessions by name.

An estimate for routing and nothing else. A worker may have evicted what is noted here; it says so by matching less, and a turn
that went there computes what is missing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import xxhash

BLOCK_TOKENS = 256
KEPT_BLOCKS = 1 << 18
"""64 M tokens of contexts, about 40 MiB."""
KEPT_SESSIONS = 1 << 16


def block_digests(ids: bytes, salt: bytes) -> tuple[int, ...]:
    """Of every whole block of a context, each with all before it. ids: u32le."""
    digest = xxhash.xxh3_64(salt)
    size = 4 * BLOCK_TOKENS
    found: list[int] = []
    for start in range(0, len(ids) - size + 1, size):
        digest.update(ids[start : start + size])
        found.append(digest.intdigest())
    return tuple(found)


class Holdings:
    """Of `workers` workers, by number. Bounded; the longest unused is forgotten first."""

    def __init__(self, workers: int, *, blocks: int = KEPT_BLOCKS, sessions: int = KEPT_SESSIONS) -> None:
        self._workers = workers
        self._most = (blocks, sessions)
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._told: OrderedDict[str, dict[int, int]] = OrderedDict()

    def held(self, digests: Sequence[int], session: str) -> list[int]:
        """Tokens of a context that each worker has, or that the session had there as a worker told when it started."""
        told = self._told.get(session, {})
        found = [told.get(worker, 0) for worker in range(self._workers)]
        having = (1 << self._workers) - 1
        for number, digest in enumerate(digests, 1):
            having &= self._blocks.get(digest, 0)
            if not having:
                break
            for worker in range(self._workers):
                if having >> worker & 1:
                    found[worker] = max(found[worker], number * BLOCK_TOKENS)
        return found

    def add(self, worker: int, digests: Sequence[int], session: str) -> None:
        """A turn of this context goes to a worker, which is the session's own from now on."""
        for digest in digests:
            self._blocks[digest] = self._blocks.pop(digest, 0) | 1 << worker
        _shorten(self._blocks, self._most[0])
        self._homes.pop(session, None)
        self._homes[session] = worker
        _shorten(self._homes, self._most[1])
        self._told.pop(session, None)  # from now on its contexts are known

    def home(self, session: str) -> int | None:
        """Where the session's last turn went; before its first, where most of it was found. None: nobody knows it."""
        if session in self._homes:
            return self._homes[session]
        told = self._told.get(session)
        return None if not told else max(told, key=lambda worker: (told[worker], -worker))

    def tell(self, worker: int, sessions: Mapping[str, int]) -> None:
        """What a worker that starts has found on disk: session → tokens of its deepest checkpoint."""
        for session, tokens in sessions.items():
            self._told.setdefault(session, {})[worker] = tokens
        _shorten(self._told, self._most[1])

    def lost(self, worker: int) -> None:
        """A worker ended: what it had in memory is gone."""
        others = ~(1 << worker)
        for digest, having in list(self._blocks.items()):
            if having & ~others:
                if having & others:
                    self._blocks[digest] = having & others
                else:
                    del self._blocks[digest]
        for session, told in list(self._told.items()):
            told.pop(worker, None)
            if not told:
                del self._told[session]

    def forget(self, session: str) -> None:
        self._homes.pop(session, None)
        self._told.pop(session, None)


def _shorten(kept: OrderedDict, most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
