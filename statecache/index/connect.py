"""Connecting to the durable index. SQLite by default, PostgreSQL by URL."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, make_url

BUSY_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_S = 5


def connect(url: str) -> Engine:
    """An engine for a URL; opens no connection yet.

    SQLite runs in WAL mode and syncs at checkpoints only: rows lost in a power cut are read from the files again. Raises
    ValueError on other databases.
    """
    target = make_url(url)
    if target.get_backend_name() == "postgresql":
        target = target.set(drivername="postgresql+psycopg")
        timeout = {"connect_timeout": CONNECT_TIMEOUT_S}
        return create_engine(target, pool_pre_ping=True, hide_parameters=True, connect_args=timeout)
    if target.get_backend_name() != "sqlite":
        raise ValueError(f"checkpoint index: {target.get_backend_name()!r} is not supported; sqlite and postgresql are")
    if target.database:
        Path(target.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(target, connect_args={"check_same_thread": False}, hide_parameters=True)
    event.listen(engine, "connect", lambda connection, _: prepare_sqlite(connection, "NORMAL", BUSY_TIMEOUT_MS))
    event.listen(engine, "begin", _begin)
    return engine


def file_of(engine: Engine) -> Path | None:
    """The file of a SQLite database; None for another one or one in memory."""
    return Path(engine.url.database) if engine.dialect.name == "sqlite" and engine.url.database else None


def prepare_sqlite(connection: sqlite3.Connection, synchronous: str, busy_timeout_ms: int) -> None:
    """Set up a new connection: transactions begun by us alone, WAL mode, waiting for locks.

    Raises sqlite3.OperationalError if the file was locked, or is no database.
    """
    connection.isolation_level = None  # the driver must not begin transactions by itself
    connection.execute(f"PRAGMA busy_timeout={busy_timeout_ms}")
    _switch_to_wal(connection, time.monotonic() + busy_timeout_ms / 1000)
    connection.execute(f"PRAGMA synchronous={synchronous}")


def _switch_to_wal(connection: sqlite3.Connection, deadline: float) -> None:
    """SQLite does not wait for the lock of this one: two that begin a new file together would each wait for the other's."""
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")
