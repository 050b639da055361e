"""Every SQL statement of the durable index. Each takes an open connection and is part of the caller's transaction."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    bindparam,
    delete,
    false,
    func,
    insert,
    select,
    update,
)

from statecache.index.tables import members, segments
from statecache.keys import KEY_BYTES
from statecache.recover import Known
from statecache.tiers.base import SegmentHeader
from statecache.types import BLOCK_TOKENS

log = logging.getLogger(__name__)
KEYS_A_QUERY = 256
"""Block keys asked for at once: deep ones first, and most contexts match among their last blocks."""
ROWS_A_STATEMENT = 500
_T = TypeVar("_T")


MEMBERS_KEPT = 20_000
"""Rows of sessions that are read at a start, the newest; pinned ones beside them."""


def remember(connection: Connection, namespace: bytes, rows: Mapping[bytes, tuple[SegmentHeader, int]]) -> None:
    """Insert or replace rows: key → (header, bytes charged)."""
    _delete(connection, segments, namespace, rows)
    now = time.time()
    values = [
        {
            "namespace": namespace,
            "segment": key,
            "what": header.what,
            "salt": header.salt,
            "block_key": header.key,
            "parent": header.parent,
            "start": header.start,
            "position": header.position,
            "tokens": header.tokens,
            "kind": header.kind,
            "item": header.item,
            "nbytes": nbytes,
            "hits": 0,
            "used_at": now,
        }
        for key, (header, nbytes) in rows.items()
    ]
    for some in _batches(values, ROWS_A_STATEMENT):
        connection.execute(insert(segments), some)


def forget(connection: Connection, namespace: bytes, keys: Iterable[bytes]) -> None:
    """Delete rows and what sessions have to do with them; unknown keys are ignored."""
    gone = list(keys)
    for table in (segments, members):
        _delete(connection, table, namespace, gone)


def forget_all(connection: Connection, namespace: bytes) -> None:
    """Segments only: what sessions have to do with them cannot be read from the files again."""
    connection.execute(delete(segments).where(segments.c.namespace == namespace))


def join(connection: Connection, namespace: bytes, pinned: Mapping[tuple[str, bytes], bool]) -> None:
    """Write down that sessions use states, and whether they pinned them."""
    now = time.time()
    of_session: dict[str, list[bytes]] = {}
    for session, key in pinned:
        of_session.setdefault(session, []).append(key)
    for session, keys in of_session.items():
        _delete(connection, members, namespace, keys, members.c.session == session)
    values = [
        {"namespace": namespace, "segment": key, "session": session, "pinned": is_pinned, "noted_at": now}
        for (session, key), is_pinned in pinned.items()
    ]
    for some in _batches(values, ROWS_A_STATEMENT):
        connection.execute(insert(members), some)


def leave(connection: Connection, namespace: bytes, sessions: Iterable[str]) -> None:
    """Forget sessions."""
    for some in _batches(sessions, ROWS_A_STATEMENT):
        connection.execute(delete(members).where(members.c.namespace == namespace, members.c.session.in_(some)))


def forget_old_members(connection: Connection, namespace: bytes) -> None:
    """Delete what users() would leave out."""
    newest = select(members.c.noted_at).where(members.c.namespace == namespace).order_by(members.c.noted_at.desc())
    oldest_kept = newest.offset(MEMBERS_KEPT - 1).limit(1).scalar_subquery()
    connection.execute(
        delete(members).where(members.c.namespace == namespace, members.c.pinned == false(), members.c.noted_at < oldest_kept)
    )


def used(connection: Connection, namespace: bytes, uses: Iterable[tuple[bytes, int, float]]) -> None:
    """Write down when states were used last: (segment, hits, seconds since the epoch)."""
    statement = (
        update(segments)
        .where(segments.c.namespace == namespace, segments.c.segment == bindparam("key"))
        .values(hits=bindparam("count"), used_at=bindparam("at"))
    )
    for some in _batches(({"key": key, "count": hits, "at": at} for key, hits, at in uses), ROWS_A_STATEMENT):
        connection.execute(statement, some)


def known(connection: Connection, namespace: bytes) -> dict[bytes, Known]:
    """All rows of a namespace, as recovery wants them; those that make no sense are left out, so that their files are read."""
    now = time.time()
    found: dict[bytes, Known] = {}
    odd = 0
    for row in connection.execute(select(segments).where(segments.c.namespace == namespace)):
        try:
            age_s, hits = _age_s(now, row.used_at), _whole(row.hits, 1 << 31)
            found[_blob(row.segment)] = Known(_header(row), _whole(row.nbytes), age_s, hits)
        except ValueError:
            odd += 1
    if odd:
        log.warning("rows of the checkpoint index make no sense, their files are read instead rows=%d", odd)
    return found


def users(connection: Connection, namespace: bytes) -> dict[bytes, dict[str, bool]]:
    """State segment → session → whether it pinned it; the newest and the pinned ones."""
    found: dict[bytes, dict[str, bool]] = {}
    wanted = select(members).where(members.c.namespace == namespace)
    for row in connection.execute(wanted.order_by(members.c.pinned.desc(), members.c.noted_at.desc()).limit(MEMBERS_KEPT)):
        if isinstance(row.segment, bytes) and isinstance(row.session, str):
            found.setdefault(row.segment, {})[row.session] = bool(row.pinned)
    return found


def totals(connection: Connection) -> dict[bytes, tuple[int, int]]:
    """(segments, bytes) per namespace."""
    rows = connection.execute(
        select(segments.c.namespace, func.count(), func.sum(segments.c.nbytes)).group_by(segments.c.namespace)
    )
    return {bytes(namespace): (count, int(size)) for namespace, count, size in rows}


def deepest(connection: Connection, namespace: bytes, salt: bytes, ids: bytes, keys: bytes) -> tuple[int, bytes] | None:
    """(position, state segment) of the longest saved prefix of a context, None if there is none.

    ids: u32le. keys: joined block keys of all full blocks. Looks up index ranges only, whatever the number of rows; a key
    locates and the ids behind the last block are compared. The radix tree answers turns; this answers tools and checks it.
    """
    count = len(ids) // 4
    names = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
    blocks = {name: index for index, name in enumerate(names)} | {b"": -1}
    for some in _batches([*reversed(names), b""], KEYS_A_QUERY):
        best: tuple[int, bytes] | None = None
        for row in connection.execute(deepest_statement(namespace, salt, some)):
            at = 4 * (blocks[bytes(row.block_key)] + 1) * BLOCK_TOKENS
            tail = bytes(row.tokens)
            fits = row.position <= count and at + len(tail) == 4 * row.position and ids[at : at + len(tail)] == tail
            if fits and (best is None or row.position > best[0]):
                best = (row.position, bytes(row.segment))
        if best is not None:
            return best
    return None


def deepest_statement(namespace: bytes, salt: bytes, keys: Sequence[bytes]) -> Select[Any, Any, Any, Any]:
    """States that lie behind one of some blocks."""
    return select(segments.c.block_key, segments.c.position, segments.c.tokens, segments.c.segment).where(
        segments.c.namespace == namespace,
        segments.c.salt == salt,
        segments.c.what == "state",
        segments.c.block_key.in_(keys),
    )


def _delete(connection: Connection, table: Table, namespace: bytes, keys: Iterable[bytes], *also: ColumnElement[bool]) -> None:
    for some in _batches(keys, ROWS_A_STATEMENT):
        connection.execute(delete(table).where(table.c.namespace == namespace, table.c.segment.in_(some), *also))


def _header(row: Row) -> SegmentHeader:
    """Raises ValueError: SQLite keeps any type in any column, and a damaged file shows it."""
    if row.what not in ("extent", "state", "logits"):
        raise ValueError(f"kind of segment {row.what!r}")
    return SegmentHeader(
        what=row.what,
        namespace=_blob(row.namespace),
        salt=_blob(row.salt),
        key=_blob(row.block_key),
        parent=_blob(row.parent),
        start=_whole(row.start),
        position=_whole(row.position),
        tokens=_blob(row.tokens),
        kind=str(row.kind),
        item=_whole(row.item, 1 << 31),
    )


def _blob(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"bytes expected, got {type(value).__name__}")
    return value


def _whole(value: object, limit: int = 1 << 62) -> int:
    if not isinstance(value, int) or not -limit < value < limit:
        raise ValueError(f"an integer within {limit} expected, got {type(value).__name__}")
    return value


def _age_s(now: float, used_at: object) -> float:
    if not isinstance(used_at, float) or not math.isfinite(used_at):
        raise ValueError(f"a time expected, got {type(used_at).__name__}")
    return max(0.0, now - used_at)


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
