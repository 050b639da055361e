"""Migrations reach the schema that the code states, from nothing and from every earlier revision; settings of SQLite."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, Table, func, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from agentserve.session.database import SCHEMAS, alembic_config, connect, newest, upgrade
from agentserve.session.rows import _item_rows
from agentserve.session.tables import items
from tests.agentserve.session.test_store import opened, response, sent_again
from tests.agentserve.text.play import user


def revisions(branch: str = "agentserve") -> list[str]:
    engine = connect("sqlite://")
    with engine.connect() as connection:
        script = ScriptDirectory.from_config(alembic_config(branch, connection))
        found = [r.revision for r in script.walk_revisions("base", f"{branch}@head")]
    engine.dispose()
    return found[::-1]


def described(engine: Engine) -> dict[str, object]:
    """All that a database says of its tables."""
    found: dict[str, object] = {}
    seen = inspect(engine)
    for name in seen.get_table_names():
        columns = {one["name"]: (str(one["type"]), one["nullable"], one["default"]) for one in seen.get_columns(name)}
        keys = seen.get_foreign_keys(name)
        foreign = sorted((*one["constrained_columns"], one["referred_table"], str(one["options"])) for one in keys)
        indexes = sorted((str(one["name"]), tuple(one["column_names"]), bool(one["unique"])) for one in seen.get_indexes(name))
        found[name] = columns, seen.get_pk_constraint(name)["constrained_columns"], foreign, indexes
    return found


@pytest.mark.parametrize("branch", SCHEMAS)
def test_a_new_database_is_the_same_as_one_that_all_migrations_made(database_url: str, branch: str) -> None:
    begun = connect(database_url)
    assert upgrade(begun, branch) == newest(branch) == revisions(branch)[-1]
    with begun.connect() as connection:
        assert connection.execute(text(f"SELECT version_num FROM alembic_{branch}")).scalars().all() == [newest(branch)]
    new = described(begun)
    with begun.execution_options(writes=True).begin() as connection:
        SCHEMAS[branch].drop_all(connection)
        connection.execute(text(f"DROP TABLE alembic_{branch}"))
    upgrade(begun, branch, revisions(branch)[0])
    assert upgrade(begun, branch) == newest(branch)
    assert described(begun) == new
    with begun.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": f"alembic_{branch}", "compare_type": True})
        assert compare_metadata(context, SCHEMAS[branch]) == []
    begun.dispose()


def test_a_database_that_is_new_or_up_to_date_needs_no_alembic(tmp_path: Path) -> None:
    program = (
        "import sys; from agentserve.session.database import upgrade; url = sys.argv[1]; print(upgrade(url), upgrade(url)); "
        "sys.exit('alembic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, f"sqlite:///{tmp_path}/s.db"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [newest("agentserve")] * 2), done.stderr


@pytest.mark.parametrize("left", ["items", "alembic_agentserve"])
def test_a_database_with_a_part_of_the_schema_is_not_begun_anew(database_url: str, left: str) -> None:
    engine = connect(database_url)
    with engine.execution_options(writes=True).begin() as connection:
        connection.execute(text(f"CREATE TABLE {left} (version_num VARCHAR(32) PRIMARY KEY)"))
        if left.startswith("alembic"):
            connection.execute(text(f"INSERT INTO {left} VALUES ('a9999')"))
    with pytest.raises(SQLAlchemyError, match="a9999" if left.startswith("alembic") else "items"):
        upgrade(engine)
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
