"""Durable sessions behind async calls: a few threads around a synchronous engine, and a cache of immutable responses.

Every commit is one transaction: the response, its items, its session's counters, its idempotency key and its aliases, or
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from agentserve.config import StoreConfig
from agentserve.errors import ServerError, TurnFailure
from agentserve.interfaces import SessionRow, StoredResponse
from agentserve.kept import Kept
from agentserve.protocol.responses import ResponseBody
from agentserve.session import background, listing, rows, shared_items
from agentserve.session.aliases import Aliases, forget_before, keys_of
from agentserve.session.conversations import SqlConversations, append_turn
from agentserve.session.database import DatabaseFileGone, advice, connect, tell_if_new, upgrade
from agentserve.session.lineage import predecessor, shared_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")

THREADS = 4
KEPT_RESPONSE_BYTES = 64 << 20
KEPT_CONTEXT_BYTES = 64 << 20
KEPT_DIGEST_BYTES = 8 << 20
DEADLOCK = "40P01"
"""What PostgreSQL says to the one of two transactions that it ends, which each waited for the other."""
MOST_TRIES = 5
FOLLOWED = 16
"""Responses that are looked at to find the one that a resent context goes on from."""
ALIAS_DAYS = 30
"""Aliases older than this are deleted at start; an answer of a month ago is tokenised from its text."""


class SqlStore:
    """Implements interfaces.Store. open() before use, close() at the end.

    prompt_ids of what `chain` returns are empty: a turn of 100k tokens would bring 400 kB for each of its ancestors, and
    nothing needs them. `get` has them.
    """

    def __init__(self, config: StoreConfig, server: str = "") -> None:
        """server: which one this is of those that share the database; one name, one process at a time."""
        self._config = config
        self._server = server
        self._engine: Engine = connect(config.url, config.password_file)
        self._writer = self._engine.execution_options(writes=True)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self._responses: Kept[str, StoredResponse] = Kept(KEPT_RESPONSE_BYTES)
        self._contexts: Kept[str, tuple[bytes, int]] = Kept(KEPT_CONTEXT_BYTES)
        self._digests: Kept[str, tuple[bytes, ...]] = Kept(KEPT_DIGEST_BYTES)
        self.aliases = Aliases(self._engine)
        self.conversations = SqlConversations(self._read, self._write)
        self._background: set[str] = set()
        """Ids of those that this process runs."""
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Bring the schema up to date if the configuration says so. Raises sqlalchemy.exc.SQLAlchemyError."""

        def prepare() -> None:
            tell_if_new(self._engine)
            if self._config.migrate:
                log.info("database ready revision=%s", upgrade(self._engine))
            with self._writer.begin() as connection:
                forget_before(connection, time.time() - ALIAS_DAYS * 86_400)
                failed = background.fail_all(connection, time.time(), self._server)
            if failed:
                log.warning("background responses ended with the server before count=%d", failed)

        await asyncio.get_running_loop().run_in_executor(self._threads, prepare)
        self._telling = asyncio.create_task(self._tell(), name="store-background")

    @property
    def caches(self) -> Mapping[str, Kept[str, Any] | Aliases]:
        """What is kept in memory of the database, by what it is."""
        return {"responses": self._responses, "contexts": self._contexts, "digests": self._digests, "aliases": self.aliases}

    def advice(self, error: Exception) -> str:
        """What to do about an error of open(); empty where it says that itself."""
        return advice(error, self._engine)

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        self._engine.dispose()

    # ── responses ────────────────────────────────────────────────────────────────────────────────────────────────

    async def commit(self, response: StoredResponse) -> None:
        """Durable when this returns. Raises TurnFailure `server_error` if the database refuses; nothing is stored then."""
        try:
            await self._in_thread(self._commit, response)
        except (SQLAlchemyError, PermissionError) as error:
            log.error("turn not stored response=%s error=%s", response.id, _why(error))
            message = f"the session database did not take this turn ({_why(error)}); its parent is unchanged, retry"
            raise TurnFailure("server_error", message) from error

    def _commit(self, new: StoredResponse) -> None:
        if new.parent is None and new.follows is None and new.context_items:
            new = msgspec.structs.replace(new, follows=self._followed(new))
        base, depth, shared = None, 0, 0
        before = new.parent or new.follows
        known = None if before is None else self._contexts.get(before)
        if known is not None and known[1] < rows.MAX_BASES:
            shared = shared_tokens(known[0], new.prompt_ids)
            base, depth = (before, known[1] + 1) if shared else (None, 0)
        digests = shared_items.digests(rows.bodies_of(new.input))
        followed = new.follows if new.parent is None else None
        same = 0 if followed is None else shared_items.shared_items(digests, self._digests_of(followed))

        def write(connection: Connection) -> None:
            rows.add_response(connection, new, base, shared, followed if same else None, same)
            append_turn(connection, new)
            self.aliases.save(connection, new.id, new.generated_ids)
            if new.id in self._background:
                background.stored(connection, new.id)

        self._transaction(write)
        self.aliases.saved(new.generated_ids)
        self._background.discard(new.id)
        context = new.prompt_ids + new.generated_ids
        self._contexts.put(new.id, (context, depth), len(context))
        self._digests.put(new.id, digests, 16 * len(digests))
        self._remember(msgspec.structs.replace(new, prompt_ids=b""))

    def _followed(self, new: StoredResponse) -> str | None:
        """The response that a resent context goes on from. Read before the commit, so that of two turns that end together
        neither is the other's: neither went on from the other."""

        def contexts(connection: Connection) -> Iterator[tuple[str, bytes]]:
            for response_id in rows.before(connection, new, FOLLOWED):
                context = self._contexts.get(response_id)
                if context is None:
                    with contextlib.suppress(LookupError):  # deleted in the meantime
                        ids, _, depth = rows.whole_context(connection, response_id)
                        context = (ids, depth)
                        self._contexts.put(response_id, context, len(ids))
                if context is not None:
                    yield response_id, context[0]

        with self._engine.connect() as connection:
            return predecessor(new.prompt_ids, new.own_tokens, contexts(connection))

    def _digests_of(self, response_id: str) -> tuple[bytes, ...]:
        """Of its input items."""
        known = self._digests.get(response_id)
        if known is not None:
            return known
        with self._engine.connect() as connection:
            return shared_items.digests(shared_items.inputs(connection, [response_id]).get(response_id, []))

    async def get(self, principal: str, response_id: str) -> StoredResponse | None:
        if not _possible(response_id):
            return None

        def read(connection: Connection) -> StoredResponse | None:
            found = rows.load(connection, principal, [response_id]).get(response_id)
            if found is None:
                return None
            return msgspec.structs.replace(found, prompt_ids=rows.prompt_ids(connection, response_id))

        return await self._read(read)

    async def chain(self, principal: str, response_id: str) -> tuple[StoredResponse, ...] | None:
        """The response and its ancestors, oldest first; None if one is unknown, foreign or deleted."""
        if not _possible(response_id):
            return None
        newer: list[StoredResponse] = []
        at: str | None = response_id
        while at is not None and (known := self._responses.get(at)) is not None and known.principal == principal:
            newer.append(known)
            at = known.parent
        if at is None:
            return tuple(reversed(newer))
        missing = at

        def read(connection: Connection) -> tuple[StoredResponse, ...] | None:
            line = rows.ancestry(connection, principal, missing)
            if line is None:
                return None
            found = rows.load(connection, principal, line)
            return tuple(found[i] for i in line) if len(found) == len(line) else None

        older = await self._read(read)
        if older is None:
            return None
        for response in older:
            self._remember(response)
        return (*older, *reversed(newer))

    async def delete(self, principal: str, response_id: str) -> bool:
        if not _possible(response_id):
            return False

        def remove(connection: Connection) -> tuple[bool, list[bytes]]:
            said = keys_of(connection, [response_id])
            gone = rows.remove_response(connection, principal, response_id)
            return gone or background.remove(connection, principal, response_id, time.time()), said

        gone, said = await self._write(remove)
        if gone:
            self._forget(response_id)
            self.aliases.drop(said)
        return gone

    async def by_idempotency_key(self, principal: str, key: str) -> StoredResponse | None:
        def read(connection: Connection) -> StoredResponse | None:
            found = rows.by_key(connection, principal, key)
            if found is None:
                return None
            response = rows.load(connection, principal, [found]).get(found)
            return None if response is None else msgspec.structs.replace(response, idempotency_key=key)

        return await self._read(read)

    async def stored_bytes(self, principal: str) -> int:
        return await self._read(lambda c: rows.stored_bytes(c, principal) + background.held_bytes(c, principal))

    # ── in the background ────────────────────────────────────────────────────────────────────────────────────────

    async def begin_background(self, principal: str, body: ResponseBody) -> None:
        await self._write(lambda c: background.begin(c, principal, body, time.time(), self._server))
        self._background.add(body.id)

    async def fail_background(self, body: ResponseBody) -> None:
        self._background.discard(body.id)
        await self._write(lambda c: background.fail(c, body))

    async def in_background(self, principal: str, response_id: str) -> ResponseBody | None:
        if not _possible(response_id):
            return None
        return await self._read(lambda c: background.find(c, principal, response_id, time.time()))

    async def _tell(self) -> None:
        """Say now and then that this server lives, while it runs any."""
        while True:
            await asyncio.sleep(background.SEEN_S)
            if self._background:
                with contextlib.suppress(ServerError):  # it is in the log; the next time will do
                    await self._write(lambda c: background.seen(c, self._server, time.time()))

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def sessions(self, principal: str, limit: int, after: str | None) -> tuple[SessionRow, ...]:
        """Last used first. after: id of the last session of the page before."""
        if after is not None and not _possible(after):
            return ()
        return await self._read(lambda c: listing.session_rows(c, principal, limit=limit, after=after))

    async def kept_sessions(self, principal: str, ids: Sequence[str]) -> frozenset[str]:
        """Which of these are stored."""
        possible = [an_id for an_id in ids if _possible(an_id)]
        return await self._read(lambda c: listing.kept_sessions(c, principal, possible))

    async def session(self, principal: str, session_id: str) -> SessionRow | None:
        if not _possible(session_id):
            return None
        found = await self._read(lambda c: listing.session_rows(c, principal, only=session_id))
        return found[0] if found else None

    async def delete_session(self, principal: str, session_id: str) -> bool:
        if not _possible(session_id):
            return False

        def remove(connection: Connection) -> tuple[tuple[str, ...] | None, list[bytes]]:
            said = keys_of(connection, rows.of_session(connection, principal, session_id))
            return rows.remove_session(connection, principal, session_id), said

        gone, said = await self._write(remove)
        if gone is None:
            return False
        for response_id in gone:
            self._forget(response_id)
        self.aliases.drop(said)
        return True

    # ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _remember(self, response: StoredResponse) -> None:
        size = len(response.body) * 3 + len(response.generated_ids) + len(response.tools)
        size += sum(len(getattr(i, "text", "")) for i in response.input)
        self._responses.put(response.id, response, size)

    def _forget(self, response_id: str) -> None:
        self._responses.drop(response_id)
        self._contexts.drop(response_id)
        self._digests.drop(response_id)

    async def _read(self, read: Callable[[Connection], T]) -> T:
        def run() -> T:
            with self._engine.connect() as connection:
                return read(connection)

        return await self._guarded(run)

    async def _write(self, write: Callable[[Connection], T]) -> T:
        return await self._guarded(lambda: self._transaction(write))

    def _transaction(self, write: Callable[[Connection], T]) -> T:
        """write(connection), again where PostgreSQL has chosen it to end because others waited for what it held."""
        for _ in range(MOST_TRIES - 1):
            try:
                with self._writer.begin() as connection:
                    return write(connection)
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) != DEADLOCK:
                    raise
        with self._writer.begin() as connection:
            return write(connection)

    async def _guarded(self, run: Callable[[], T]) -> T:
        try:
            return await self._in_thread(run)
        except SQLAlchemyError as error:
            log.error("database failed error=%s", _why(error))
            raise ServerError(f"the session database cannot be used now ({_why(error)}); retry") from error

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _possible(an_id: str) -> bool:
    """Could this be an id of ours? PostgreSQL takes no U+0000 in a text, not even to look for it."""
    return "\0" not in an_id


def _why(error: Exception) -> str:
    """The kind of an error, and SQLite's own words (disk full, locked): those name no contents, PostgreSQL's may."""
    if isinstance(error, DatabaseFileGone):
        return "its file was deleted or replaced; put it back, or restart the server for a new one"
    reason = error.orig if isinstance(error, DBAPIError) else None
    words = f": {reason}" if isinstance(reason, sqlite3.OperationalError) else ""
    return type(error).__name__ + words
