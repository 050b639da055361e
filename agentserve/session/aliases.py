"""Keeps aliases: in memory for as long as there is room, in the sessions database for good.

Aliases of a turn become durable in the transaction that commits the turn, so a turn that is not to be stored leaves none
behind. A database that cannot be read costs exactness of what was forgotten, never the turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import xxhash
from sqlalchemy import Connection, Engine, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from agentserve.kept import Kept
from agentserve.session.tables import aliases as table
from agentserve.text.aliases import Alias

log = logging.getLogger(__name__)

KEPT_BYTES = 64 << 20
KEPT_PER_KEY = 8
UNCOMMITTED_BYTES = 16 << 20
"""Of what turns taught that are not committed yet, or never are."""
_KEYS_PER_QUERY = 500
_ENTRY_BYTES = 200
"""Rough size of an entry beside its ids."""


class Aliases:
    """Implements text.aliases.AliasBook. engine: the sessions database, None to keep nothing durable."""

    def __init__(self, engine: Engine | None = None, kept_bytes: int = KEPT_BYTES) -> None:
        self._engine = engine
        self._limit = kept_bytes
        self._kept: OrderedDict[bytes, tuple[Alias, ...]] = OrderedDict()
        self._bytes = 0
        self._uncommitted: Kept[bytes, tuple[tuple[bytes, Alias], ...]] = Kept(UNCOMMITTED_BYTES)
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What they take in memory."""
        return self._bytes + self._uncommitted.size_bytes

    def attach(self, engine: Engine) -> None:
        """From now on, look up in this database what memory does not have."""
        self._engine = engine

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, Sequence[Alias]]:
        """Aliases of each key that has any, newest last. Asks the database once for every key it does not remember."""
        with self._lock:
            known = {k: self._kept[k] for k in keys if k in self._kept}
            for key in known:
                self._kept.move_to_end(key)
        unknown = [k for k in dict.fromkeys(keys) if k not in known]
        if unknown and self._engine is not None:
            loaded = self._load(unknown)
            if loaded is not None:
                with self._lock:
                    for key in unknown:
                        # Also that there is none: a context that we did not write would be asked for in every turn.
                        found = (*loaded.get(key, ()), *self._kept.get(key, ()))
                        known[key] = self._keep(key, found)
        return {k: v for k, v in known.items() if v}

    def add(self, entries: Iterable[tuple[bytes, Alias]], source: bytes = b"") -> None:
        """Remember what a turn taught. source: the turn's generated ids, by which its commit finds these entries."""
        entries = tuple(entries)
        with self._lock:
            for key, alias in entries:
                self._keep(key, (*self._kept.get(key, ()), alias))
        if source:
            self._uncommitted.put(_source_key(source), entries, sum(_size((alias,)) for _, alias in entries))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget these at once; their response was deleted."""
        with self._lock:
            for key in keys:
                self._bytes -= _size(self._kept.pop(key, None))

    def save(self, connection: Connection, response: str, source: bytes) -> int:
        """Write a turn's aliases inside the transaction that commits it as `response`; returns how many.

        Call saved() when it is committed. The rows come in the order of their keys, so that of two transactions that write the
        same ones neither waits for the other in turn.
        """
        entries = self._uncommitted.get(_source_key(source))
        if not entries:
            return 0
        rows = [
            {
                "key": key,
                "context": alias.context,
                "ids": alias.ids,
                "lead": alias.lead,
                "trail": alias.trail,
                "claim": alias.claim,
                "created_at": time.time(),
                "response": response,
            }
            for key, alias in sorted(entries, key=lambda entry: (entry[0], entry[1].context))
        ]
        insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)
        newer = {name: insert.excluded[name] for name in ("ids", "lead", "trail", "claim", "created_at", "response")}
        connection.execute(insert.on_conflict_do_update(index_elements=["key", "context"], set_=newer), rows)
        return len(rows)

    def saved(self, source: bytes) -> None:
        """The turn with these generated ids is committed."""
        self._uncommitted.drop(_source_key(source))

    def _keep(self, key: bytes, found: tuple[Alias, ...]) -> tuple[Alias, ...]:
        by_context: dict[bytes, Alias] = {}
        for alias in found:
            by_context.pop(alias.context, None)  # a later one of the same context replaces the earlier
            by_context[alias.context] = alias
        kept = tuple(by_context.values())[-KEPT_PER_KEY:]
        self._bytes += _size(kept) - _size(self._kept.pop(key, None))
        self._kept[key] = kept
        while self._bytes > self._limit and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size(dropped)
        return kept

    def _load(self, keys: Sequence[bytes]) -> dict[bytes, list[Alias]] | None:
        assert self._engine is not None
        found: dict[bytes, list[Alias]] = {}
        try:
            with self._engine.connect() as connection:
                for start in range(0, len(keys), _KEYS_PER_QUERY):
                    query = (
                        select(table).where(table.c.key.in_(keys[start : start + _KEYS_PER_QUERY])).order_by(table.c.created_at)
                    )
                    for row in connection.execute(query):
                        alias = Alias(ids=row.ids, context=row.context, lead=row.lead, trail=row.trail, claim=row.claim)
                        found.setdefault(row.key, []).append(alias)
        except SQLAlchemyError as error:
            log.warning("aliases not read keys=%d error=%s", len(keys), type(error).__name__)
            return None
        return found


def keys_of(connection: Connection, responses: Sequence[str]) -> list[bytes]:
    """Keys of the aliases that go with these responses."""
    return list(connection.execute(select(table.c.key).where(table.c.response.in_(responses))).scalars())


def forget_before(connection: Connection, before: float) -> int:
    """Delete aliases older than a Unix time; returns how many."""
    return connection.execute(delete(table).where(table.c.created_at < before)).rowcount


def _size(kept: tuple[Alias, ...] | None) -> int:
    return 0 if kept is None else _ENTRY_BYTES + sum(len(a.ids) + _ENTRY_BYTES for a in kept)


def _source_key(source: bytes) -> bytes:
    return xxhash.xxh3_128_digest(source)
