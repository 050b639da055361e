"""Items of resent contexts, stored once: a response whose input begins as that of an earlier one keeps only what comes after.

`input_base` names that response, of the same session; `input_kept` is how many leading items they share, and rows of `items`
begin at that position. A base may stand on another one, so a session grows by its new items. Statements on an open connection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, Integer, and_, case, func, literal, select, update

from agentserve.session.tables import items, responses

_ALL = (1 << 31) - 1


def digests(bodies: Iterable[bytes]) -> tuple[bytes, ...]:
    """One for each item; equal ones are the same item, also where somebody chose them."""
    return tuple(hashlib.blake2b(body, digest_size=16).digest() for body in bodies)


def shared_items(mine: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """How many leading digests are the same."""
    return next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


def inputs(connection: Connection, ids: Sequence[str]) -> dict[str, list[bytes]]:
    """Bodies of the input items of responses, put together along their bases."""
    first = select(
        responses.c.id.label("root"),
        responses.c.id.label("at"),
        responses.c.input_base.label("base"),
        responses.c.input_kept.label("kept"),
        literal(_ALL, Integer).label("end"),
    ).where(responses.c.id.in_(ids))
    line = first.cte("line", recursive=True)
    end = case((line.c.kept < line.c.end, line.c.kept), else_=line.c.end)
    line = line.union_all(
        select(line.c.root, responses.c.id, responses.c.input_base, responses.c.input_kept, end).where(
            responses.c.id == line.c.base, end > 0
        )
    )
    wanted = and_(items.c.response == line.c.at, items.c.output == 0, items.c.position < line.c.end)
    query = select(line.c.root, items.c.body).join(items, wanted).order_by(line.c.root, items.c.position)
    found: dict[str, list[bytes]] = {}
    for row in connection.execute(query):
        found.setdefault(row.root, []).append(row.body)
    return found


def is_there(connection: Connection, base: str, session: str) -> bool:
    """Whether a response of this session is there, and stays until the transaction ends."""
    query = select(responses.c.id).where(responses.c.id == base, responses.c.session == session)
    return connection.execute(query.with_for_update(read=True)).first() is not None


def let_go(connection: Connection, gone: str) -> None:
    """Before a response is deleted: those that stand on it get what it has itself of their items, and stand on its base."""
    base, kept = connection.execute(select(responses.c.input_base, responses.c.input_kept).where(responses.c.id == gone)).one()
    children = select(responses.c.id, responses.c.input_kept).where(responses.c.input_base == gone)
    for child in connection.execute(children).all():
        own = and_(items.c.response == gone, items.c.output == 0, items.c.position < child.input_kept)
        added = connection.execute(select(func.coalesce(func.sum(func.length(items.c.body)), 0)).where(own)).scalar_one()
        copied = select(literal(child.id), items.c.output, items.c.position, items.c.type, items.c.body).where(own)
        connection.execute(items.insert().from_select(["response", "output", "position", "type", "body"], copied))
        left = min(kept, child.input_kept)
        values = {"input_base": base if left else None, "input_kept": left, "bytes": responses.c.bytes + int(added)}
        connection.execute(update(responses).where(responses.c.id == child.id).values(values))
