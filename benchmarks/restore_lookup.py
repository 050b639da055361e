"""What a restore of a long context from memory costs the processor before the last copy can be sent, the first time and again.

python -m benchmarks.restore_lookup [--tokens 65536] [--record]

Milliseconds of processor time, the best of many; no bytes are copied.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.common import report
from engine.kvcache.spans import joined
from engine.types import KvRun
from statecache.index.radix import RadixIndex
from statecache.store import StateCache
from statecache.stretches import Join, separate
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind, Layout, Payload
from statecache.types import KvRun as SavedRun

WIDTH = 64
"""Bytes of a token: what is copied does not count here."""
SALT = bytes(32)
REPEATS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args()
    tokens: int = options.tokens
    figures: dict[str, Any] = {}
    ids = np.random.default_rng(0).integers(0, 1000, tokens + 1).astype(np.uint32)
    for join in (separate, joined):
        firsts = [milliseconds(made(ids, join), ids) for _ in range(REPEATS // 4)]
        cache = made(ids, join)
        milliseconds(cache, ids)
        again = min(milliseconds(cache, ids) for _ in range(REPEATS))
        figures[join.__name__] = {"first_ms": min(firsts), "again_ms": again}
    report("restore_lookup", "none", {"tokens": tokens}, figures, options.record)


def made(ids: np.ndarray, join: Join) -> StateCache:
    """A cache with one checkpoint, whose blocks lie side by side as in pinned memory."""
    count = len(ids) - 1
    memory, used = np.zeros(count * WIDTH, np.uint8), [0]

    def take(nbytes: int) -> np.ndarray:
        used[0] += nbytes
        return memory[used[0] - nbytes : used[0]]

    tier = RamTier(1 << 32, take=take)
    cache = StateCache(bytes(32), Layout(WIDTH, (), 1), tiers=[tier], index=RadixIndex(), join=join)
    payload = Payload(count, (SavedRun(0, np.zeros((count, WIDTH), np.uint8)),), {}, None)
    assert cache.put(ids, SALT, Boundary(count, BoundaryKind.TURN), payload).checkpoint_id
    return cache


def milliseconds(cache: StateCache, ids: np.ndarray) -> float:
    """Of one restore, as a worker's bridge and the engine's way to a device do it."""
    began = time.process_time()
    with cache.match(ids, SALT) as match:
        runs = tuple(KvRun(run.start, run.rows) for run in match.read().kv)
    spans = list(joined(run.rows for run in runs))
    took = time.process_time() - began
    assert sum(span.nbytes for span in spans) == WIDTH * match.position
    return round(1000 * took, 3)


if __name__ == "__main__":
    main()
