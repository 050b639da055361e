"""Connecting to the sessions database and bringing its schema up to date. SQLite by default, PostgreSQL by URL."""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

import statecache.index.tables
from agentserve.session import tables
from statecache.index.connect import prepare_sqlite

log = logging.getLogger(__name__)
BUSY_TIMEOUT_MS = 10_000
"""How long a SQLite writer waits for another one."""
MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
SCHEMAS = {"agentserve": tables.metadata, "statecache": statecache.index.tables.metadata}
_MIGRATION_LOCK = 0x61676E74
"""PostgreSQL advisory lock: two servers that start together migrate one after the other."""


class DatabaseFileGone(SQLAlchemyError):
    """The SQLite file that is open was deleted or replaced: what is written to it would be gone at the next start."""


class UnknownSchema(SQLAlchemyError):
    """The database is at a revision that is not among the migrations here: a newer version made it."""


def connect(url: str | URL, password_file: str = "") -> Engine:
    """An engine for a URL; opens no connection yet. password_file: holds the password of a URL that has none.

    SQLite gets WAL, foreign keys, full synchronisation (a committed turn survives a power cut) and a busy timeout, and
    its transactions begin as the caller says: option `writes` takes the write lock at once, so that a read never has to be
    promoted to a write, which fails when another writer came between. Parameters never reach an error message: they are
    prompts.
    """
    target = make_url(url)
    if password_file and target.password is None:
        target = target.set(password=Path(password_file).read_text(encoding="utf-8").strip())
    if target.get_backend_name() == "postgresql":
        target = target.set(drivername="postgresql+psycopg")
        return create_engine(target, pool_pre_ping=True, hide_parameters=True)
    if target.get_backend_name() != "sqlite":
        raise ValueError(f"store.url: {target.get_backend_name()!r} is not supported; sqlite and postgresql are")
    if target.database:
        Path(target.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(target, connect_args={"check_same_thread": False}, hide_parameters=True)
    path = Path(target.database or "")
    event.listen(engine, "connect", lambda connection, record: _prepare_sqlite(connection, record, path))
    event.listen(engine, "begin", lambda connection: _begin_sqlite(connection, path))
    return engine


def _prepare_sqlite(connection: Any, record: ConnectionPoolEntry, path: Path) -> None:
    prepare_sqlite(connection, "FULL", BUSY_TIMEOUT_MS)
    connection.execute("PRAGMA foreign_keys=ON")
    record.info["file"] = _file(path)


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is there now; None: none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _begin_sqlite(connection: Connection, path: Path) -> None:
    if connection.get_execution_options().get("writes"):
        opened = connection.connection.info.get("file")
        if opened is not None and _file(path) != opened:
            raise DatabaseFileGone(f"{path} was deleted or replaced while it was open")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


def tell_if_new(engine: Engine) -> None:
    """Say it when a SQLite file holds nothing yet, so that sessions are never gone in silence."""
    path = Path(engine.url.database or "")
    if engine.dialect.name != "sqlite" or not engine.url.database:
        return
    if not path.exists():
        log.info("sessions database is new file=%s", path)
    elif path.is_file() and path.stat().st_size == 0:
        log.warning("sessions database was an empty file and is begun anew file=%s", path)


def advice(error: Exception, engine: Engine) -> str:
    """What to do about a SQLite file that cannot be used; empty where the reason says it all."""
    reason = error.orig if isinstance(error, DBAPIError) else None
    name = getattr(reason, "sqlite_errorname", "") if isinstance(reason, sqlite3.Error) else ""
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return "put back a copy of it, or move it away with its -wal and -shm files: a new one is begun, without sessions"
    if name.startswith("SQLITE_BUSY"):
        return f"another process has held it for {BUSY_TIMEOUT_MS // 1000} s; end that one"
    if name.startswith(("SQLITE_IOERR", "SQLITE_FULL")) and (folder := Path(engine.url.database or "").parent).is_dir():
        room = os.statvfs(folder)
        return f"its disk has {room.f_bavail * room.f_frsize} bytes free"
    return ""


def upgrade(url: str | URL | Engine, branch: str = "agentserve", revision: str = "head") -> str:
    """Bring one branch's schema to a revision; returns the revision reached. Does nothing if it is there already.

    A database without any of it gets the newest schema at once: alembic takes longer to import than all else that is done
    here. Raises UnknownSchema, or another SQLAlchemyError if the database cannot be reached.
    """
    engine = url if isinstance(url, Engine) else connect(url)
    try:
        with engine.execution_options(writes=True).begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            head = newest(branch)
            if revision == "head" and (_revision(connection, branch) or _begin(connection, branch)) == head:
                return head
            return _migrate(connection, branch, revision)
    finally:
        if not isinstance(url, Engine):
            engine.dispose()


def newest(branch: str) -> str:
    """The last revision of a branch, by the names of its files, which begin with it."""
    return max(file.name for file in (MIGRATIONS / branch).glob("?[0-9][0-9][0-9][0-9]_*.py")).partition("_")[0]


def _revision(connection: Connection, branch: str) -> str | None:
    """Where a database is; None: nowhere, or it cannot be told."""
    if not inspect(connection).has_table(f"alembic_{branch}"):
        return None
    found = connection.execute(text(f"SELECT version_num FROM alembic_{branch}")).scalars().all()
    return found[0] if len(found) == 1 else None


def _begin(connection: Connection, branch: str) -> str | None:
    """Make the newest schema where there is nothing of it; returns its revision, None if there is something."""
    schema = SCHEMAS[branch]
    if {*schema.tables, f"alembic_{branch}"} & {*inspect(connection).get_table_names()}:
        return None
    schema.create_all(connection, checkfirst=False)
    key = PrimaryKeyConstraint("version_num", name=f"alembic_{branch}_pkc")
    version = Table(f"alembic_{branch}", MetaData(), Column("version_num", String(32), nullable=False), key)
    version.create(connection, checkfirst=False)
    connection.execute(version.insert(), {"version_num": newest(branch)})
    return newest(branch)


def _migrate(connection: Connection, branch: str, revision: str) -> str:
    from alembic import command
    from alembic.runtime.migration import MigrationContext
    from alembic.util.exc import CommandError

    try:
        command.upgrade(alembic_config(branch, connection), f"{branch}@{revision}" if revision == "head" else revision)
    except CommandError as error:
        raise UnknownSchema(str(error)) from error
    context = MigrationContext.configure(connection, opts={"version_table": f"alembic_{branch}"})
    return context.get_current_revision() or "base"


def alembic_config(branch: str, connection: Connection) -> Any:
    """Alembic settings for one branch on an open connection."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    folders = [str(MIGRATIONS / name).replace("%", "%%") for name in ("agentserve", "statecache")]
    config.set_main_option("version_locations", "\n".join(folders))
    config.attributes.update(connection=connection, branch=branch)
    return config
