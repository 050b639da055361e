"""Budgets that change while states lie there: evicted down in pieces, reads go on, room is used again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from statecache.durable import DiskSettings, open_states
from statecache.errors import TierFull
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.trim import LOOK_AGAIN_S, PIECE
from tests.statecache.test_failures import best
from tests.statecache.world import LAYOUT, NAMESPACE, SALT, Clock, close_books, context, make, same, save

COUNT = 30


class World:
    """Thirty contexts of their own, each in memory and on disk."""

    def __init__(self, tmp_path) -> None:
        self.clock = Clock()
        self.disk = DiskTier(tmp_path / "segments", 1 << 24, reserve_bytes=0, fsync=False)
        self.ram = RamTier(1 << 24)
        self.cache = make(tiers=[self.ram, self.disk], clock=self.clock, write_behind=True)
        for seed in range(COUNT):
            self.clock.now += 1
            save(self.cache, context(seed, 300), 290)
        self.cache.write_back()

    def tier(self, name: str) -> RamTier | DiskTier:
        return self.ram if name == "ram" else self.disk

    def count(self, name: str) -> int:
        return self.cache.stats().tiers[name].checkpoints  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["ram", "disk"])
def test_a_budget_below_what_is_used_is_reached_in_pieces(tmp_path, name):
    w = World(tmp_path)
    budget = w.tier(name).used_bytes // 3
    assert w.cache.set_budget(name, budget)
    counts = [w.count(name)]
    assert counts == [COUNT], "nothing yet: no one call evicts it all"
    while w.cache.trim():
        counts.append(w.count(name))
    assert all(0 <= a - b <= PIECE for a, b in itertools.pairwise(counts))
    assert len(counts) > 2
    assert 0 < w.tier(name).used_bytes <= budget
    assert not w.cache.trim()
    close_books(w.cache)
    other = "disk" if name == "ram" else "ram"
    assert w.count(other) == COUNT, "the other tier keeps its own"
    assert best(w.cache, context(0, 300)) == best(w.cache, context(COUNT - 1, 300)) == 290


def test_what_is_being_read_stays_and_goes_later(tmp_path):
    w = World(tmp_path)
    w.cache.set_budget("ram", 0)
    while w.cache.trim():
        pass
    match = w.cache.match(np.append(context(3, 300), 1), SALT)
    assert match.tier == "disk"
    w.cache.set_budget("disk", 0)
    while w.cache.trim():
        pass
    assert w.count("disk") == 1
    assert same(match.read(), context(3, 300), SALT)
    match.release()
    assert not w.cache.trim(), "it is not looked for in every step"
    w.clock.now += LOOK_AGAIN_S
    assert w.cache.trim()
    assert (w.count("disk"), w.disk.used_bytes) == (0, 0)
    assert not list(w.disk.root.glob("??/*"))


def test_a_pinned_one_stays(tmp_path):
    w = World(tmp_path)
    pinned = w.cache.checkpoints()[5].id
    w.cache.pin(pinned, "s")
    for name in ("ram", "disk"):
        w.cache.set_budget(name, 0)
    while w.cache.trim():
        pass
    assert [(i.id, i.tiers) for i in w.cache.checkpoints()] == [(pinned, ("ram", "disk"))]


def test_nothing_is_written_to_a_tier_that_shrinks_and_what_waits_is_written_after(tmp_path):
    w = World(tmp_path)
    waits = save(w.cache, context(99, 300), 290).checkpoint_id
    w.cache.set_budget("disk", w.disk.used_bytes // 2)
    w.cache.want([waits or ""])
    assert w.cache.copy_next() is None
    assert w.count("disk") == COUNT
    while w.cache.trim():
        pass
    assert w.cache.copy_next()
    assert waits in {i.id for i in w.cache.checkpoints() if "disk" in i.tiers}
    assert w.disk.used_bytes <= w.disk.budget_bytes
    close_books(w.cache)


def test_a_save_while_memory_shrinks_is_refused_and_evicts_nothing(tmp_path):
    w = World(tmp_path)
    w.cache.set_budget("ram", w.ram.used_bytes // 2)
    assert save(w.cache, context(99, 300), 290).checkpoint_id is None
    assert w.count("ram") == COUNT
    while w.cache.trim():
        pass
    assert save(w.cache, context(99, 300), 290).checkpoint_id
    with pytest.raises(TierFull):
        w.cache._kept.make_room(w.cache._kept.shelves[0], w.ram.budget_bytes + 1)


def test_a_larger_budget_is_used_at_once(tmp_path):
    w = World(tmp_path)
    w.cache.set_budget("ram", w.ram.used_bytes)
    save(w.cache, context(98, 300), 290)
    assert w.count("ram") == COUNT
    w.cache.set_budget("ram", 1 << 24)
    assert not w.cache.trim()
    for seed in range(100, 110):
        save(w.cache, context(seed, 300), 290)
    assert w.count("ram") == COUNT + 10
    assert not w.cache.set_budget("device", 5)


def test_a_restart_has_the_configured_budget_and_the_trimmed_states(tmp_path):
    """A change holds for the process; who wants it to last sets it. `agentserve cache quota` says so."""

    def opened():
        return open_states(NAMESPACE, LAYOUT, 1 << 20, DiskSettings(tmp_path, 1 << 24, 0))

    states = opened()
    for seed in range(10):
        save(states.cache, context(seed, 300), 290)
    states.close()
    states = opened()
    before = states.cache.stats().tiers["disk"]
    ladder = states.cache.policy.ladder_tokens
    assert states.set_budgets(1 << 14, before.used_bytes // 2) == ""
    assert states.cache.policy.ladder_tokens < ladder
    while states.cache.trim():
        pass
    smaller = states.cache.stats().tiers["disk"]
    assert smaller.used_bytes <= smaller.budget_bytes == before.used_bytes // 2
    assert states.set_budgets(1 << 20, None) == ""
    assert states.cache.policy.ladder_tokens == ladder
    states.close()
    states = opened()
    after = states.cache.stats().tiers["disk"]
    assert (after.budget_bytes, after.checkpoints) == (before.budget_bytes, smaller.checkpoints)
    assert 0 < after.checkpoints < 10
    states.close()


def test_without_a_disk_tier_its_budget_cannot_be_set():
    states = open_states(NAMESPACE, LAYOUT, 1 << 20)
    assert "no disk tier" in states.set_budgets(1 << 19, 1 << 30)
    assert states.cache.stats().tiers["ram"].budget_bytes == 1 << 20, "all or nothing"
    assert states.set_budgets(1 << 19, None) == ""
    states.close()
