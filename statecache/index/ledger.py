"""Keeps the durable index in step with the disk tier, and lives without it.

Changes are noted in memory and written by flush(), files first and rows later: a row may name a file that is gone and a file
may have no row, and recovery settles both. So a database that is away costs a slower next start and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from statecache.index import queries
from statecache.index.connect import file_of
from statecache.index.tables import metadata
from statecache.recover import Known
from statecache.tiers.base import SegmentHeader

log = logging.getLogger(__name__)
MOST_NOTES = 20_000
"""Held while the database is away; beyond this it is brought in step at the next start."""
RETRY_S = 10.0
_T = TypeVar("_T")


def rows_of(namespace: bytes, worker: int) -> bytes:
    """What the rows of one of several workers are filed under, each of which knows only its own files."""
    return hashlib.sha256(namespace + b"/%d" % worker).digest() if worker else namespace


class Ledger:
    """Rows of one namespace, as one of its workers has it on disk.

    prepare(engine): brings the schema up to date; called before first use, and again after failures.
    Errors of the database are told once and kept inside. note() may be called from any thread, the rest from one at a time.
    """

    def __init__(
        self,
        engine: Engine,
        namespace: bytes,
        *,
        worker: int = 0,
        prepare: Callable[[Engine], object] = metadata.create_all,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._of = namespace
        self._namespace = rows_of(namespace, worker)
        self._prepare = prepare
        self._clock = clock
        self._lock = threading.Lock()
        self._notes: dict[bytes, tuple[SegmentHeader, int] | None] = {}
        self._uses: dict[bytes, tuple[int, float]] = {}
        self._members: dict[tuple[str, bytes], bool] = {}
        self._left: set[str] = set()
        self._urgent = False
        self._prepared = False
        self._retry_at = 0.0
        self.trouble = ""

    @property
    def waiting(self) -> int:
        """Changes that are not in the database yet."""
        return len(self._notes) + len(self._uses) + len(self._members) + len(self._left)

    @property
    def urgent(self) -> bool:
        """Whether some of them can be read from nowhere else, and were asked for: a pin, or that a session is forgotten."""
        return self._urgent

    def note(self, key: bytes, header: SegmentHeader | None, nbytes: int) -> None:
        """A segment was written, or deleted (header None)."""
        with self._lock:
            if key in self._notes or len(self._notes) < MOST_NOTES:
                self._notes[key] = None if header is None else (header, nbytes)

    def note_member(self, session: str, state: bytes | None, pinned: bool) -> None:
        """A session uses a state, pinned or not; None: it is forgotten, with all that it used."""
        with self._lock:
            self._urgent |= pinned or state is None
            if state is None:
                self._members = {member: is_ for member, is_ in self._members.items() if member[0] != session}
                self._left.add(session)
            elif (session, state) in self._members or len(self._members) < MOST_NOTES:
                self._members[session, state] = pinned

    def note_uses(self, uses: Iterable[tuple[bytes, int, float]]) -> None:
        """(state segment, hits, seconds since the epoch)"""
        with self._lock:
            for key, hits, at in uses:
                self._uses[key] = (hits, at)

    def known(self) -> dict[bytes, Known]:
        """What the database remembers; nothing when it cannot be read. A broken SQLite file is set aside and begun anew."""
        rows = self._read(queries.known)
        if self._of == self._namespace:
            return rows
        return {key: replace(row, header=replace(row.header, namespace=self._of)) for key, row in rows.items()}

    def users(self) -> dict[bytes, dict[str, bool]]:
        """Who uses which states, as queries.users() says; nothing when it cannot be read."""
        return self._read(queries.users)

    def _read(self, query: Callable[[Connection, bytes], dict[bytes, _T]]) -> dict[bytes, _T]:
        for attempt in (0, 1):
            try:
                self._ready()
                with self._engine.connect() as connection:
                    return query(connection, self._namespace)
            except (SQLAlchemyError, UnicodeError) as error:
                if attempt == 0 and _is_damage(error) and self._set_aside():
                    continue
                self._failed(error)
                break
        return {}

    def flush(self) -> bool:
        """Write what was noted. False when the database cannot be written now; it is tried again later.

        In place of a damaged SQLite file a new one is begun, with what is noted from then on.
        """
        if self.trouble and self._clock() < self._retry_at:
            return False
        with self._lock:
            notes, self._notes = self._notes, {}
            uses, self._uses = self._uses, {}
            members, self._members = self._members, {}
            left, self._left = self._left, set()
            urgent, self._urgent = self._urgent, False
        if not (notes or uses or members or left):
            return True
        rows = {key: row for key, row in notes.items() if row is not None}
        gone = [key for key, row in notes.items() if row is None]
        try:
            self._ready()
            with self._engine.execution_options(writes=True).begin() as connection:
                queries.forget(connection, self._namespace, gone)
                queries.remember(connection, self._namespace, rows)
                queries.used(connection, self._namespace, ((key, *use) for key, use in uses.items() if key not in notes))
                queries.leave(connection, self._namespace, left)
                there = {member: pinned for member, pinned in members.items() if notes.get(member[1], rows) is not None}
                queries.join(connection, self._namespace, there)
        except (SQLAlchemyError, UnicodeError) as error:
            self._failed(error)
            if _is_damage(error) and self._set_aside():
                self._retry_at = self._clock()
            with self._lock:
                self._notes = notes | self._notes
                self._uses = uses | self._uses
                again = {member: pinned for member, pinned in members.items() if member[0] not in self._left}
                self._members = again | self._members
                self._left |= left
                self._urgent |= urgent
            return False
        if self.trouble:
            log.warning("checkpoint index works again")
            self.trouble = ""
        return True

    def forget_all(self) -> None:
        """Begin anew. Raises SQLAlchemyError."""
        self._ready()
        with self._engine.execution_options(writes=True).begin() as connection:
            queries.forget_all(connection, self._namespace)

    def close(self) -> None:
        if self.flush():
            with contextlib.suppress(SQLAlchemyError):
                self._ready()
                with self._engine.execution_options(writes=True).begin() as connection:
                    queries.forget_old_members(connection, self._namespace)
        self._engine.dispose()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _ready(self) -> None:
        if self._prepared:
            return
        try:
            self._prepare(self._engine)
        except SQLAlchemyError:
            raise
        except Exception as error:  # a schema that this version does not know
            raise SQLAlchemyError(str(error)) from error
        self._prepared = True

    def _failed(self, error: SQLAlchemyError | UnicodeError) -> None:
        self._prepared = False
        self._retry_at = self._clock() + RETRY_S
        cause = error.__cause__ or error
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        if not self.trouble:
            log.warning("checkpoint index cannot be used now, the next start may take longer: %s", reason)
        self.trouble = reason

    def _set_aside(self) -> bool:
        """Rename a SQLite file that is damaged; True if there was one. One that has tables of others is left to them."""
        file = file_of(self._engine)
        if file is None or not file.is_file():
            return False
        self._engine.dispose()
        if not _ours_alone(file):
            return False
        self._prepared = False
        try:
            for suffix in ("", "-wal", "-shm"):
                part = file.with_name(file.name + suffix)
                if part.exists():
                    part.rename(file.with_name(f"{file.name}.bad{suffix}"))
        except OSError as error:
            log.warning("checkpoint index not set aside: %s", error.strerror)
            return False
        log.warning("checkpoint index was damaged and is written anew file=%s", file.name)
        return True


def _is_damage(error: Exception) -> bool:
    """Whether SQLite says that its file is damaged, or not what was made of it, rather than locked or out of reach."""
    if isinstance(error, UnicodeError) or isinstance(error.__cause__, UnicodeError):
        return True
    origin = getattr(error, "orig", None)
    if not isinstance(origin, sqlite3.Error):
        return False
    # One without a code is the driver's own: text that is no UTF-8. SQLITE_ERROR: tables are not those that were made.
    code = getattr(origin, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def _ours_alone(file: Path) -> bool:
    """Whether no other tables than those of the index are in it, as far as it can be read."""
    try:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.text_factory = bytes
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    except sqlite3.Error:
        return True
    ours = {*(name.encode() for name in metadata.tables), b"alembic_statecache"}
    return all(name in ours or name.startswith(b"sqlite_") for (name,) in rows)
