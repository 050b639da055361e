"""The durable index: rows say what the files say, the deepest match never scans, and its loss costs nothing but time."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, inspect, text
from sqlalchemy.dialects import postgresql, sqlite

from agentserve.session.database import alembic_config, upgrade
from statecache.durable import ROWS_S, DiskSettings, SavedStates, open_states
from statecache.index import queries
from statecache.index.connect import connect
from statecache.index.tables import metadata, segments
from statecache.keys import KeyChain, block_keys, token_bytes
from statecache.tiers.base import SegmentHeader
from tests.statecache.test_failures import best
from tests.statecache.world import LAYOUT, NAMESPACE, OTHER_SALT, SALT, Clock, close_books, context, save


def states(root: Path, url: str, **kwargs) -> SavedStates:
    disk = DiskSettings(root, 1 << 24, 0, claim_wait_s=0.0, index_url=url)
    return open_states(NAMESPACE, LAYOUT, 1 << 20, disk, prepare=lambda engine: upgrade(engine, "statecache"), **kwargs)


def rows(url: str) -> dict[bytes, int]:
    engine = connect(url)
    with engine.connect() as connection:
        found = {key: k.nbytes for key, k in queries.known(connection, NAMESPACE).items()}
    engine.dispose()
    return found


def filled(root: Path, url: str) -> np.ndarray:
    opened, tokens = states(root, url), context(1, 1500)
    for position in (100, 700, 1200):
        save(opened.cache, tokens, position)
    save(opened.cache, tokens, 1500, logits=True)
    with opened.cache.match(tokens, SALT) as match:
        match.read()
    opened.close()
    return tokens


def killed(opened) -> None:
    """Let go of everything without a last word."""
    opened.writer.close(0.0)
    opened.ledger._engine.dispose()
    opened._place.close()


def revisions() -> list[str]:
    engine = connect("sqlite://")
    with engine.connect() as connection:
        script = ScriptDirectory.from_config(alembic_config("statecache", connection))
        found = [r.revision for r in script.walk_revisions("base", "statecache@head")]
    engine.dispose()
    return found[::-1]


def test_migrations_make_the_stated_schema(database_url):
    engine = connect(database_url)
    upgrade(engine, "statecache", revisions()[0])  # what has no schema yet gets it without them
    assert upgrade(engine, "statecache") == revisions()[-1]
    with engine.connect() as connection:
        context_ = MigrationContext.configure(connection, opts={"version_table": "alembic_statecache", "compare_type": True})
        assert compare_metadata(context_, metadata) == []
    engine.dispose()


@pytest.mark.parametrize("start", revisions())
def test_every_revision_can_be_upgraded(database_url, start):
    engine = connect(database_url)
    assert upgrade(engine, "statecache", start) == start
    assert upgrade(engine, "statecache") == revisions()[-1]
    engine.dispose()


def test_both_branches_fit_in_one_database(database_url):
    upgrade(database_url)
    engine = connect(database_url)
    upgrade(engine, "statecache")
    assert {"alembic_agentserve", "alembic_statecache", "sessions", "segments"} <= set(inspect(engine).get_table_names())
    engine.dispose()


def test_rows_follow_the_files_and_a_start_opens_none(tmp_path, database_url, monkeypatch):
    tokens = filled(tmp_path, database_url)
    files = {bytes.fromhex(p.stem): -(-p.stat().st_size // 4096) * 4096 for p in tmp_path.glob("*/??/*.safetensors")}
    assert rows(database_url) == files

    def opened(*args):
        raise AssertionError("a header was read")

    with monkeypatch.context() as patch:
        patch.setattr("statecache.tiers.disk.DiskTier.header", opened)
        again = states(tmp_path, database_url)
    assert [i.position for i in again.cache.checkpoints()] == [100, 700, 1200, 1500]
    assert [i.hits for i in again.cache.checkpoints()] == [0, 0, 0, 1]
    assert best(again.cache, tokens) == 1500
    close_books(again.cache)
    assert again.cache.evict(again.cache.checkpoints()[-1].id)
    save(again.cache, tokens, 900)
    again.close()
    files = {bytes.fromhex(p.stem) for p in tmp_path.glob("*/??/*.safetensors")}
    assert rows(database_url).keys() == files


def test_lists_and_pins_come_back_after_a_restart(tmp_path, database_url):
    first, tokens, other = states(tmp_path, database_url), context(1, 900), context(2, 300)
    ids = [save(first.cache, tokens, position, session="a").checkpoint_id or "" for position in (100, 700)]
    save(first.cache, other, 200, session="b")
    with first.cache.match(tokens, SALT, session="b"):
        pass
    assert first.cache.pin(ids[0], "a")
    first.close()

    second = states(tmp_path, database_url)
    listed = [(i.position, i.pinned) for i in second.cache.checkpoints("a")]
    assert listed == [(100, True), (700, False)]
    assert [i.position for i in second.cache.checkpoints("b")] == [200, 700]
    assert [i.position for i in second.cache.checkpoints("b", 1)] == [700]
    assert not second.cache.evict(ids[0])
    assert second.cache.unpin(ids[0], "a")
    second.cache.forget("b")
    close_books(second.cache)
    second.close()

    third = states(tmp_path, database_url)
    assert [(i.position, i.pinned) for i in third.cache.checkpoints("a")] == [(100, False), (700, False)]
    assert third.cache.checkpoints("b") == []
    assert third.cache.evict(ids[0])
    third.close()
    fourth = states(tmp_path, database_url)
    assert [i.position for i in fourth.cache.checkpoints("a")] == [700]
    fourth.close()


def test_a_pin_outlives_a_kill_even_of_what_was_in_memory_only(tmp_path, database_url):
    first, tokens = states(tmp_path, database_url), context(1, 900)
    checkpoint = save(first.cache, tokens, 100, session="a").checkpoint_id or ""
    save(first.cache, tokens, 200, session="a")
    assert first.cache.pin(checkpoint, "a")
    assert first.writer is not None
    assert first.writer.flush(60.0)
    killed(first)
    second = states(tmp_path, database_url)
    assert [(i.position, i.pinned) for i in second.cache.checkpoints("a")] == [(100, True)]
    second.close()


def test_only_the_newest_lists_are_kept(tmp_path, database_url, monkeypatch):
    monkeypatch.setattr(queries, "MEMBERS_KEPT", 3)
    first, tokens = states(tmp_path, database_url), context(1, 900)
    for number in range(6):
        checkpoint = save(first.cache, tokens, 100, session=f"s{number}").checkpoint_id or ""
        first.cache.want([checkpoint])
        if number == 0:
            first.cache.pin(checkpoint, "s0")
        assert first.writer is not None
        assert first.writer.flush(60.0)
        assert first.ledger is not None
        assert first.ledger.flush()
    first.close()
    second = states(tmp_path, database_url)
    (record,) = second.cache._kept.records.values()
    assert record.sessions == {"s0", "s4", "s5"}
    second.close()


@pytest.mark.parametrize("what", ["empty", "missing rows", "stale rows", "wrong sizes", "wrong tokens"])
def test_an_index_that_disagrees_is_settled_by_the_files(tmp_path, database_url, what):
    tokens = filled(tmp_path, database_url)
    engine = connect(database_url)
    with engine.execution_options(writes=True).begin() as connection:
        keys = list(queries.known(connection, NAMESPACE))
        if what == "empty":
            queries.forget_all(connection, NAMESPACE)
        elif what == "missing rows":
            queries.forget(connection, NAMESPACE, keys[::2])
        elif what == "stale rows":
            header = SegmentHeader("state", NAMESPACE, SALT, b"k" * 16, b"", 0, 3, b"\0" * 12)
            queries.remember(connection, NAMESPACE, {b"s" + b"z" * 16: (header, 4096)})
        elif what == "wrong sizes":
            connection.execute(segments.update().values(nbytes=segments.c.nbytes + 4096))
        else:
            connection.execute(segments.update().where(segments.c.what == "extent").values(tokens=b"\0" * 4096))
    engine.dispose()
    again = states(tmp_path, database_url)
    assert best(again.cache, tokens) == 1500
    close_books(again.cache)
    again.close()
    files = {bytes.fromhex(p.stem) for p in tmp_path.glob("*/??/*.safetensors")}
    assert rows(database_url).keys() == files


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "deleted", "newer schema", "no revision"])
def test_a_damaged_index_file_is_written_anew(tmp_path, damage):
    file = tmp_path / "checkpoints.db"
    url = f"sqlite:///{file}"
    tokens = filled(tmp_path / "states", url)
    if damage in ("newer schema", "no revision"):
        engine = connect(url)
        with engine.execution_options(writes=True).begin() as connection:
            revision = "c9999" if damage == "newer schema" else ""
            connection.execute(text(f"UPDATE alembic_statecache SET version_num = '{revision}'"))
        engine.dispose()
    else:
        {"truncated": lambda: file.write_bytes(file.read_bytes()[:5000]), "deleted": file.unlink}.get(
            damage, lambda: file.write_bytes(b"not a database" * 1000)
        )()
    again = states(tmp_path / "states", url)
    assert best(again.cache, tokens) == 1500
    close_books(again.cache)
    again.close()
    if damage not in ("newer schema", "no revision"):
        assert len(rows(url)) == 7  # four states, logits of one, two extents


@pytest.mark.postgres
def test_a_database_that_goes_away_and_comes_back_costs_no_turn(tmp_path, postgres):
    url = postgres.new_database()
    tokens = filled(tmp_path, url)
    opened = states(tmp_path, url)
    assert opened.ledger is not None
    postgres.stop()
    try:
        assert best(opened.cache, tokens) == 1500
        other = context(2, 300)
        assert save(opened.cache, other, 290).checkpoint_id
        opened.cache.write_back()
        assert not opened.ledger.flush()
        assert opened.ledger.trouble
        cold = open_states(b"x" * 32, LAYOUT, 1 << 20, DiskSettings(tmp_path, 1 << 24, 0, index_url=url))
        assert save(cold.cache, other, 290).checkpoint_id
        cold.close()
    finally:
        postgres.start()
    opened.ledger._retry_at = 0.0
    assert opened.ledger.flush()
    assert opened.ledger.trouble == ""
    opened.close()
    assert len(rows(url)) == len(list(tmp_path.glob(f"{NAMESPACE.hex()[:32]}/??/*.safetensors")))


def dialect_of(url: str):
    return postgresql.dialect() if url.startswith("postgresql") else sqlite.dialect()


def test_the_deepest_match_uses_the_index_and_never_scans(database_url):
    engine = connect(database_url)
    upgrade(engine, "statecache")
    with engine.execution_options(writes=True).begin() as connection:
        for salt in (SALT, OTHER_SALT):
            made = {}
            for n in range(3000):
                key = n.to_bytes(16, "big")
                made[salt[:1] + key] = (SegmentHeader("state", NAMESPACE, salt, key, b"", 64, 70, b"\0" * 24), 1)
            queries.remember(connection, NAMESPACE, made)
        if engine.dialect.name == "postgresql":
            connection.execute(text("ANALYZE segments"))
        statement = queries.deepest_statement(NAMESPACE, SALT, [n.to_bytes(16, "big") for n in range(10)])
        compiled = statement.compile(engine, compile_kwargs={"render_postcompile": True})
        explain = "EXPLAIN " if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
        plan = connection.exec_driver_sql(
            explain + str(compiled),
            compiled.params
            if engine.dialect.name == "postgresql"
            else tuple(compiled.params[name] for name in compiled.positiontup or ()),
        )
        lines = " ".join(str(row) for row in plan)
    engine.dispose()
    assert "ix_segments_prefix" in lines
    assert not re.search(r"SCAN|Seq Scan", lines), lines


contexts = st.lists(
    st.sampled_from([np.full(n, v, np.int32) for n in (1, 30, 64, 100) for v in (1, 2)]), min_size=1, max_size=5
)


@pytest.fixture(scope="module")
def empty_index():
    """In memory. Tests take back what they write."""
    engine = connect("sqlite://")
    metadata.create_all(engine)
    yield engine
    engine.dispose()


@given(saved=st.lists(st.tuples(contexts, st.sampled_from([SALT, OTHER_SALT])), max_size=8), asked=contexts)
@settings(max_examples=30, deadline=None)
def test_sql_finds_the_same_deepest_prefix_as_comparing_with_each(empty_index, saved, asked):
    ids = token_bytes(np.concatenate(asked))
    expected = 0
    with empty_index.connect() as connection, connection.begin() as writes:
        for pieces, salt in saved:
            path = token_bytes(np.concatenate(pieces))
            position = len(path) // 4
            chain = KeyChain(NAMESPACE, salt)
            chain.extend(path)
            keys = chain.joined
            tail = path[position // 64 * 256 :]
            header = SegmentHeader("state", NAMESPACE, salt, keys[-16:], keys[-16:], position // 64 * 64, position, tail)
            queries.remember(
                connection, NAMESPACE, {b"s" + keys[-16:] + tail[:4] + salt[:1] + bytes([len(tail) // 4]): (header, 1)}
            )
            if salt == SALT and ids.startswith(path):
                expected = max(expected, position)
        joined = b"".join(block_keys(NAMESPACE, SALT, np.concatenate(asked)))
        found = queries.deepest(connection, NAMESPACE, SALT, ids, joined)
        writes.rollback()
    assert (found[0] if found else 0) == expected


def test_two_workers_that_start_together_migrate_once(database_url):
    def start(_):
        engine = connect(database_url)
        try:
            return upgrade(engine, "statecache")
        finally:
            engine.dispose()

    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(start, range(3))) == {revisions()[-1]}


def test_databases_begun_by_several_at_the_same_moment_are_begun_by_all(tmp_path):
    """SQLite waits for no lock when it switches to WAL: without our own waiting one of eight such moments fails."""
    gate = Barrier(4)

    def begin(engine: Engine) -> None:
        gate.wait()
        with engine.execution_options(writes=True).begin() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS t (x)")
        engine.dispose()

    with ThreadPoolExecutor(4) as threads:
        for number in range(60):
            url = f"sqlite:///{tmp_path}/{number}.db"
            list(threads.map(begin, [connect(url) for _ in range(4)]))


def test_rows_are_told_to_the_database_a_few_seconds_at_a_time_and_pins_at_once(tmp_path):
    """A crash before that leaves files without rows, and their headers are read at the next start."""
    clock, url = Clock(), f"sqlite:///{tmp_path / 'checkpoints.db'}"
    opened, tokens = states(tmp_path, url, clock=clock), context(1, 700)
    writer, ledger = opened.writer, opened.ledger
    assert writer is not None
    assert ledger is not None
    writer.close()
    saved: list[str] = []

    def write(position: int) -> int:
        saved.append(save(opened.cache, tokens, position).checkpoint_id or "")
        opened.cache.want(saved[-1:])
        assert writer.flush(60.0)
        return len(rows(url))

    assert write(30) == 1, "nothing was told for long"
    clock.now += 1.0
    assert [write(40), write(50)] == [1, 1]
    clock.now += ROWS_S
    assert write(60) == 4
    clock.now += 1.0
    assert write(50) == 4
    assert write(55) == 4
    assert opened.cache.pin(saved[-1], "somebody")
    assert writer.flush(60.0)
    assert len(rows(url)) == 5
    assert not ledger.waiting
    write(45)
    ledger._engine.dispose()
    assert opened._place is not None
    opened._place.close()
    again = states(tmp_path, url)
    assert [info.position for info in again.cache.checkpoints()] == [30, 40, 45, 50, 55, 60]
    assert len(rows(url)) == 6
    again.close()
