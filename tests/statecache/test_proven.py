"""States of which nobody has seen finite logits yet: used while the process lives, never found by the next one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import statecache.tiers.disk as disk_module
from statecache.durable import DiskSettings, SavedStates, open_states
from statecache.errors import SegmentBad, TierFailed
from statecache.index.connect import connect
from statecache.index.queries import known
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind
from tests.statecache.test_disk import on_disk
from tests.statecache.test_failures import best
from tests.statecache.test_oversized import copy_down
from tests.statecache.world import LAYOUT, NAMESPACE, SALT, close_books, context, make, save, truth

SMALL = 24_000
"""Memory that holds contexts of about 1,000 tokens."""
LARGE = 1 << 22


def opened(root: Path, ram: int) -> SavedStates:
    url = f"sqlite:///{root / 'checkpoints.db'}"
    return open_states(NAMESPACE, LAYOUT, ram, DiskSettings(root, 1 << 24, 0, claim_wait_s=0.0, index_url=url))


def put(states: SavedStates, tokens, position: int, *, proven: bool = False, session: str = "") -> str:
    cache = states.cache
    payload = truth(tokens, SALT, position, start=cache.kv_missing_from(tokens, SALT, position))
    result = cache.put(tokens, SALT, Boundary(position, BoundaryKind.LADDER), payload, session=session, proven=proven)
    assert result.checkpoint_id
    return result.checkpoint_id


def flush(states: SavedStates) -> None:
    assert states.writer is not None
    while not states.writer.flush(60.0):
        pass
    close_books(states.cache)


def files(root: Path) -> int:
    return len(list(root.glob("*/??/*.safetensors")))


@pytest.mark.parametrize("ram", [SMALL, LARGE], ids=["too large for memory", "fits memory"])
def test_it_is_found_after_a_restart_only_if_it_was_proven(tmp_path: Path, ram: int) -> None:
    tokens, other = context(1, 3_001), context(2, 3_001)
    states = opened(tmp_path, ram)
    for position in range(200, 3_001, 200):
        for which, session in ((tokens, "good"), (other, "bad")):
            placed = put(states, which, position, session=session)
            states.want([placed])
            flush(states)
            states.cache.prove([placed, "unknown"] if session == "good" else [])
    flush(states)
    assert best(states.cache, tokens) == best(states.cache, other) == 3_000, "both serve this process"
    states.close(60.0)
    again = opened(tmp_path, ram)
    close_books(again.cache)
    assert not list(tmp_path.glob("*/tmp-*"))
    assert best(again.cache, tokens) == 3_000
    assert best(again.cache, other) == 0
    assert set(again.cache.sessions()) == {"good"}
    again.close()


def test_nothing_has_a_name_on_disk_or_a_row_before_it_is_proven(tmp_path: Path) -> None:
    states = opened(tmp_path, SMALL)
    tokens = context(3, 3_001)
    ids = []
    for position in range(200, 3_001, 200):
        ids.append(put(states, tokens, position, session="s"))
        flush(states)
    tier = states.cache._kept.shelves[1].tier
    assert isinstance(tier, DiskTier)
    assert tier.unsealed
    assert files(tmp_path) == 0
    states.cache.prove(ids)
    flush(states)
    assert not tier.unsealed
    assert tier.used_bytes == on_disk(tier.root)
    states.close(60.0)
    database = connect(f"sqlite:///{tmp_path / 'checkpoints.db'}")
    with database.connect() as connection:
        assert len(known(connection, NAMESPACE)) == files(tmp_path) > len(ids) // 2
    database.dispose()


def test_what_is_proven_brings_what_it_builds_on(tmp_path: Path) -> None:
    """Otherwise it would lie on the disk behind blocks that the next start does not find."""
    states = opened(tmp_path, SMALL)
    tokens = context(4, 3_001)
    for position in range(200, 2_801, 200):
        put(states, tokens, position)
        flush(states)
    put(states, tokens, 3_000, proven=True)
    flush(states)
    states.close(60.0)
    again = opened(tmp_path, SMALL)
    assert best(again.cache, tokens) == 3_000
    assert best(again.cache, tokens[:2_900]) == 0, "a state of its own is not proven by one behind it"
    again.close()


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_disk_that_fails_while_it_seals_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    tier = DiskTier(tmp_path / "d", 1 << 24, reserve_bytes=0, fsync=False)
    cache, tokens = make(tiers=[RamTier(LARGE), tier], write_behind=True), context(5, 3_001)
    ids = []
    for position in (1_100, 2_200, 3_000):
        payload = truth(tokens, SALT, position, start=cache.kv_missing_from(tokens, SALT, position))
        result = cache.put(tokens, SALT, Boundary(position, BoundaryKind.USER), payload, proven=False)
        ids.append(result.checkpoint_id or "")
    cache.want(ids)
    copy_down(cache)
    real, calls = os.rename, 0

    def rename(source: str, target: str) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.EIO, "no rename")
        real(source, target)

    monkeypatch.setattr(disk_module.os, "rename", rename)
    cache.prove(ids)
    with pytest.raises(TierFailed):
        copy_down(cache)
    close_books(cache)
    copy_down(cache)
    assert not tier.unsealed
    assert all(record.in_use == 0 for record in cache._kept.records.values())
    after = make(tiers=[RamTier(LARGE), DiskTier(tmp_path / "d", 1 << 24, reserve_bytes=0)], write_behind=True)
    after.recover()
    assert best(after, tokens) == 3_000


def test_what_is_spoiled_goes_wherever_it_is_and_nothing_proven_does(tmp_path: Path) -> None:
    states = opened(tmp_path, SMALL)
    cache, tokens = states.cache, context(6, 3_001)
    good = put(states, tokens, 200, proven=True)
    ids = [good]
    for position in range(400, 3_001, 200):
        ids.append(put(states, tokens, position))
        if position < 3_000:
            flush(states)
    assert cache.pin(ids[1], "s")
    cache.spoil([*ids, "unknown"])
    flush(states)
    assert best(cache, tokens) == 200
    assert [info.id for info in cache.checkpoints()] == [good]
    states.close(60.0)
    again = opened(tmp_path, SMALL)
    assert best(again.cache, tokens) == 200
    again.close()


def test_one_that_is_read_while_it_is_spoiled_is_never_matched_again_and_goes_when_the_read_ends() -> None:
    cache, tokens = make(), context(7, 300)
    payload = truth(tokens, SALT, 250)
    cache.put(tokens, SALT, Boundary(250, BoundaryKind.USER), payload, proven=False)
    match = cache.match(tokens, SALT)
    cache.spoil([match.checkpoint_id or ""])
    assert cache.depth(tokens, SALT) == 0
    refused = cache.put(tokens, SALT, Boundary(250, BoundaryKind.USER), payload)
    assert refused.checkpoint_id is None, "the good one would be taken for the same as the bad one"
    match.release()
    close_books(cache)
    assert cache.checkpoints() == []
    assert save(cache, tokens, 250).checkpoint_id
    assert best(cache, tokens) == 250


def test_one_that_is_being_written_while_it_is_spoiled_goes_when_it_is_written(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "d", 1 << 24, reserve_bytes=0, fsync=False)
    cache, tokens = make(tiers=[RamTier(LARGE), tier], write_behind=True), context(8, 300)
    payload = truth(tokens, SALT, 250)
    ids = [cache.put(tokens, SALT, Boundary(250, BoundaryKind.USER), payload, proven=False).checkpoint_id or ""]
    cache.want(ids)
    real = tier.put

    def put_and_spoil(*args, **kwargs):
        cache.spoil(ids)
        return real(*args, **kwargs)

    tier.put = put_and_spoil
    cache.copy_next()
    assert cache.checkpoints() == []
    close_books(cache)
    assert not list((tmp_path / "d").glob("tmp-*"))


class Lying(RamTier):
    """Names a segment that no checkpoint needs when one is read, so often that only a reader that never ends would notice."""

    reads = 0

    def header(self, key: bytes):
        self.reads += 1
        assert self.reads < 50, "the same checkpoint is read again and again"
        raise SegmentBad(self.name, b"s" + bytes(16), "not what it should be")


def test_an_error_that_names_another_segment_still_ends_the_read() -> None:
    tier = Lying(1 << 20)
    cache, tokens = make(tiers=[tier]), context(9, 400)
    for position in (100, 200, 300):
        save(cache, tokens, position)
    with cache.match(tokens, SALT) as match:
        assert match.position == 300
        assert match.read().position == match.position == 0
    assert tier.reads == 3
    assert cache.checkpoints() == []
    close_books(cache)


def test_a_copy_of_such_a_checkpoint_ends_too() -> None:
    cache, tokens = make(tiers=[Lying(1 << 20), RamTier(1 << 20, name="disk")], write_behind=True), context(10, 400)
    cache.want([save(cache, tokens, position).checkpoint_id or "" for position in (100, 200, 300)])
    assert cache.copy_next() is None
    assert cache.checkpoints() == []
    close_books(cache)
