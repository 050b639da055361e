"""Migrations reach the schema that the code states, from nothing and from every earlier revision; settings of SQLite."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, Table, func, inspect, select, text

from agentserve.session.database import alembic_config, connect, upgrade
from agentserve.session.rows import _item_rows
from agentserve.session.tables import items, metadata
from tests.agentserve.session.test_store import opened, response, sent_again
from tests.agentserve.text.play import user


def revisions() -> list[str]:
    engine = connect("sqlite://")
    with engine.connect() as connection:
        script = ScriptDirectory.from_config(alembic_config("agentserve", connection))
        found = [r.revision for r in script.walk_revisions("base", "agentserve@head")]
    engine.dispose()
    return found[::-1]


def test_migrations_make_the_stated_schema(database_url: str):
    engine = connect(database_url)
    assert upgrade(engine) == revisions()[-1]
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": "alembic_agentserve", "compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


@pytest.mark.parametrize("start", revisions())
def test_every_revision_can_be_upgraded(database_url: str, start: str):
    assert upgrade(database_url, revision=start) == start
    assert upgrade(database_url) == revisions()[-1]
    assert upgrade(database_url) == revisions()[-1]


async def test_items_of_before_they_were_shared_are_read_and_shared_with(database_url: str):
    """Each of three turns has its whole context, as it was stored until a0004; the fourth goes on from the third."""
    turns = [response(session="ses_old")]
    for n in range(3):
        turns.append(sent_again(turns[-1], user(f"more {n}")))
    assert upgrade(database_url, revision="a0004") == "a0004"
    engine = connect(database_url)
    with engine.execution_options(writes=True).begin() as connection:
        then = MetaData()
        old = {name: Table(name, then, autoload_with=connection) for name in ("sessions", "responses", "items")}
        session = {"id": "ses_old", "principal": "alice", "created_at": 1.0, "updated_at": 1.0, "turns": 3}
        connection.execute(old["sessions"].insert(), session | {"context_tokens": 1, "reused_tokens": 0})
        for turn in turns[:3]:
            row = {c.name: getattr(turn, c.name) for c in old["responses"].c if hasattr(turn, c.name)}
            row |= {"instructions": (turn.instructions or "").encode(), "prompt_kept": 0, "bytes": 1}
            connection.execute(old["responses"].insert(), row)
            given = [*_item_rows(turn.id, 0, turn.input), *_item_rows(turn.id, 1, turn.output)]
            connection.execute(old["items"].insert(), given)
    engine.dispose()
    async with opened(database_url) as store:
        assert [await store.get("alice", turn.id) for turn in turns[:3]] == turns[:3]
        await store.commit(turns[3])
        assert [await store.get("alice", turn.id) for turn in turns] == turns
        with store._engine.connect() as connection:
            own = select(func.count()).select_from(items).where(items.c.response == turns[3].id, items.c.output == 0)
            assert connection.execute(own).scalar_one() == len(turns[3].input) - len(turns[2].input)
        assert await store.delete("alice", turns[2].id)
        assert await store.get("alice", turns[3].id) == turns[3]


def test_servers_that_start_together_migrate_once(database_url: str):
    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(upgrade, [database_url] * 3)) == {revisions()[-1]}


def test_sqlite_is_set_up_for_durability(tmp_path):
    engine = connect(f"sqlite:///{tmp_path}/new folder/s.db")
    with engine.connect() as connection:
        values = {p: connection.execute(text(f"PRAGMA {p}")).scalar() for p in ("journal_mode", "synchronous", "foreign_keys")}
    assert values == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    engine.dispose()


def test_branches_keep_their_revisions_apart(database_url: str):
    upgrade(database_url)
    engine = connect(database_url)
    assert "alembic_agentserve" in inspect(engine).get_table_names()
    engine.dispose()


def test_other_databases_are_refused():
    with pytest.raises(ValueError, match="sqlite and postgresql"):
        connect("mysql://localhost/x")


def test_a_password_may_come_from_a_file(tmp_path):
    (tmp_path / "secret").write_text("pa ss\n")
    engine = connect("postgresql://me@db/x", str(tmp_path / "secret"))
    assert engine.url.password == "pa ss"
    assert engine.url.drivername == "postgresql+psycopg"
    engine.dispose()
