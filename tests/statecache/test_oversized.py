"""Contexts that the memory tier cannot hold: what is new of them waits there, the disk gets it, and nothing else is lost."""

from __future__ import annotations

import errno
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statecache.durable import DiskSettings, open_states
from statecache.errors import TierError, TierFailed, TierFull
from statecache.policy import Policy
from statecache.staging import SHARE, fitting_ladder
from statecache.store import StateCache
from statecache.tiers.base import Tier
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind, Layout
from tests.statecache.faults import FaultyTier
from tests.statecache.test_failures import best
from tests.statecache.world import LAYOUT, NAMESPACE, SALT, close_books, context, make, save, truth

RAM = 24_000
"""Holds contexts of about 1,000 tokens."""


def behind(disk=None, ram: int = RAM, **kwargs) -> StateCache:
    tiers: list[Tier] = [RamTier(ram), disk or RamTier(1 << 22, name="disk")]
    return make(tiers=tiers, write_behind=True, **kwargs)


def copy_down(cache: StateCache) -> None:
    while cache.copy_next() is not None:
        close_books(cache)


def expected(error: TierError) -> bool:
    """No room, or what it builds on was given up for that."""
    assert isinstance(error, TierFull) or "is gone" in str(error), error
    return True


def grow(cache: StateCache, tokens: np.ndarray, step: int = 200, *, copying: bool = True) -> None:
    for position in range(step, len(tokens), step):
        save(cache, tokens, position, BoundaryKind.LADDER)
        close_books(cache)
        if copying:
            copy_down(cache)


def test_a_context_larger_than_memory_is_saved_and_survives_a_restart(tmp_path) -> None:
    tokens = context(1, 4_001)
    disk = DiskSettings(tmp_path, 1 << 24, 0, claim_wait_s=0.0)
    first = open_states(NAMESPACE, LAYOUT, RAM, disk)
    assert first.writer is not None
    for position in (*range(200, 4_000, 200), 4_000):
        save(first.cache, tokens, position, logits=position == 4_000, session="s")
        while not first.writer.flush(60.0):
            pass
        close_books(first.cache)
        assert first.cache.stats().tiers["ram"].used_bytes <= RAM
    infos = {i.position: i for i in first.cache.checkpoints("s")}
    assert infos[4_000].tier == "disk"
    assert best(first.cache, tokens[:4_000]) == 4_000
    first.close(60.0)
    second = open_states(NAMESPACE, LAYOUT, RAM, disk)
    assert best(second.cache, tokens) == 4_000
    assert best(second.cache, tokens[:3_333]) == 3_200
    close_books(second.cache)
    second.close()


def test_only_new_rows_are_asked_for_and_written() -> None:
    disk = RamTier(1 << 22, name="disk")
    cache, tokens = behind(disk), context(2, 3_000)
    grow(cache, tokens)
    assert cache.kv_missing_from(tokens, SALT, 2_990) == 2_800 // 64 * 64
    before = cache.stats().tiers["disk"].written_bytes
    result = save(cache, tokens, 2_990)
    assert (result.tier, result.existed) == ("disk", False)
    copy_down(cache)
    written = cache.stats().tiers["disk"].written_bytes - before
    assert written < (2_990 - 2_752) * LAYOUT.kv_token_bytes + 8_000
    assert save(cache, tokens, 2_990).existed


def test_nothing_of_it_is_matched_before_it_is_written() -> None:
    cache, tokens = behind(), context(3, 1_500)
    grow(cache, tokens[:1_000])
    assert best(cache, tokens) == 800
    result = save(cache, tokens, 1_200, session="s")
    assert result.checkpoint_id is not None
    assert best(cache, tokens) == 800
    assert cache.checkpoints("s") == []
    copy_down(cache)
    assert best(cache, tokens) == 1_200
    assert [i.position for i in cache.checkpoints("s")] == [1_200]


def test_the_source_may_change_while_it_waits() -> None:
    cache, tokens = behind(), context(3, 1_500)
    grow(cache, tokens[:1_000])
    start = cache.kv_missing_from(tokens, SALT, 1_200)
    payload = truth(tokens, SALT, 1_200, start=start)
    cache.put(tokens, SALT, Boundary(1_200, BoundaryKind.TURN), payload)
    payload.kv[0].rows[:] = 0
    for part in payload.state.values():
        part[:] = 0
    copy_down(cache)
    assert best(cache, tokens) == 1_200


def test_what_it_builds_on_is_written_first_even_if_nobody_chose_it() -> None:
    cache, tokens = behind(), context(4, 1_300)
    for position in (400, 800):  # in memory alone
        save(cache, tokens, position)
    for position in (1_000, 1_050):
        save(cache, tokens, position)
    assert cache.stats().waiting == 3
    copy_down(cache)
    assert {i.position: i.tiers for i in cache.checkpoints()} == {
        400: ("ram",),
        800: ("ram", "disk"),
        1_000: ("disk",),
        1_050: ("disk",),
    }


def test_when_the_disk_does_not_keep_up_memory_stays_bounded_and_later_ones_are_saved_again() -> None:
    cache, tokens = behind(), context(5, 6_000)
    grow(cache, tokens[:1_000])
    refused = 0
    for position in range(1_200, 2_400, 200):
        result = save(cache, tokens, position)
        refused += result.checkpoint_id is None
        close_books(cache)
    assert refused >= 3
    missing = cache.kv_missing_from(tokens, SALT, 2_400)
    assert missing == 2_400 // 64 * 64, "rows that would be refused are not copied out"
    copy_down(cache)
    reached = best(cache, tokens)
    assert reached in (1_200, 1_400)
    grow(cache, tokens[: reached + 500], 100)
    assert best(cache, tokens) > reached, "goes on from what was saved"


def test_a_first_prompt_far_beyond_memory_needs_no_more_than_its_ladder(tmp_path) -> None:
    """Nothing of it is there, and it passes memory in one go, rung by rung."""
    cache, tokens = behind(), context(6, 9_000)
    ladder = fitting_ladder(8_192, RAM, LAYOUT)
    assert 64 <= ladder < 600
    for position in range(ladder, 9_000, ladder):
        assert save(cache, tokens, position, BoundaryKind.LADDER).checkpoint_id, position
        copy_down(cache)
    assert best(cache, tokens) == (9_000 - 1) // ladder * ladder


@given(
    st.integers(0, 1 << 17),
    st.integers(1 << 12, 1 << 36),
    st.integers(1, 1 << 18),
    st.integers(0, 1 << 27),
    st.integers(1, 250_000),
)
def test_one_rung_always_finds_room_where_a_state_does(ladder, ram, kv, state, vocabulary) -> None:
    layout = Layout(kv, (("s", state),), vocabulary)
    fitting = fitting_ladder(ladder, ram, layout)
    assert 0 <= fitting <= ladder
    room = ram // SHARE - state - 4 * vocabulary
    if ladder and room >= 2 * 64 * (kv + 4):
        assert fitting >= min(ladder, 64)
        assert min(fitting + 63, ladder + 63) * (kv + 4) <= max(room, (ladder + 63) * (kv + 4))
        if fitting < ladder:
            assert (fitting + 63) * (kv + 4) <= room
    if not ladder:
        assert fitting == 0


def test_one_that_is_taken_back_is_never_seen_whether_it_waits_or_is_being_written() -> None:
    """A forward pass that ends in NaN takes back what it saved."""
    disk = FaultyTier(1 << 22, name="disk")
    cache, tokens = behind(disk), context(7, 1_500)
    grow(cache, tokens[:1_000])
    waits = save(cache, tokens, 1_100).checkpoint_id or ""
    assert cache.evict(waits)
    assert not cache.evict(waits)
    copy_down(cache)
    assert best(cache, tokens) == 800
    written = save(cache, tokens, 1_100).checkpoint_id or ""
    real, evicted = disk.put, []

    def put(key, header, parts, **kwargs):
        if not evicted:
            evicted.append(cache.evict(written))
        return real(key, header, parts, **kwargs)

    disk.put = put
    copy_down(cache)
    assert evicted == [True]
    assert best(cache, tokens) == 800
    disk.put = real
    base = next(i.id for i in cache.checkpoints() if i.position == 800)
    save(cache, tokens, 1_100)
    assert cache.evict(base), "what builds on it is given up with it"
    copy_down(cache)
    assert best(cache, tokens) == 600
    close_books(cache)
    assert cache.stats().waiting == 0


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_disk_that_fails_is_tried_again_in_order_and_loses_nothing(nth: int) -> None:
    disk = FaultyTier(1 << 22, name="disk")
    cache, tokens = behind(disk), context(8, 1_500)
    save(cache, tokens, 800)
    save(cache, tokens, 1_000)
    save(cache, tokens, 1_100)
    disk.fail_put_at = nth
    with pytest.raises(TierFailed):
        copy_down(cache)
    close_books(cache)
    copy_down(cache)
    assert best(cache, tokens) == 1_100
    assert all(r.in_use == 0 for r in cache._kept.records.values())


def test_a_disk_without_room_gives_up_what_waits_and_what_builds_on_it() -> None:
    cache, tokens = behind(RamTier(9_000, name="disk")), context(9, 1_500)
    for position in (800, 1_000, 1_100):
        save(cache, tokens, position)
    given_up = 0
    for _ in range(4):
        try:
            if cache.copy_next() is None:
                break
        except TierError as error:
            given_up += expected(error)
        close_books(cache)
    assert given_up >= 2
    assert cache._staging.items == {}
    assert best(cache, tokens) == 800, "memory still has what fits"
    assert all(r.in_use == 0 for r in cache._kept.records.values())


def test_a_full_disk_while_it_is_written_costs_only_that_checkpoint(tmp_path, monkeypatch) -> None:
    cache, tokens = behind(DiskTier(tmp_path / "d", 1 << 24, reserve_bytes=0, fsync=False)), context(10, 1_500)
    grow(cache, tokens[:1_000])
    save(cache, tokens, 1_100)
    real, calls = DiskTier._write, itertools.count()

    def full(tier, path, buffers):
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tier, path, buffers)

    monkeypatch.setattr(DiskTier, "_write", full)
    with pytest.raises(TierFull):
        copy_down(cache)
    with pytest.raises(TierError, match="was not written"):
        copy_down(cache)
    close_books(cache)
    assert best(cache, tokens) == 800
    assert not save(cache, tokens, 1_100).existed
    copy_down(cache)
    assert best(cache, tokens) == 1_100


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([0, 1]), st.integers(1, 40), st.sampled_from(["save", "copy", "fail", "evict", "fork"])),
        min_size=3,
        max_size=30,
    )
)
def test_any_order_of_saves_copies_failures_and_evictions_keeps_the_books(steps) -> None:
    disk = FaultyTier(60_000, name="disk")
    cache = behind(disk, ram=10_000)
    contexts = [context(20, 1_700), context(21, 1_700)]
    for which, size, what in steps:
        tokens = contexts[which]
        if what == "fork":
            contexts[which] = np.concatenate([tokens[: size * 20], context(30 + size, 1_700 - size * 20)])
        elif what == "evict":
            for info in cache.checkpoints()[:size:7]:
                cache.evict(info.id)
        else:
            depth = best(cache, tokens)
            save(cache, tokens, min(1_690, depth + 5 * size))
            disk.fail_put_at = size % 5 if what == "fail" else 0
            if what != "save":
                while True:
                    try:
                        if cache.copy_next() is None:
                            break
                    except TierFailed:
                        break
                    except TierError as error:
                        expected(error)
        close_books(cache)
        best(cache, tokens)  # reads it and compares every byte
    disk.fail_put_at = 0
    while cache._kept.waiting:
        try:
            cache.copy_next()
        except TierError as error:
            expected(error)
    assert cache._staging.items == {}
    assert all(r.in_use == 0 for r in cache._kept.records.values())
    close_books(cache)


def test_the_ladder_of_an_opened_cache_fits_its_memory(tmp_path) -> None:
    """98,304 B a token as a 30B attention model has, and memory for 11k tokens."""
    layout = Layout(98_304, (), 11)
    disk = DiskSettings(tmp_path, 1 << 30, 0, claim_wait_s=0.0)
    opened = open_states(NAMESPACE, layout, 1 << 30, disk, policy=Policy())
    assert opened.cache.policy.ladder_tokens == fitting_ladder(8_192, 1 << 30, layout) < 2_731
    opened.close()
    alone = open_states(NAMESPACE, layout, 1 << 30, None, policy=Policy())
    assert alone.cache.policy.ladder_tokens == 8_192
    alone.close()


def test_what_fits_memory_is_asked_again_when_its_budget_changes() -> None:
    cache = behind()
    staging = cache._staging
    assert [staging.passes(position) for position in (300, 600, 2_000, 500)] == [False, False, True, False]
    cache.set_budget("ram", RAM // 2)
    assert [staging.passes(position) for position in (600, 500, 300)] == [True, True, False]
    cache.set_budget("ram", 4 * RAM)
    assert not staging.passes(2_000)
