"""The background writer: nobody waits for it, it survives a bad disk, and its allowance holds."""

from __future__ import annotations

import errno
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statecache.tiers.disk as disk_module
from statecache.directory import claim, describe, folder_of, make_room, namespaces, size_of
from statecache.durable import DiskSettings, open_states
from statecache.errors import TierFailed, TierFull
from statecache.policy import LASTING, MESSAGE_ENDS, Policy, worth_disk
from statecache.store import StateCache
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind
from statecache.writer import HOUR_S, Allowance, Writer
from tests.statecache.faults import FaultyTier
from tests.statecache.test_failures import best
from tests.statecache.world import LAYOUT, NAMESPACE, SALT, close_books, context, make, save, truth


def settle(writer: Writer) -> None:
    assert writer.flush(60.0)


def states(tmp_path, **kwargs):
    disk = DiskSettings(tmp_path, 1 << 24, 0, claim_wait_s=kwargs.pop("claim_wait_s", 0.0))
    return open_states(NAMESPACE, LAYOUT, 1 << 20, disk, **kwargs)


def test_what_was_wanted_is_there_after_a_restart_and_nothing_else(tmp_path):
    tokens = context(1, 500)
    first = states(tmp_path)
    ids = [save(first.cache, tokens, position).checkpoint_id for position in (100, 300, 450)]
    assert first.writer is not None
    first.want([i for i in (ids[2], ids[0]) if i])
    settle(first.writer)
    first.close(0.0, everything=False)
    second = states(tmp_path)
    assert [(i.position, i.tiers) for i in second.cache.checkpoints()] == [(100, ("disk",)), (450, ("disk",))]
    assert best(second.cache, tokens) == 450
    close_books(second.cache)
    second.close()


def test_closing_writes_everything(tmp_path):
    tokens = context(2, 500)
    first = states(tmp_path)
    for position in (100, 300, 450):
        save(first.cache, tokens, position, logits=position == 450)
    first.close()
    second = states(tmp_path)
    assert best(second.cache, tokens[:450]) == 450
    assert len(second.cache.checkpoints()) == 3
    second.close()


def test_saves_and_matches_do_not_wait_for_the_disk(tmp_path):
    """The lower tier is stuck in a write; the store goes on, and the writer finishes when it may."""
    gate, inside = threading.Event(), threading.Event()

    class Stuck(RamTier):
        def put(self, key, header, parts, **kwargs):
            inside.set()
            assert gate.wait(60)
            return super().put(key, header, parts, **kwargs)

    cache = make(tiers=[RamTier(60_000), Stuck(1 << 20, name="disk")], write_behind=True)
    writer = Writer(cache)
    tokens = context(3, 200)
    first = save(cache, tokens, 150)
    writer.want([first.checkpoint_id or ""])
    assert inside.wait(60)
    for seed in range(100):  # more than the memory tier holds: the one that is being copied must stay
        assert save(cache, context(100 + seed, 150), 140).checkpoint_id
        assert best(cache, tokens) == 150
    gate.set()
    assert writer.close(60.0)
    assert cache.stats().tiers["disk"].checkpoints == 1
    close_books(cache)


def test_the_source_may_change_while_its_copy_waits_for_the_disk(tmp_path):
    opened, tokens = states(tmp_path), context(9, 300)
    payload = truth(tokens, SALT, 290)
    result = opened.cache.put(tokens, SALT, Boundary(290, BoundaryKind.TURN), payload)
    for array in (payload.kv[0].rows, *payload.state.values()):
        array[:] = 0
    opened.want([result.checkpoint_id or ""])
    opened.close()
    again = states(tmp_path)
    assert best(again.cache, tokens) == 290
    again.close()


def test_victims_that_still_wait_are_taken_last_and_counted(tmp_path):
    cache = make(tiers=[RamTier(6_000), RamTier(1 << 20, name="disk")], write_behind=True)
    first = save(cache, context(4, 100), 100)
    cache.want([first.checkpoint_id or ""])
    save(cache, context(5, 100), 100)
    save(cache, context(6, 100), 100)
    assert best(cache, np.append(context(4, 100), 1)) == 100
    assert best(cache, np.append(context(5, 100), 1)) == 0
    for seed in range(3):
        ids = save(cache, context(7 + seed, 100), 100).checkpoint_id
        cache.want([ids or ""])
    stats = cache.stats()
    assert stats.dropped >= 1
    assert stats.waiting <= 2
    close_books(cache)


def test_a_failing_disk_is_told_once_and_used_again_when_it_works(tmp_path, monkeypatch, caplog):
    opened = states(tmp_path)
    cache, writer = opened.cache, opened.writer
    assert writer is not None
    real = disk_module.os.rename

    def read_only(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk_module.os, "rename", read_only)
    for seed in range(4):
        cache.want([save(cache, context(seed, 150), 140).checkpoint_id or ""])
        assert not writer.flush(5.0)
    assert "Read-only" in writer.trouble
    assert sum("stay in memory only" in r.message for r in caplog.records) == 1
    assert best(cache, context(0, 150)) == 140
    monkeypatch.setattr(disk_module.os, "rename", real)
    settle(writer)
    assert writer.trouble == ""
    assert cache.stats().tiers["disk"].checkpoints == 4
    close_books(cache)
    opened.close()


def test_one_directory_has_one_writer(tmp_path):
    first = states(tmp_path)
    second = states(tmp_path)
    assert second.writer is None
    save(first.cache, context(1, 100), 90)
    first.close()
    third = states(tmp_path)
    assert best(third.cache, context(1, 100)) == 90
    third.close()
    held = claim(folder_of(tmp_path, NAMESPACE), wait_s=0)
    with pytest.raises(TierFailed, match="another process"):
        claim(folder_of(tmp_path, NAMESPACE), wait_s=0)
    held.release()


def test_unused_models_make_room_oldest_first(tmp_path):
    for name in (b"1" * 32, b"2" * 32):
        other = open_states(name, LAYOUT, 1 << 20, DiskSettings(tmp_path, 1 << 24, 0), model=name[:1].decode())
        save(other.cache, context(1, 3000), 2900)
        other.close()
        time.sleep(0.02)
    sizes = [a.model for a in namespaces(tmp_path)]
    assert sizes == ["2", "1"]
    small = open_states(NAMESPACE, LAYOUT, 1 << 20, DiskSettings(tmp_path, 150_000, 0), model="3")
    assert [a.model for a in namespaces(tmp_path)] == ["3", "2"]
    assert 0 < small.cache.stats().tiers["disk"].budget_bytes < 150_000
    small.close()


def test_a_disk_that_cannot_be_used_leaves_memory(tmp_path):
    (tmp_path / "file").write_text("")
    opened = states(tmp_path / "file")
    assert opened.writer is None
    save(opened.cache, context(1, 100), 90)
    assert best(opened.cache, context(1, 100)) == 90
    opened.close()


def test_a_checkpoint_that_gets_its_logits_later_is_completed_on_disk(tmp_path):
    cache = make(tiers=[RamTier(1 << 20), RamTier(1 << 20, name="disk")], write_behind=True)
    tokens = context(8, 140)
    save(cache, tokens, 140)
    assert cache.write_back() > 0
    assert save(cache, tokens, 140, BoundaryKind.PROMPT_END, logits=True).existed
    written = cache.write_back()
    assert 0 < written < 1000
    assert cache.write_back() == 0
    close_books(cache)
    lower = FaultyTier(name="disk")
    assert lower.used_bytes == 0


@given(
    per_hour=st.integers(1, 10**12), spent=st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 4 * HOUR_S)), max_size=20)
)
def test_an_allowance_never_lets_much_more_through_than_it_says(per_hour, spent):
    allowance, now, total, largest = Allowance(per_hour), 0, 0, 0
    for nbytes, pause in spent:
        now += pause
        if allowance.wait_s(now) == 0:
            allowance.spend(nbytes)
            total, largest = total + nbytes, max(largest, nbytes)
    assert total <= per_hour + now * per_hour // HOUR_S + largest
    wait = allowance.wait_s(now)
    assert wait == 0 or allowance.wait_s(now + wait) == 0


@given(st.dictionaries(st.integers(1, 10**6), st.sampled_from(list(BoundaryKind)), max_size=30), st.integers(0, 4))
def test_what_goes_to_disk_of_a_turn(placed, ends):
    boundaries = [Boundary(p, k) for p, k in placed.items()]
    chosen = worth_disk(boundaries, Policy(durable_ends=ends))
    assert [b.position for b in chosen] == sorted({b.position for b in chosen}, reverse=True)
    assert all(b in chosen for b in boundaries if b.kind in LASTING)
    messages = sorted((b for b in boundaries if b.kind in MESSAGE_ENDS), key=lambda b: -b.position)
    assert [b for b in chosen if b.kind in MESSAGE_ENDS] == messages[: min(2, ends)]
    every = worth_disk(boundaries, Policy(durable_ends=ends), lambda kind, rank: True)
    assert [b for b in every if b.kind in MESSAGE_ENDS] == messages[:ends]
    least = worth_disk(boundaries, Policy(durable_ends=ends), lambda kind, rank: False)
    assert [b for b in least if b.kind in MESSAGE_ENDS] == messages[: min(1, ends)]
    others = [b for b in chosen if b.kind not in LASTING | MESSAGE_ENDS]
    assert len(others) <= max(0, min(2, ends) - len(messages))
    assert len({b.kind for b in others}) == len(others)


def test_the_places_that_agents_come_back_to_go_to_disk():
    kind, chosen = BoundaryKind, lambda placed: [b.position for b in worth_disk(placed, Policy())]
    answer = [Boundary(130, kind.CALL_OPEN), Boundary(150, kind.TURN)]
    asks = [
        Boundary(36, kind.SHADOW),
        Boundary(92, kind.TOOL_RESULT),
        Boundary(96, kind.THINK_OPEN),
        Boundary(100, kind.PROMPT_END),
    ]
    assert chosen(asks + answer) == [150, 92], "where a template drops the words that ask, and where the next turn appends"
    rewritten = [Boundary(20, kind.SYSTEM), Boundary(40, kind.TURN), Boundary(92, kind.USER), Boundary(100, kind.PROMPT_END)]
    assert chosen(rewritten + answer) == [150, 92, 20]
    third = worth_disk(rewritten + answer, Policy(), lambda kind, rank: True)
    assert [b.position for b in third] == [150, 92, 40, 20], "and where the last message began, if that was seen to help"
    many = [Boundary(p, kind.USER) for p in (50, 60, 70, 80)]
    assert chosen(many + answer) == [150, 80]
    plain = [
        Boundary(744, kind.SHADOW),
        Boundary(936, kind.SHADOW),
        Boundary(1000, kind.PROMPT_END),
        Boundary(512, kind.LADDER),
    ]
    assert chosen(plain) == [1000, 936, 512], "of a prompt without known messages its end, and the nearer shadow"
    far = [Boundary(40, kind.USER), Boundary(1000, kind.PROMPT_END)]
    assert chosen(far) == [1000, 40], "a prompt's end is dropped only for a message that ends just before it"
    assert chosen([*far, Boundary(1010, kind.PARTIAL)]) == [1000, 40]


def test_what_a_running_turn_placed_is_evicted_last():
    """Otherwise the places that a turn will choose at its end are gone by then: they are close together and save little."""
    cache = make(tiers=[RamTier(5_600), RamTier(1 << 20, name="disk")], write_behind=True)
    settled = save(cache, context(50, 100), 100).checkpoint_id
    cache.settle([settled or ""])
    cache.match(np.append(context(50, 100), 1), SALT).release()  # worth more by its use
    running = context(51, 130)
    for position in (100, 101):
        save(cache, running, position, BoundaryKind.SHADOW)
    save(cache, context(52, 100), 100, BoundaryKind.SYSTEM)
    assert best(cache, np.append(context(50, 100), 1)) == 0
    assert best(cache, running) == 101
    close_books(cache)


def test_another_salt_still_matches_nothing_from_disk(tmp_path):
    first = states(tmp_path)
    save(first.cache, context(1, 100), 90)
    first.close()
    second = states(tmp_path)
    assert best(second.cache, context(1, 100), b"z" * 32) == 0
    assert best(second.cache, context(1, 100), SALT) == 90
    second.close()


def test_workers_of_one_namespace_have_directories_and_rows_of_their_own(tmp_path):
    index = f"sqlite:///{tmp_path / 'index.db'}"
    tokens = {0: context(3, 500), 1: context(4, 500)}
    beside = ("m", "m/1")

    def opened(worker: int):
        disk = DiskSettings(tmp_path / "root", 1 << 24, 0, claim_wait_s=0.0, index_url=index, worker=worker, beside=beside)
        return open_states(NAMESPACE, LAYOUT, 1 << 20, disk, model="m")

    both = {worker: opened(worker) for worker in tokens}
    for worker, states_of in both.items():
        assert states_of.writer is not None, "each has claimed its own"
        save(states_of.cache, tokens[worker], 450, session=f"s{worker}")
        states_of.close()
    assert sorted(a.label for a in namespaces(tmp_path / "root")) == ["m", "m/1"]
    again = {worker: opened(worker) for worker in tokens}
    for worker, states_of in again.items():
        assert best(states_of.cache, tokens[worker]) == 450
        assert best(states_of.cache, tokens[1 - worker]) == 0
        assert states_of.cache.sessions() == {f"s{worker}": 450}
        states_of.close()


def test_workers_that_run_together_share_a_budget_in_any_order_and_remove_none_of_each_other(tmp_path):
    beside = ("m", "m/1", "n")
    for model, worker, nbytes in (("m", 0, 50_000), ("m", 1, 60_000), ("old", 0, 30_000)):
        folder = folder_of(tmp_path, model.encode().ljust(32, b"."), worker)
        folder.mkdir(parents=True)
        describe(folder, model.encode().ljust(32, b"."), model, LAYOUT, worker)
        (folder / "bytes").write_bytes(bytes(nbytes))
    budget = 90_000
    old = size_of(folder_of(tmp_path, b"old".ljust(32, b".")))
    for model, worker in (("n", 0), ("m", 1), ("m", 0)):
        room = make_room(tmp_path, folder_of(tmp_path, model.encode().ljust(32, b"."), worker), budget, beside)
        assert room == (budget - old) // 3
    assert len(namespaces(tmp_path)) == 3
    # Alone, with the same budget, the second worker's directory of before is one of the unused.
    assert make_room(tmp_path, folder_of(tmp_path, b"m".ljust(32, b".")), budget) == budget - old
    assert [a.label for a in namespaces(tmp_path)].count("m/1") == 0


def test_what_follows_copies_is_done_once_for_many_of_them():
    cache = make(tiers=[RamTier(1 << 20), RamTier(1 << 20, name="disk")], write_behind=True)
    left: list[int] = []

    def after() -> float:
        left.append(cache.stats().waiting)
        return 60.0

    writer = Writer(cache, after_copies=after)
    writer.close()
    left.clear()
    tokens = context(7, 700)
    cache.want([save(cache, tokens, position).checkpoint_id or "" for position in range(100, 140)])
    settle(writer)
    assert left == [24, 8, 0]


def several(tier: DiskTier) -> tuple[StateCache, list[str]]:
    """A cache over memory and this, and three checkpoints that wait."""
    cache = make(tiers=[RamTier(1 << 20), tier], write_behind=True)
    ids = [save(cache, context(seed, 200), 190).checkpoint_id or "" for seed in range(3)]
    cache.want(ids)
    return cache, ids


def test_those_that_could_not_be_sealed_together_wait_in_order_and_are_sealed_later(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 24, reserve_bytes=0)
    cache, ids = several(tier)

    def broken(_tier, _folder):
        raise OSError(errno.EIO, "no sync")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_sync_directory", broken)
        with pytest.raises(TierFailed, match="no sync"):
            cache.copy_next(8)
    close_books(cache)
    assert list(cache._kept.waiting) == ids
    assert tier.unsealed
    assert cache.copy_next(8) == 0, "they are written already"
    assert cache.copy_next(8) is None
    assert not tier.unsealed
    close_books(cache)
    after = make(tiers=[DiskTier(tmp_path, 1 << 24, reserve_bytes=0)])
    after.recover()
    assert [best(after, context(seed, 200)) for seed in range(3)] == [190] * 3


def test_one_that_fails_behind_others_costs_them_nothing_and_is_told_by_the_next_call(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 24, reserve_bytes=0)
    cache, ids = several(tier)
    real, calls = DiskTier._write, itertools.count()

    def full(tier: DiskTier, path: str, buffers) -> None:
        if next(calls) == 2:  # the second one's blocks
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tier, path, buffers)

    monkeypatch.setattr(DiskTier, "_write", full)
    assert cache.copy_next(8)
    assert not tier.unsealed
    with pytest.raises(TierFull):
        cache.copy_next(8)
    assert cache.copy_next(8)
    assert cache.copy_next(8) is None
    assert [i in cache._kept.shelves[1].holdings for i in ids] == [True, False, True]
    close_books(cache)
