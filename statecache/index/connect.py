"""Connecting to the durable index. SQLite by default, PostgreSQL by URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def file_of(engine: Engine) -> Path | None:
    """The file of a SQLite database; None for another one or one in memory."""
    return Path(engine.url.database) if engine.dialect.name == "sqlite" and engine.url.database else None


def _prepare(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")
