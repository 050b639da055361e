"""Every SQL statement of the durable index. Each takes an open connection and is part of the caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, bindparam, delete, func, insert, select, update

from statecache.index.tables import segments
from statecache.keys import KEY_BYTES
from statecache.recover import Known
from statecache.tiers.base import SegmentHeader
from statecache.types import BLOCK_TOKENS

KEYS_A_QUERY = 256
"""Block keys asked for at once: deep ones first, and most contexts match among their last blocks."""
ROWS_A_STATEMENT = 500
_T = TypeVar("_T")


def remember(connection: Connection, namespace: bytes, rows: Mapping[bytes, tuple[SegmentHeader, int]]) -> None:
    """Insert or replace rows: key → (header, bytes charged)."""
    forget(connection, namespace, rows)
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
    """Delete rows; unknown keys are ignored."""
    for some in _batches(keys, ROWS_A_STATEMENT):
        connection.execute(delete(segments).where(segments.c.namespace == namespace, segments.c.segment.in_(some)))


def forget_all(connection: Connection, namespace: bytes) -> None:
    connection.execute(delete(segments).where(segments.c.namespace == namespace))


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
    """All rows of a namespace, as recovery wants them."""
    now = time.time()
    rows = connection.execute(select(segments).where(segments.c.namespace == namespace))
    return {
        bytes(row.segment): Known(_header(row), row.nbytes, max(0.0, now - row.used_at), row.hits)
        for row in rows
        if row.what in ("extent", "state", "logits")
    }


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


def _header(row: Row) -> SegmentHeader:
    return SegmentHeader(
        what=row.what,
        namespace=bytes(row.namespace),
        salt=bytes(row.salt),
        key=bytes(row.block_key),
        parent=bytes(row.parent),
        start=row.start,
        position=row.position,
        tokens=bytes(row.tokens),
        kind=row.kind,
        item=row.item,
    )


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
