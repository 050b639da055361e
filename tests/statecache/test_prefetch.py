"""Checkpoints that are brought from disk to memory before their turn comes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from statecache.policy import LOOK_AGAIN_US, WRITES_FIRST_US, prefetch_pause_us
from statecache.prefetch import Prefetcher
from statecache.reader import Reader
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from tests.statecache.world import OTHER_SALT, SALT, Clock, close_books, context, make, same, save

TOKENS = context(1, 1500)


class World:
    """A checkpoint at 1,400 of TOKENS that lies on disk alone."""

    def __init__(self, tmp_path, budget: int = 200_000) -> None:
        self.clock = Clock()
        disk = DiskTier(tmp_path / "segments", 1 << 24, reserve_bytes=0, fsync=False)
        self.cache = make(tiers=[RamTier(1 << 20), disk], clock=self.clock, write_behind=True)
        save(self.cache, TOKENS, 1400, logits=True)
        self.cache.write_back()
        self.ram = self.cache._kept.shelves[0]
        self.ram.remove(self.cache._kept.records[self.cache.checkpoints()[0].id])
        self.ram.tier.budget_bytes = budget  # pyright: ignore[reportAttributeAccessIssue]
        self.prefetcher = Prefetcher(self.cache)

    @property
    def tiers(self) -> tuple[str, ...]:
        return self.cache.checkpoints()[-1].tiers

    @property
    def counts(self) -> tuple[int, int, int]:
        stats = self.cache.stats()
        return stats.prefetched, stats.prefetch_used, stats.prefetch_wasted


def test_what_is_expected_is_in_memory_when_its_turn_comes(tmp_path):
    w = World(tmp_path)
    assert w.tiers == ("disk",)
    before = w.cache.checkpoints()[0]
    w.clock.now += 5
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert w.tiers == ("disk",), "it returned at once"
    assert w.prefetcher.work()
    assert not w.prefetcher.work()
    assert w.tiers == ("ram", "disk")
    assert w.counts == (1, 0, 0)
    info = w.cache.checkpoints()[0]
    assert (info.hits, info.age_s) == (before.hits, 5.0), "to be expected is not to be used"
    close_books(w.cache)
    with w.cache.match(TOKENS, SALT) as match:
        assert match.tier == "ram"
        assert same(match.read(), TOKENS, SALT)
    w.cache.match(TOKENS, SALT).release()
    assert w.counts == (1, 1, 0)


def test_memory_keeps_the_prefetched_arrays_as_they_are(tmp_path, monkeypatch):
    """The cache's lock is held while a checkpoint is put; copying there would delay every running turn."""
    w = World(tmp_path)
    copies: list[int] = []
    real = np.array
    monkeypatch.setattr("statecache.tiers.ram.np.array", lambda a, **k: (copies.append(a.nbytes), real(a, **k))[1])
    w.prefetcher.expect("socket", TOKENS, SALT)
    w.prefetcher.work()
    assert w.tiers == ("ram", "disk")
    assert sum(copies) <= 4 * 11, "only logits"


def test_unused_ones_that_have_to_go_are_counted_as_wasted(tmp_path):
    w = World(tmp_path)
    w.prefetcher.expect("socket", TOKENS, SALT)
    w.prefetcher.work()
    w.ram.tier.budget_bytes = 12_000  # pyright: ignore[reportAttributeAccessIssue]
    save(w.cache, context(2, 300), 300)
    assert w.tiers == ("disk",)
    assert w.counts == (1, 0, 1)


def test_a_client_that_leaves_before_it_is_read_costs_nothing(tmp_path):
    w = World(tmp_path)
    w.prefetcher.expect("socket", TOKENS, SALT)
    w.prefetcher.cancel("socket")
    assert not w.prefetcher.work()
    assert w.tiers == ("disk",)


def test_a_client_that_leaves_while_it_is_read_gets_nothing_into_memory(tmp_path, monkeypatch):
    w = World(tmp_path)
    read = DiskTier.read
    monkeypatch.setattr(DiskTier, "read", lambda *a: (w.prefetcher.cancel("socket"), read(*a))[1])
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert w.prefetcher.work()
    assert w.tiers == ("disk",)
    assert w.counts == (0, 0, 0)
    assert all(r.in_use == 0 for r in w.cache._kept.records.values())


def test_a_quarter_of_memory_is_the_most_that_is_brought_unasked(tmp_path):
    w = World(tmp_path, budget=40_000)
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert w.prefetcher.work()
    assert w.tiers == ("disk",)


def test_what_is_expected_leaves_memory_after_what_is_not(tmp_path):
    def left(expected: bool) -> set[bytes]:
        clock = Clock()
        cache = make(18_000, clock=clock)
        first, second = context(3, 400), context(4, 400)
        save(cache, first, 400)
        clock.now += 1
        save(cache, second, 400)
        cache.settle([info.id for info in cache.checkpoints()])
        if expected:
            assert not cache.expect(first, SALT, 60.0)
        clock.now += 30
        save(cache, context(5, 400), 400)
        return {t[:4].tobytes() for t in (first, second) if cache.depth(np.append(t, 1), SALT)}

    assert left(False) == {context(4, 400)[:4].tobytes()}
    assert left(True) == {context(3, 400)[:4].tobytes()}


def test_another_salt_or_an_unknown_context_expects_nothing(tmp_path):
    w = World(tmp_path)
    w.prefetcher.expect("a", TOKENS, OTHER_SALT)
    w.prefetcher.expect("b", context(9, 50), SALT)
    assert not w.prefetcher.work()


@pytest.mark.parametrize("bad", ["missing", "flipped"])
def test_a_bad_file_is_set_aside_and_nobody_notices(tmp_path, bad):
    w = World(tmp_path)
    for path in (tmp_path / "segments").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data) if bad == "flipped" else path.unlink()
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert w.prefetcher.work()
    assert w.cache.match(TOKENS, SALT).position == 0
    close_books(w.cache)


def test_it_works_in_the_background_and_ends(tmp_path, monkeypatch):
    w = World(tmp_path)
    done, put = w.cache.put_prefetched, threading.Event()
    monkeypatch.setattr(w.cache, "put_prefetched", lambda *arguments: (done(*arguments), put.set()))
    reader = Reader(w.prefetcher)
    reader.start()
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert put.wait(60)
    reader.close()
    assert w.tiers == ("ram", "disk")
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert not w.prefetcher.work(), "after close() nothing is taken"


def test_others_read_and_write_first_and_half_of_the_time_is_theirs():
    def pause(**changes: int) -> int:
        return prefetch_pause_us(**({"restoring": 0, "writing": 0, "waited_us": 0, "read_us": 0, "since_us": 0} | changes))

    assert pause() == 0
    assert pause(restoring=1, waited_us=1 << 40) == LOOK_AGAIN_US, "never before a turn"
    assert pause(writing=1) == LOOK_AGAIN_US
    assert pause(writing=1, waited_us=WRITES_FIRST_US - 5) == 5
    assert pause(writing=1, waited_us=WRITES_FIRST_US) == 0, "a server that always writes does not keep it for ever"
    assert pause(read_us=900, since_us=0) == 900
    assert pause(read_us=900, since_us=400) == 500
    assert pause(read_us=900, since_us=900) == pause(read_us=900, since_us=10_000) == 0
    assert pause(read_us=900_000, writing=1) == 900_000


def test_while_states_are_written_nothing_is_read_unasked(tmp_path):
    w = World(tmp_path)
    w.prefetcher._clock = w.clock
    writing = True
    reader = Reader(w.prefetcher, writing=lambda: writing, clock=w.clock)
    assert reader.work() is None
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert reader.work() == LOOK_AGAIN_US
    assert w.tiers == ("disk",)
    writing = False
    assert reader.work() == 0
    assert w.tiers == ("ram", "disk")
    assert reader.work() is None


def test_a_turn_that_waits_for_the_disk_stops_a_prefetch_of_something_else(tmp_path, monkeypatch):
    w = World(tmp_path)
    other = context(2, 800)
    save(w.cache, other, 700)
    w.cache.write_back()
    w.ram.remove(next(w.cache._kept.records[i.id] for i in w.cache.checkpoints() if i.position == 700))
    reader, read, asked = Reader(w.prefetcher), DiskTier.read, []

    def slow(tier, key, part):
        if not asked:
            asked.append(reader.read(w.cache.match(np.append(other, 1), SALT), lambda: None))
        return read(tier, key, part)

    monkeypatch.setattr(DiskTier, "read", slow)
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert reader.work() == 0
    assert w.tiers == ("disk",), "it gave way"
    assert reader.work() == 0
    assert asked[0].done
    assert same(asked[0].payload, other, SALT)
    asked[0].match.release()
    reader._read_us = 0
    assert reader.work() == 0
    assert w.tiers == ("ram", "disk"), "and is read afterwards"
    close_books(w.cache)


def test_a_turn_that_waits_for_what_is_being_prefetched_finds_it_in_memory(tmp_path, monkeypatch):
    w = World(tmp_path)
    reader, read, asked = Reader(w.prefetcher), DiskTier.read, []
    reads: list[bytes] = []

    def slow(tier, key, part):
        if not asked:
            asked.append(reader.read(w.cache.match(TOKENS, SALT), lambda: None))
        reads.append(key + part.encode())
        return read(tier, key, part)

    monkeypatch.setattr(DiskTier, "read", slow)
    w.prefetcher.expect("socket", TOKENS, SALT)
    assert reader.work() == 0
    assert w.tiers == ("ram", "disk")
    once = len(reads)
    assert reader.work() == 0
    assert same(asked[0].payload, TOKENS, SALT)
    assert len(reads) == once
    asked[0].match.release()
    assert all(r.in_use == 0 for r in w.cache._kept.records.values())
