"""A long context is read by whole stretches: the same bytes, its tokens compared first, and nothing is kept of it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest

from engine.kvcache.spans import joined
from statecache.blocks import Block
from statecache.boundary import Boundary
from statecache.checkpoint import Path
from statecache.errors import SegmentBad
from statecache.index.radix import RadixIndex
from statecache.keys import block_keys
from statecache.shelf import Shelf
from statecache.store import StateCache
from statecache.stretches import BLOCKS, Join, separate
from statecache.tiers.ram import RamTier
from statecache.types import BLOCK_TOKENS, BoundaryKind, KvRun, Layout, Payload

WIDTH, STATE = 8, 16
LAYOUT = Layout(WIDTH, (("s", STATE),), 10)
NAMESPACE, SALT = b"n" * 32, b"s" * 32
TOKENS = (3 * BLOCKS + 5) * BLOCK_TOKENS + 7
IDS = np.random.default_rng(1).integers(0, 1000, TOKENS + 50).astype(np.uint32)
ROWS = np.random.default_rng(2).integers(0, 256, (TOKENS, WIDTH)).astype(np.uint8)


class Counting(RamTier):
    """What is asked of it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(1 << 26, **more)
        self.calls: Counter[str] = Counter()

    def header(self, key: bytes) -> Any:
        self.calls["header"] += 1
        return super().header(key)

    def read(self, key: bytes, part: str) -> np.ndarray:
        self.calls[part] += 1
        return super().read(key, part)


def saved(tier: RamTier, join: Join = separate) -> StateCache:
    cache = StateCache(NAMESPACE, LAYOUT, tiers=[tier], index=RadixIndex(), join=join)
    payload = Payload(TOKENS, (KvRun(0, ROWS),), {"s": np.zeros(STATE, np.uint8)}, None)
    assert cache.put(IDS, SALT, Boundary(TOKENS, BoundaryKind.TURN), payload).checkpoint_id
    return cache


def read(cache: StateCache, ids: np.ndarray = IDS) -> Payload:
    with cache.match(ids, SALT) as match:
        return match.read()


def whole(payload: Payload) -> np.ndarray:
    starts = [run.start for run in payload.kv]
    assert starts == [0, *np.cumsum([len(run.rows) for run in payload.kv])[:-1]]
    return np.concatenate([run.rows for run in payload.kv])


def test_a_read_takes_whole_stretches_the_first_time_too() -> None:
    tier = Counting()
    cache = saved(tier)
    for payload in (read(cache), read(cache)):
        assert np.array_equal(whole(payload), ROWS)
        assert not any(run.rows.flags.writeable for run in payload.kv)
    tier.calls.clear()
    read(cache)
    assert (tier.calls["kv"], tier.calls["header"]) == (5, 5 + 1)


def test_stretches_of_what_comes_a_block_at_a_time() -> None:
    tier = Counting()
    shelf = Shelf(tier, LAYOUT)
    ids = IDS[: BLOCKS * BLOCK_TOKENS]
    path = Path(NAMESPACE, SALT, ids.tobytes(), b"".join(block_keys(NAMESPACE, SALT, ids)))
    block: Block | None = None
    for index in range(BLOCKS):
        assert block is None or block.stretch is None
        block = shelf.append(path, block, ROWS[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])
    assert block is not None
    assert block.stretch is not None
    assert block.stretch.before is None
    assert np.array_equal(np.concatenate([run.rows for run in block.stretch.runs]), ROWS[: BLOCKS * BLOCK_TOKENS])


def test_a_longer_context_takes_the_stretches_of_the_one_it_goes_on_from() -> None:
    tier = Counting()
    cache = saved(tier)
    end = TOKENS + 50
    rows = np.concatenate([ROWS, np.full((50, WIDTH), 7, np.uint8)])
    payload = Payload(end, (KvRun(0, rows),), {"s": np.zeros(STATE, np.uint8)}, None)
    ids = np.append(IDS, np.uint32(3))
    assert cache.put(ids, SALT, Boundary(end, BoundaryKind.TURN), payload).checkpoint_id
    tier.calls.clear()
    assert np.array_equal(whole(read(cache, ids)), rows)
    assert tier.calls["kv"] <= 6


@pytest.mark.parametrize("changed", [0, BLOCKS * BLOCK_TOKENS + 5, TOKENS - 1])
def test_tokens_are_compared_before_a_stretch_is_used(changed: int) -> None:
    """As if the index had named the wrong checkpoint."""
    cache = saved(Counting())
    (record,) = cache._kept.records.values()
    (shelf,) = cache._kept.shelves
    ids = IDS[:TOKENS].copy()
    ids[changed] += 1
    for wrong in (
        Path(NAMESPACE, SALT, ids.tobytes(), b""),
        Path(NAMESPACE, b"o" * 32, IDS[:TOKENS].tobytes(), b""),
        Path(b"o" * 32, SALT, IDS[:TOKENS].tobytes(), b""),
    ):
        with pytest.raises(SegmentBad, match="other"):
            shelf.read(record, wrong)
    assert np.array_equal(whole(shelf.read(record, Path(NAMESPACE, SALT, IDS[:TOKENS].tobytes(), b""))), ROWS)


def test_neighbours_in_memory_come_as_one_and_stay_as_long_as_they_are_looked_at() -> None:
    memory, at = np.zeros(1 << 22, np.uint8), [0]

    def take(nbytes: int) -> np.ndarray:
        at[0] += nbytes
        return memory[at[0] - nbytes : at[0]]

    cache = saved(RamTier(1 << 26, take=take), joined)
    payload = read(cache)
    assert len(payload.kv) == 3 + 5 + 1
    assert np.array_equal(whole(payload), ROWS)


def test_an_evicted_context_leaves_no_memory_behind_and_spares_who_still_reads() -> None:
    alive: list[weakref.ref[np.ndarray]] = []

    def take(nbytes: int) -> np.ndarray:
        array = np.empty(nbytes, np.uint8)
        alive.append(weakref.ref(array))
        return array

    cache = saved(RamTier(1 << 26, take=take), joined)
    payload = read(cache)
    (record,) = cache._kept.records
    assert cache.evict(record)
    assert np.array_equal(whole(payload), ROWS)
    del payload
    assert [ref for ref in alive if ref() is not None] == []
    assert read(cache).position == 0


def test_a_tier_that_checks_its_bytes_checks_them_every_time() -> None:
    tier = RamTier(1 << 26, checksums=True)
    cache = saved(tier)
    assert read(cache).position == TOKENS
    key = next(key for key, segment in tier._segments.items() if segment[0].what == "extent")
    array = tier._segments[key][1]["kv"]
    array.flags.writeable = True
    array[3] ^= 1
    assert read(cache).position == 0
