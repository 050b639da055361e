"""Ways in which other state caches have failed, each played against this one.

All saved state is a function of the whole prefix, so `same()` is false for anything that belongs elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest

from statecache.errors import PayloadMismatch
from statecache.keys import namespace, xxh3_128
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind
from tests.statecache.faults import FaultyTier
from tests.statecache.test_keys import FIELDS
from tests.statecache.world import LAYOUT, OTHER_SALT, SALT, close_books, context, make, same, save, truth


def best(cache, tokens, salt=SALT) -> int:
    """Restore like the worker does, check the bytes, return the position really restored."""
    with cache.match(tokens, salt) as match:
        payload = match.read()
        assert payload.position == match.position
        assert not payload.position or same(payload, tokens, salt)
        return payload.position


def test_state_ahead_of_its_position_is_refused():
    cache, tokens = make(), context(0, 128)
    with pytest.raises(PayloadMismatch, match="state is at 128, its checkpoint at 100"):
        cache.put(tokens, SALT, Boundary(100, BoundaryKind.TURN), truth(tokens, SALT, 128))


def test_the_same_prompt_twice_reuses_all_of_it():
    cache, tokens = make(), context(1, 200)
    save(cache, tokens, 200, BoundaryKind.PROMPT_END, logits=True)
    assert best(cache, tokens) == 200


def test_unique_tails_still_share_the_prefix_that_has_a_checkpoint():
    cache, system = make(), context(2, 150)
    for seed in range(10, 15):
        prompt = np.concatenate([system, context(seed, 40)])
        expected = 150 if seed > 10 else 0
        assert best(cache, prompt) == expected
        save(cache, prompt, 150, BoundaryKind.SYSTEM)
        save(cache, prompt, 190, BoundaryKind.PROMPT_END)


@pytest.mark.parametrize("length", [1, 5, 16, 63])
def test_a_prompt_shorter_than_a_block_is_cached(length):
    cache, tokens = make(), context(3, 64)
    save(cache, tokens, length)
    assert best(cache, tokens) == length


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_a_full_hit_around_block_edges_leaves_a_token_or_has_logits(length):
    cache, tokens = make(), context(4, length)
    save(cache, tokens, length)
    if length > 1:
        save(cache, tokens, length - 1)
    assert best(cache, tokens) == length - 1
    save(cache, tokens, length, logits=True)
    assert best(cache, tokens) == length


def test_what_was_matched_stays_until_released_even_if_others_need_the_room():
    cache, mine = make(5_000), context(5, 100)
    save(cache, mine, 100)
    match = cache.match(np.append(mine, 1), SALT)
    for seed in range(10, 30):
        save(cache, context(seed, 120), 120)
    assert same(match.read(), mine, SALT)
    match.release()
    close_books(cache)


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_failed_write_is_never_visible_and_leaves_nothing(nth):
    """Four blocks, state, logits: whichever write fails, lookup misses and the bytes of the others are given back."""
    tier = FaultyTier()
    cache, tokens = make(tiers=[tier]), context(6, 280)
    save(cache, tokens, 70)
    before = tier.used_bytes
    tier.fail_put_at = nth
    result = save(cache, tokens, 270, logits=True)
    assert (result.checkpoint_id is None) == (nth <= 5)
    if nth <= 5:
        assert tier.used_bytes == before
        assert best(cache, tokens) == 70
    close_books(cache)
    tier.fail_put_at = 0
    assert save(cache, tokens, 270, logits=True).checkpoint_id is not None
    assert best(cache, tokens) == 270


def test_nothing_is_matched_before_its_last_byte_is_written():
    tokens = context(7, 200)

    class Watching(RamTier):
        def put(self, key, header, parts, **kwargs):
            with cache.match(tokens, SALT) as match:
                seen.append(match.position)
            return super().put(key, header, parts, **kwargs)

    seen: list[int] = []
    cache = make(tiers=[Watching(1 << 20)])
    save(cache, tokens, 199)
    assert seen == [0] * 4
    assert best(cache, tokens) == 199


def test_admissions_that_fail_leak_no_pin():
    cache, tokens = make(4_000), context(8, 100)
    save(cache, tokens, 100)
    for seed in range(1000):
        with cache.match(np.append(tokens, 1), SALT) as match:
            assert match.position == 100
            assert save(cache, context(seed + 100, 1000), 1000).checkpoint_id is None
    (info,) = cache.checkpoints()
    assert cache.evict(info.id)
    assert cache.stats().tiers["ram"].used_bytes == 0


def test_a_failed_load_counts_as_nothing_loaded():
    tier = FaultyTier()
    cache, tokens = make(tiers=[tier]), context(9, 200)
    save(cache, tokens, 100)
    save(cache, tokens, 150)
    tier.fail_reads = True
    with cache.match(tokens, SALT) as match:
        assert match.position == 150
        payload = match.read()
        assert (payload.position, match.position, match.checkpoint_id, payload.kv) == (0, 0, None, ())
    tier.fail_reads = False
    assert best(cache, tokens) == 0
    assert tier.used_bytes == 0
    close_books(cache)


def test_interleaved_sessions_under_eviction_never_get_each_others_state():
    cache = make(9_000)
    for round_ in range(40):
        for who in range(4):
            tokens = np.concatenate([context(50, 64), context(100 + who, 60 + 3 * (round_ % 5))])
            best(cache, np.append(tokens, 1))
            save(cache, tokens, len(tokens))
    assert cache.stats().tiers["ram"].evictions > 20
    close_books(cache)


def test_bytes_that_vanished_under_the_index_are_a_miss_not_a_crash():
    tier = FaultyTier()
    cache, tokens = make(tiers=[tier]), context(10, 400)
    for position in (100, 200, 350):
        save(cache, tokens, position)
    tier.lose(tier.all_keys("extent")[2])  # block [128, 192): under the checkpoints at 200 and 350
    assert best(cache, tokens) == 100
    assert cache.stats().tiers["ram"].quarantined == 1
    assert [i.position for i in cache.checkpoints()] == [100]
    close_books(cache)
    save(cache, tokens, 350)
    assert best(cache, tokens) == 350


DAMAGE = {
    "extent lost": lambda t: t.lose(t.all_keys("extent")[-1]),
    "state lost": lambda t: t.lose(t.all_keys("state")[-1]),
    "component absent": lambda t: t.change_part(t.all_keys("state")[-1], "state.conv", None),
    "component short": lambda t: t.change_part(t.all_keys("state")[-1], "state.delta", np.zeros(23, np.uint8)),
    "component long": lambda t: t.change_part(t.all_keys("state")[-1], "state.delta", np.zeros(25, np.uint8)),
    "tail short": lambda t: t.change_part(t.all_keys("state")[-1], "kv.tail", np.zeros(8, np.uint8)),
    "block short": lambda t: t.change_part(t.all_keys("extent")[-1], "kv", np.zeros(504, np.uint8)),
    "aged state": lambda t: t.swap(*t.all_keys("state")[-2:]),
    "aged block": lambda t: t.swap(*t.all_keys("extent")[-2:]),
    "other salt": lambda t: t.change_header(t.all_keys("state")[-1], salt=OTHER_SALT),
    "other namespace": lambda t: t.change_header(t.all_keys("extent")[-1], namespace=b"m" * 32),
    "other tokens": lambda t: t.change_header(t.all_keys("extent")[-1], tokens=b"\0" * 256),
    "other position": lambda t: t.change_header(t.all_keys("state")[-1], position=351),
    "other kind of segment": lambda t: t.change_header(t.all_keys("state")[-1], what="logits"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("into", [False, True], ids=["views", "into-buffer"])
def test_a_damaged_component_is_a_miss_and_never_a_partial_restore(damage, into):
    tier = FaultyTier()
    cache, tokens = make(tiers=[tier]), context(11, 400)
    save(cache, tokens, 100)
    save(cache, tokens, 350)
    DAMAGE[damage](tier)
    with cache.match(tokens, SALT) as match:
        assert match.position == 350
        payload = match.read(np.empty((400, LAYOUT.kv_token_bytes), np.uint8) if into else None)
        # an aged state or block may have damaged the shorter one too
        assert payload.position == match.position
        assert payload.position in ((0, 100) if damage == "aged state" else (100,))
        assert not payload.position or same(payload, tokens, SALT)
    assert cache.stats().tiers["ram"].quarantined >= 1
    assert best(cache, tokens) in (0, 100)  # quarantined: not restored again, not missed again
    assert cache.stats().tiers["ram"].quarantined <= 2
    close_books(cache)


@pytest.mark.parametrize("part", ["kv", "kv.tail", "state.delta", "state.conv", "logits"])
def test_a_flipped_bit_is_a_miss_where_checksums_are_on(part):
    tier = FaultyTier(checksums=True)
    cache, tokens = make(tiers=[tier]), context(12, 300)
    save(cache, tokens, 100)
    save(cache, tokens, 299, logits=True)
    what = {"kv": "extent", "logits": "logits"}.get(part, "state")
    key = tier.all_keys(what)[-1]
    data = tier.read(key, part).copy()
    data[-1] ^= 1
    tier.change_part(key, part, data)
    assert best(cache, tokens) == 100


def test_one_tier_may_hold_what_another_lost():
    upper, lower = FaultyTier(4_000), FaultyTier(1 << 20, name="disk")
    cache, tokens = make(tiers=[upper, lower]), context(13, 130)
    save(cache, tokens, 120)
    save(cache, context(14, 130), 120)  # pushes the first one down
    assert save(cache, tokens, 120).existed  # and it comes back up: now in both
    upper.lose(upper.all_keys("state")[-1])
    with cache.match(tokens, SALT) as match:
        assert match.tier == "ram"
        assert same(match.read(), tokens, SALT)
        assert match.position == 120
    assert best(cache, tokens) == 120
    close_books(cache)


def test_a_quota_shrunk_at_run_time_takes_effect_at_the_next_save():
    tier = RamTier(1 << 20)
    cache = make(tiers=[tier])
    for seed in range(20):
        save(cache, context(seed, 100), 100)
    tier.budget_bytes = 6_000
    result = save(cache, context(30, 100), 100)
    assert result.checkpoint_id is not None
    assert tier.used_bytes <= 6_000
    tier.budget_bytes = 0
    assert save(cache, context(31, 100), 100).checkpoint_id is None
    assert best(cache, context(32, 10)) == 0


def test_swapped_weights_under_the_same_name_hit_nothing():
    """Two namespaces never share: even over one tier the other's segments do not verify."""
    tier, tokens = FaultyTier(), context(15, 100)
    old = make(tiers=[tier], namespace=namespace(**FIELDS))
    save(old, tokens, 99)
    new = make(tiers=[tier], namespace=namespace(**(FIELDS | {"weights_digest": "00" * 32})))
    assert best(new, tokens) == 0
    assert best(old, tokens) == 99


def test_salts_hold_in_every_tier():
    lower = RamTier(1 << 20, name="disk")
    cache = make(tiers=[RamTier(5_000), lower])
    tokens = context(16, 100)
    save(cache, tokens, 99)
    save(cache, tokens, 99, salt=OTHER_SALT)
    for seed in range(20, 24):
        save(cache, context(seed, 100), 99)
    assert len(lower._segments) > 0
    for salt in (SALT, OTHER_SALT):
        assert best(cache, tokens, salt) == 99
    assert best(cache, tokens, b"c" * 32) == 0


def test_saved_restored_then_appended_reuses_everything():
    cache, tokens = make(), context(17, 1000)
    at = 0
    for end in range(50, 1000, 75):
        assert best(cache, tokens[: end + 1]) == at
        save(cache, tokens, end)
        at = end


def test_each_save_writes_about_the_new_blocks_only():
    cache, tokens = make(1 << 24), context(18, 6400)
    block = 64 * LAYOUT.kv_token_bytes + 256 + 512
    written = [save(cache, tokens, end).written_bytes for end in range(64, 6401, 64)]
    state = 64 * LAYOUT.kv_token_bytes + 32 + 1024
    assert max(written) <= block + state
    assert sum(written) == cache.stats().tiers["ram"].used_bytes


def test_a_forged_collision_serves_nothing_wrong():
    """Keys of 4 bits: nearly every context collides with another one. What is served is still only truth."""
    cache = make(hash128=lambda data: bytes([xxh3_128(data)[0] & 15]) * 16)
    contexts = [context(seed, 200) for seed in range(60)]
    kept = [save(cache, tokens, 199).checkpoint_id is not None for tokens in contexts]
    hits = [best(cache, tokens) == 199 for tokens in contexts]
    assert hits == kept
    assert any(kept)
    assert cache.stats().collisions > 40
    close_books(cache)


def test_equal_keys_of_different_blocks_are_told_apart_by_ids_and_by_parent():
    """The second context is refused, the first one keeps being served."""
    after_one, after_two = (np.concatenate([np.full(64, v), np.full(100, 5)]) for v in (1, 2))
    starts_alike, differs_later = np.full(164, 7), np.concatenate([[7], np.full(163, 8)])

    def forgets_the_parent(data: bytes) -> bytes:
        return xxh3_128(data[-256:])

    def sees_one_token(data: bytes) -> bytes:
        return xxh3_128(data[:20])

    for hash128, first, second in (
        (forgets_the_parent, after_one, after_two),
        (sees_one_token, starts_alike, differs_later),
    ):
        cache = make(hash128=hash128)
        assert save(cache, first, 140).checkpoint_id is not None
        other_start = save(cache, second, 70).checkpoint_id is not None
        refused = cache.put(second, SALT, Boundary(150, BoundaryKind.TURN), truth(second, SALT, 150))
        assert refused.checkpoint_id is None
        assert cache.stats().collisions == 1 + (not other_start)
        assert best(cache, second) == (70 if other_start else 0)
        assert best(cache, first) == 140
        close_books(cache)
