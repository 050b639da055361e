"""What a match returns, what a put keeps, and why a context diverged."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from statecache.blocks import Block
from statecache.errors import PayloadMismatch
from statecache.policy import Policy
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind, Divergence, KvRun, Payload
from tests.statecache.world import LAYOUT, OTHER_SALT, SALT, Clock, close_books, context, make, same, save, truth


def position_of(cache, tokens, salt=SALT, **kwargs):
    with cache.match(tokens, salt, **kwargs) as match:
        return match.position


@pytest.mark.parametrize("position", [1, 3, 63, 64, 65, 127, 128, 129, 200])
def test_restored_bytes_equal_saved_bytes_at_any_position(position):
    cache, tokens = make(), context(0, 201)
    save(cache, tokens, position)
    with cache.match(tokens, SALT) as match:
        assert match.position == position
        assert match.tier == "ram"
        assert match.kind is BoundaryKind.TURN
        assert same(match.read(), tokens, SALT)
        out = np.zeros((300, LAYOUT.kv_token_bytes), dtype=np.uint8)
        payload = match.read(out)
        assert [run.start for run in payload.kv] == [0]
        assert same(payload, tokens, SALT)
        assert out[:position].tobytes() == payload.kv[0].rows.tobytes()
        assert not out[position:].any()
    close_books(cache)


def test_an_identical_prompt_needs_its_logits_to_match_whole():
    cache, tokens = make(), context(1, 128)
    save(cache, tokens, 100)
    save(cache, tokens, 128, BoundaryKind.PROMPT_END)
    assert position_of(cache, tokens) == 100
    result = save(cache, tokens, 128, BoundaryKind.PROMPT_END, logits=True)
    assert result.existed
    assert result.written_bytes >= 4 * LAYOUT.vocab_size
    with cache.match(tokens, SALT) as match:
        assert match.position == 128
        payload = match.read()
        assert payload.logits is not None
        assert same(payload, tokens, SALT)
    assert position_of(cache, tokens, limit=127) == 100
    close_books(cache)


def test_a_match_never_goes_beyond_its_limit():
    cache, tokens = make(), context(2, 300)
    for position in (50, 100, 250):
        save(cache, tokens, position)
    assert [position_of(cache, tokens, limit=n) for n in (300, 250, 249, 100, 50, 49, 0)] == [250, 250, 100, 100, 50, 0, 0]


def test_only_missing_rows_have_to_be_brought_and_are_written():
    cache, tokens = make(), context(3, 1000)
    first = save(cache, tokens, 640)
    assert cache.kv_missing_from(tokens, SALT, 1000) == 640
    assert cache.kv_missing_from(tokens, SALT, 600) == 576
    second = save(cache, tokens, 840)
    third = save(cache, tokens, 830)
    block = 64 * LAYOUT.kv_token_bytes
    assert first.written_bytes > 10 * block
    assert 3 * block < second.written_bytes < 3 * block + 5000
    assert third.written_bytes < 3 * block
    other = np.concatenate([tokens[:700], context(4, 300)])
    assert cache.kv_missing_from(other, SALT, 1000) == 640
    assert cache.kv_missing_from(tokens, OTHER_SALT, 1000) == 0
    close_books(cache)


def test_a_put_of_what_is_there_writes_nothing_and_takes_the_better_kind():
    cache, tokens = make(), context(5, 200)
    first = save(cache, tokens, 150, BoundaryKind.SHADOW)
    again = save(cache, tokens, 150, BoundaryKind.SYSTEM)
    assert (again.checkpoint_id, again.written_bytes, again.existed) == (first.checkpoint_id, 0, True)
    (info,) = cache.checkpoints()
    assert info.kind is BoundaryKind.SYSTEM


def test_the_source_may_be_overwritten_after_put():
    cache, tokens = make(), context(6, 100)
    payload = truth(tokens, SALT, 100)
    cache.put(tokens, SALT, Boundary(100, BoundaryKind.TURN), payload)
    payload.kv[0].rows[:] = 0
    for array in payload.state.values():
        array[:] = 0
    with cache.match(np.append(tokens, 7), SALT) as match:
        restored = match.read()
    assert same(restored, tokens, SALT)
    with pytest.raises(ValueError, match="read-only"):
        restored.state["delta"][0] = 1


@pytest.mark.parametrize(
    "change",
    [
        {"position": 99},
        {"state": {"delta": np.zeros(24, np.uint8)}},
        {"state": {"delta": np.zeros(24, np.uint8), "conv": np.zeros(7, np.uint8)}},
        {"logits": np.zeros(10, np.float32)},
        {"kv": (KvRun(0, np.zeros((99, 8), np.uint8)),)},
        {"kv": (KvRun(0, np.zeros((50, 8), np.uint8)), KvRun(51, np.zeros((49, 8), np.uint8)))},
        {"kv": (KvRun(0, np.zeros((100, 7), np.uint8)),)},
        {"kv": (KvRun(0, np.zeros((100, 8), np.int8)),)},
    ],
    ids=["position", "absent", "short-state", "logits", "short-kv", "gap", "width", "dtype"],
)
def test_components_that_do_not_fit_are_refused_and_leave_nothing(change):
    cache, tokens = make(), context(7, 100)
    good = truth(tokens, SALT, 100)
    fields = {"position": 100, "kv": good.kv, "state": good.state, "logits": None} | change
    with pytest.raises(PayloadMismatch):
        cache.put(tokens, SALT, Boundary(100, BoundaryKind.TURN), Payload(**fields))
    assert position_of(cache, np.append(tokens, 1)) == 0
    assert cache.stats().tiers["ram"].used_bytes == 0


def test_rows_that_begin_too_late_are_not_kept():
    cache, tokens = make(), context(8, 300)
    result = cache.put(tokens, SALT, Boundary(300, BoundaryKind.TURN), truth(tokens, SALT, 300, start=128))
    assert result.checkpoint_id is None
    assert "begin at 128" in result.reason
    close_books(cache)


# ── divergence ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_divergence_says_where_and_why():
    cache, tokens = make(policy=Policy(slack_permille=0, tell_other_salts=True)), context(9, 400)
    system = save(cache, tokens, 200, BoundaryKind.SYSTEM)
    end = save(cache, tokens, 400)
    edited = tokens.copy()
    edited[300:] = context(10, 100)

    def why(t, salt=SALT):
        with cache.match(t, salt) as match:
            return match.divergence

    assert why(context(11, 50)) == Divergence(0, "cold")
    assert why(np.append(tokens, 5)) == Divergence(400, "none")
    assert why(tokens[:350]) == Divergence(350, "none")
    assert why(edited) == Divergence(300, "tokens")
    assert why(tokens, OTHER_SALT) == Divergence(0, "salt")
    assert end.checkpoint_id is not None
    assert cache.evict(end.checkpoint_id)
    assert why(np.append(tokens, 5)) == Divergence(400, "evicted")
    assert why(edited) == Divergence(300, "tokens")
    assert system.checkpoint_id is not None
    assert cache.evict(system.checkpoint_id)
    assert why(edited) == Divergence(300, "evicted")
    save(cache, tokens, 400)
    assert why(np.append(tokens, 5)) == Divergence(400, "none")
    close_books(cache)


def test_by_default_nobody_learns_what_other_principals_have():
    cache, tokens = make(policy=Policy()), context(12, 100)
    save(cache, tokens, 90)
    with cache.match(tokens, OTHER_SALT) as match:
        assert match.divergence == Divergence(0, "cold")


def test_remembered_paths_are_bounded():
    cache = make(policy=Policy(remembered_checkpoints=3, remembered_tokens=1000))
    for seed in range(10):
        result = save(cache, context(seed, 200), 200)
        assert result.checkpoint_id is not None
        cache.evict(result.checkpoint_id)
    stats = cache.stats()
    assert (stats.index_marks, stats.index_tokens) == (3, 600)
    assert stats.tiers["ram"].used_bytes == 0


# ── eviction ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_tier_evicts_the_least_worthy_and_stays_within_budget():
    clock = Clock()
    cache, tokens = make(12_000, clock=clock), context(13, 2000)
    save(cache, tokens, 128, BoundaryKind.SYSTEM)
    for seed in range(20, 40):
        clock.now += 60
        branch = np.concatenate([tokens[:128], context(seed, 200)])
        save(cache, branch, 300, BoundaryKind.SHADOW)
        save(cache, branch, 328, BoundaryKind.TURN)
        close_books(cache)
    stats = cache.stats().tiers["ram"]
    assert stats.evictions > 10
    kinds = [info.kind for info in cache.checkpoints()]
    assert BoundaryKind.SYSTEM in kinds
    assert kinds.count(BoundaryKind.TURN) >= kinds.count(BoundaryKind.SHADOW)
    newest = np.concatenate([tokens[:128], context(39, 200), [1]])
    assert position_of(cache, newest) == 328


def test_what_was_evicted_is_freed_without_the_garbage_collector():
    """A process that serves freezes what it loaded, which then is never looked at for cycles."""
    cache, tokens = make(12_000), context(13, 2000)

    def alive() -> int:
        return sum(type(found) is Block for found in gc.get_objects())

    gc.collect()
    gc.disable()
    before = alive()
    try:
        for seed in range(20, 40):
            save(cache, np.concatenate([tokens[:128], context(seed, 200)]), 328, BoundaryKind.TURN)
        assert cache.stats().tiers["ram"].evictions > 10
        assert alive() - before == cache.stats().tiers["ram"].blocks
    finally:
        gc.enable()


def test_pinned_and_used_checkpoints_survive_and_a_full_tier_is_no_error():
    cache = make(5_000)
    a, b, c = (context(seed, 100) for seed in (1, 2, 3))
    first = save(cache, a, 100, session="s")
    assert first.checkpoint_id is not None
    assert cache.pin(first.checkpoint_id, "s")
    save(cache, b, 100)
    match = cache.match(np.append(b, 0), SALT)
    assert match.position == 100
    refused = save(cache, c, 100)
    assert refused.checkpoint_id is None
    assert not cache.evict(first.checkpoint_id)
    assert same(match.read(), b, SALT)
    match.release()
    match.release()
    assert save(cache, c, 100).checkpoint_id is not None
    assert position_of(cache, np.append(a, 0)) == 100
    assert position_of(cache, np.append(b, 0)) == 0
    cache.forget("s")
    assert save(cache, b, 100).checkpoint_id is not None
    close_books(cache)


def test_a_checkpoint_larger_than_the_tier_is_refused_without_evicting():
    cache = make(4_000)
    save(cache, context(1, 100), 100)
    assert save(cache, context(2, 2000), 2000).checkpoint_id is None
    assert len(cache.checkpoints()) == 1


def test_victims_move_to_the_next_tier_and_come_back_from_there():
    disk = RamTier(1 << 20, name="disk")
    cache = make(tiers=[RamTier(4_000), disk])
    contexts = [context(seed, 150) for seed in range(8)]
    for tokens in contexts:
        save(cache, tokens, 130, session="s")
        close_books(cache)
    tiers = set()
    for tokens in contexts:
        with cache.match(tokens, SALT) as match:
            assert match.position == 130
            tiers.add(match.tier)
            assert same(match.read(), tokens, SALT)
    assert tiers == {"ram", "disk"}
    assert len(cache.checkpoints("s")) == 8
    again = save(cache, contexts[0], 130)
    assert again.existed
    assert again.written_bytes > 0
    assert position_of(cache, contexts[0]) == 130
    close_books(cache)


def test_sessions_list_what_they_placed_or_used_and_forget_it():
    cache, tokens = make(), context(14, 300)
    save(cache, tokens, 100, session="a")
    save(cache, tokens, 200, session="a")
    assert position_of(cache, tokens, session="b") == 200
    assert [i.position for i in cache.checkpoints("a")] == [100, 200]
    assert [(i.position, i.hits) for i in cache.checkpoints("b")] == [(200, 1)]
    cache.forget("a")
    cache.forget("a")
    assert cache.checkpoints("a") == []
    assert position_of(cache, tokens) == 200
    close_books(cache)


def test_counters_add_up():
    cache, tokens = make(), context(15, 200)
    save(cache, tokens, 150)
    position_of(cache, tokens)
    position_of(cache, context(16, 20))
    stats = cache.stats()
    assert (stats.matches, stats.misses, stats.matched_tokens, stats.asked_tokens) == (2, 1, 150, 220)
    assert stats.tiers["ram"].written_bytes == stats.tiers["ram"].used_bytes


def test_helper_threads_may_match_and_read_while_another_one_saves():
    cache = make(20_000)
    contexts = [context(seed, 250) for seed in range(8)]
    stop = threading.Event()

    def read_on(seed: int) -> int:
        pick, restored = np.random.default_rng(seed), 0
        while not stop.is_set():
            tokens = contexts[pick.integers(len(contexts))]
            with cache.match(tokens, SALT) as match:
                payload = match.read()
                assert payload.position == match.position
                assert not payload.position or same(payload, tokens, SALT)
                restored += payload.position > 0
        return restored

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read_on, seed) for seed in range(3)]
        try:
            for n in range(120):
                save(cache, contexts[n % len(contexts)], 100 + n % 140)
        finally:
            stop.set()
        restored = [reader.result() for reader in readers]
    assert sum(restored) > 0
    assert cache.stats().tiers["ram"].evictions > 0
    close_books(cache)
