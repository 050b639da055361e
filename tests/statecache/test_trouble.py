"""Disks and databases in trouble under the real cache: work goes on, one warning, and all is used again without a restart.

Each on both kinds of index, since its rows have to follow the files through all of it.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentserve.session.database import upgrade
from statecache import place as place_module
from statecache.directory import claim, namespaces
from statecache.durable import DiskSettings, SavedStates, open_states
from statecache.errors import TierFailed
from statecache.index import connect as connect_module
from statecache.place import Place
from statecache.tiers.disk import DiskTier
from tests.fakes.databases import PostgresServer
from tests.statecache.test_failures import best
from tests.statecache.test_index import rows
from tests.statecache.world import LAYOUT, NAMESPACE, close_books, context, save

RAM = 1 << 20
IN_MEMORY = "saved states stay in memory only"
ON_DISK = "saved states are written to disk again"
TOO_SLOW = "the disk is too slow"
KEEPS_UP = "the disk keeps up"
NO_INDEX = "checkpoint index cannot be used now"
INDEX = "checkpoint index works again"


@pytest.fixture
def opened(tmp_path: Path, database_url: str) -> Iterator[Callable[..., SavedStates]]:
    """The last one is closed at the end, earlier ones by the test."""
    made: list[SavedStates] = []

    def make(ram: int = RAM) -> SavedStates:
        disk = DiskSettings(tmp_path / "states", 1 << 24, 0, claim_wait_s=0.0, index_url=database_url)
        made.append(open_states(NAMESPACE, LAYOUT, ram, disk, prepare=lambda engine: upgrade(engine, "statecache")))
        return made[-1]

    yield make
    made[-1].close(60.0)


def a_turn(states: SavedStates, seed: int, tokens: int = 150) -> None:
    """Saves its state, wants it written, and comes back to it."""
    ids = context(seed, tokens)
    placed = save(states.cache, ids, tokens - 1).checkpoint_id
    assert placed
    states.want([placed])
    assert best(states.cache, ids) == tokens - 1


def flush(states: SavedStates) -> bool:
    assert states.writer is not None
    return states.writer.flush(60.0)


def count(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def alone(states: SavedStates) -> None:
    """End the writing thread: from now on flush() writes, and the ledger is used by nobody else."""
    assert states.writer is not None
    states.writer.close(60.0)


def rows_are_files(states: SavedStates, root: Path, url: str) -> None:
    alone(states)
    assert states.ledger is not None
    states.ledger._retry_at = 0.0
    assert states.ledger.flush()
    assert rows(url).keys() == {bytes.fromhex(path.stem) for path in root.glob("states/*/??/*.safetensors")}


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=["full", "read-only", "broken"])
def test_a_disk_that_refuses_writes_costs_no_turn_and_is_used_again(
    opened: Callable[..., SavedStates],
    tmp_path: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: int,
) -> None:
    states = opened()
    a_turn(states, 1)
    assert flush(states)

    def refuse(_tier: DiskTier, path: str, buffers: list[bytes | memoryview]) -> None:
        if reason != errno.EROFS:
            Path(path).write_bytes(b"".join(bytes(buffer) for buffer in buffers)[:4096])
        raise OSError(reason, "refused")

    def refuse_all(*_arguments: object, **_named: object) -> None:
        raise OSError(reason, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_write", refuse)
        if reason == errno.EROFS:
            patch.setattr(Path, "unlink", refuse_all)
        for seed in range(2, 7):
            a_turn(states, seed)
            flush(states)
        assert states.writer is not None
        assert states.writer.trouble
        assert (count(caplog, IN_MEMORY), count(caplog, ON_DISK)) == (1, 0)
        assert best(states.cache, context(1, 150)) == 149, "what the disk has is still read"
    for seed in range(7, 10):
        a_turn(states, seed)
    assert flush(states)
    assert states.writer.trouble == ""
    assert (count(caplog, IN_MEMORY), count(caplog, ON_DISK)) == (1, 1)
    close_books(states.cache)
    assert not list(tmp_path.glob("states/*/tmp-*"))
    rows_are_files(states, tmp_path, database_url)
    states.close(60.0)
    again = opened()
    assert all(best(again.cache, context(seed, 150)) == 149 for seed in (1, 7, 8, 9))


def test_a_throttled_disk_costs_no_turn_and_is_told_once(
    opened: Callable[..., SavedStates],
    tmp_path: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It writes one file for every ten turns, and memory holds a dozen of them."""
    states = opened(60_000)
    may_write, real = threading.Semaphore(0), DiskTier._write

    def throttled(tier: DiskTier, path: str, buffers: list[bytes | memoryview]) -> None:
        assert may_write.acquire(timeout=60)
        real(tier, path, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_write", throttled)
        for seed in range(100):
            a_turn(states, seed)
            if seed % 10 == 9:
                may_write.release()
        assert states.cache.dropped > 50
        may_write.release(10_000)
        assert flush(states)
        a_turn(states, 100)
        assert flush(states)
    assert (count(caplog, TOO_SLOW), count(caplog, KEEPS_UP), count(caplog, IN_MEMORY)) == (1, 1, 0)
    close_books(states.cache)
    rows_are_files(states, tmp_path, database_url)
    states.close(60.0)
    assert best(opened().cache, context(100, 150)) == 149


@contextmanager
def gone(url: str, postgres: PostgresServer | None) -> Iterator[None]:
    """The database of this URL takes nothing from anybody."""
    if postgres is not None:
        postgres.stop()
        try:
            yield
        finally:
            postgres.start()
        return
    holder = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.execute("ROLLBACK")
        holder.close()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_a_database_that_is_gone_costs_no_turn_and_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    monkeypatch.setattr(connect_module, "BUSY_TIMEOUT_MS", 10)
    postgres = request.getfixturevalue("postgres") if kind == "postgres" else None
    url = postgres.new_database() if postgres is not None else f"sqlite:///{tmp_path / 'index.db'}"
    disk = DiskSettings(tmp_path / "states", 1 << 24, 0, claim_wait_s=0.0, index_url=url)
    states = open_states(NAMESPACE, LAYOUT, RAM, disk, prepare=lambda engine: upgrade(engine, "statecache"))
    assert states.ledger is not None
    a_turn(states, 1)
    alone(states)
    assert states.ledger.flush()
    with gone(url, postgres):
        for seed in range(2, 6):
            a_turn(states, seed)
            assert flush(states), "the disk needs no database"
            states.ledger._retry_at = 0.0
            assert not states.ledger.flush()
        assert (count(caplog, NO_INDEX), count(caplog, INDEX)) == (1, 0)
        assert states.cache.evict(states.cache.checkpoints()[0].id)
    rows_are_files(states, tmp_path, url)
    assert (count(caplog, NO_INDEX), count(caplog, INDEX)) == (1, 1)
    states.close(60.0)


def test_a_smaller_quota_under_load_costs_no_turn_and_a_larger_one_is_used_at_once(
    opened: Callable[..., SavedStates], tmp_path: Path, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    states = opened()
    cache = states.cache
    for seed in range(30):
        a_turn(states, seed)
    assert flush(states)
    full = cache.stats().tiers["disk"].used_bytes
    assert states.set_budgets(RAM // 8, full // 4) == ""
    for seed in range(30, 40):
        with cache.match(context(seed - 1, 150), b"a" * 32) as match:
            match.read()
        save(cache, context(seed, 150), 149)  # refused while memory shrinks, and no error
        cache.trim()
    while cache.trim():
        close_books(cache)
    for seed in range(40, 45):
        a_turn(states, seed)
    assert flush(states)
    tiers = cache.stats().tiers
    assert tiers["disk"].used_bytes <= full // 4
    assert tiers["ram"].used_bytes <= RAM // 8
    rows_are_files(states, tmp_path, database_url)
    assert states.set_budgets(RAM, 1 << 24) == ""
    for seed in range(50, 80):
        a_turn(states, seed)
    assert flush(states)
    assert cache.stats().tiers["disk"].used_bytes > full // 2
    assert count(caplog, IN_MEMORY) == 0, "whoever asked for less need not be warned of it"
    close_books(cache)
    rows_are_files(states, tmp_path, database_url)


MADE_AGAIN = "the directory of saved states is made again"


def namespace_of(root: Path) -> Path:
    return next(path for path in (root / "states").iterdir())


def delete(root: Path) -> None:
    shutil.rmtree(namespace_of(root))


def delete_all(root: Path) -> None:
    shutil.rmtree(root / "states")


def empty(root: Path) -> None:
    for path in namespace_of(root).iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def replace(root: Path) -> None:
    """By what somebody had kept of it earlier: files without the lock that is held."""
    folder = namespace_of(root)
    (folder / "lock").unlink()
    (folder / "lock").touch()
    segments = sorted(folder.glob("??/s*.safetensors")) + sorted(folder.glob("??/*.safetensors"))
    segments[0].unlink()


@pytest.mark.parametrize("harm", [delete, delete_all, empty, replace])
def test_a_directory_that_is_deleted_under_its_process_is_made_again(
    opened: Callable[..., SavedStates],
    tmp_path: Path,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
) -> None:
    monkeypatch.setattr(place_module, "SETTLE_S", 0.0)
    states = opened()
    for seed in range(1, 5):
        a_turn(states, seed)
    alone(states)
    folder = namespace_of(tmp_path)
    harm(tmp_path)
    for seed in range(5, 8):
        a_turn(states, seed)
        assert flush(states)
        assert count(caplog, MADE_AGAIN) == 1
    assert count(caplog, "checkpoints_lost=0") == 1, "memory had them all"
    assert namespaces(tmp_path / "states")[0].path == folder
    with pytest.raises(TierFailed, match="is used by another process"):
        claim(folder, wait_s=0.0)
    assert {info.tiers for info in states.cache.checkpoints()} == {("ram", "disk")}
    close_books(states.cache)
    rows_are_files(states, tmp_path, database_url)
    states.close(60.0)
    again = opened()
    for seed in range(1, 8):
        assert best(again.cache, context(seed, 150)) == 149


def test_what_memory_does_not_have_is_gone_with_the_directory_and_misses(
    opened: Callable[..., SavedStates], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "SETTLE_S", 0.0)
    states = opened()
    for seed in range(1, 5):
        a_turn(states, seed)
    alone(states)
    states.set_budgets(0, None)
    while states.cache.trim():
        pass
    states.set_budgets(RAM, None)
    assert {info.tiers for info in states.cache.checkpoints()} == {("disk",)}
    delete(tmp_path)
    a_turn(states, 5)
    assert flush(states)
    assert count(caplog, "checkpoints_lost=4") == 1
    assert [best(states.cache, context(seed, 150)) for seed in range(1, 6)] == [0, 0, 0, 0, 149]
    close_books(states.cache)


def test_whoever_deletes_is_given_time_to_delete_more(tmp_path: Path) -> None:
    now = [100.0]
    place = Place(tmp_path / "states" / "ns", NAMESPACE, "m", LAYOUT, clock=lambda: now[0])
    place.open(0.0)
    shutil.rmtree(place.path)
    for now[0] in (200.0, 200.0 + place_module.SETTLE_S - 1):
        with pytest.raises(TierFailed, match=f"{place.path} was deleted or replaced; it is made again soon"):
            place.look()
        assert not place.path.exists()
    now[0] = 200.0 + place_module.SETTLE_S
    assert not place.look(), "made again"
    assert place.look(), "and there"
    place.close()


def test_what_it_lay_in_is_not_made_again_and_may_be_put_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "state"
    states = open_states(NAMESPACE, LAYOUT, RAM, DiskSettings(root / "checkpoints", 1 << 24, 0, claim_wait_s=0.0))
    try:
        a_turn(states, 1)
        alone(states)
        root.rename(tmp_path / "away")
        for seed in range(2, 5):
            a_turn(states, seed)
            assert not flush(states)
        assert count(caplog, f"{root} was deleted; put it back, or restart the server") == 1
        assert not root.exists()
        (tmp_path / "away").rename(root)
        a_turn(states, 5)
        assert flush(states)
        assert (count(caplog, IN_MEMORY), count(caplog, ON_DISK), count(caplog, MADE_AGAIN)) == (1, 1, 0)
        assert {info.tiers for info in states.cache.checkpoints()} == {("ram", "disk")}
    finally:
        states.close(60.0)
