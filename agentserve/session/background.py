"""Responses that nobody waits for, from their acceptance until they are stored: a restart then still knows of them.

Servers may share a database. Each says now and then that it still runs its own; one that was not heard of for STALE_S is taken
for dead, and what it ran for failed. Should it only have been cut off, that is put right when it stores the response.

Statements on an open connection. One that is stored as a response is no longer here; one that failed stays, so that whoever
looks it up is told.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, and_, delete, func, or_, select, update

from agentserve.protocol.responses import ErrorDetail, ResponseBody, encode_body
from agentserve.session.tables import background

RUNNING = "in_progress"
DAYS = 30
"""A failed one is forgotten so long after it was accepted."""
STALE_S = 300.0
"""After which a server that was not heard of is dead."""
SEEN_S = 60.0
"""How often one that runs some says that it lives."""
STOPPED = "the server was stopped while this response ran; its context is unchanged, retry"


def begin(connection: Connection, principal: str, body: ResponseBody, now: float, server: str = "") -> None:
    """server: who runs it."""
    row = {"id": body.id, "principal": principal, "status": RUNNING, "created_at": now, "body": encode_body(body)}
    connection.execute(background.insert(), row | {"server": server, "seen_at": now})


def seen(connection: Connection, server: str, now: float) -> None:
    """A server lives that runs those of its name."""
    running = and_(background.c.server == server, background.c.status == RUNNING)
    connection.execute(update(background).where(running).values(seen_at=now))


def fail(connection: Connection, body: ResponseBody) -> None:
    """body: as it ended."""
    values = {"status": body.status, "body": encode_body(body)}
    connection.execute(update(background).where(background.c.id == body.id).values(values))


def stored(connection: Connection, response_id: str) -> None:
    """It is among the responses now."""
    connection.execute(delete(background).where(background.c.id == response_id))


def find(connection: Connection, principal: str, response_id: str, now: float) -> ResponseBody | None:
    mine = and_(background.c.id == response_id, background.c.principal == principal)
    row = connection.execute(select(background).where(mine)).first()
    if row is None:
        return None
    body = msgspec.json.decode(row.body, type=ResponseBody)
    return _stopped(body) if row.status == RUNNING and row.seen_at < now - STALE_S else body


def remove(connection: Connection, principal: str, response_id: str, now: float) -> bool:
    """Delete one that has ended."""
    ended = or_(background.c.status != RUNNING, background.c.seen_at < now - STALE_S)
    mine = and_(background.c.id == response_id, background.c.principal == principal, ended)
    return connection.execute(delete(background).where(mine)).rowcount > 0


def held_bytes(connection: Connection, principal: str) -> int:
    size = select(func.coalesce(func.sum(func.length(background.c.body)), 0)).where(background.c.principal == principal)
    return int(connection.execute(size).scalar_one())


def fail_all(connection: Connection, now: float, server: str = "") -> int:
    """At the start of a server, when it can run none: all that it ran are failed, and those of servers that are dead.

    Old ones are forgotten. Returns how many failed.
    """
    connection.execute(delete(background).where(background.c.created_at < now - DAYS * 86_400))
    nobodys = or_(background.c.server == server, background.c.seen_at < now - STALE_S)
    left = connection.execute(select(background.c.body).where(background.c.status == RUNNING, nobodys)).scalars().all()
    for body in left:
        fail(connection, _stopped(msgspec.json.decode(body, type=ResponseBody)))
    return len(left)


def _stopped(body: ResponseBody) -> ResponseBody:
    error = ErrorDetail(code="server_error", message=STOPPED, type="server_error", param=None)
    return msgspec.structs.replace(body, status="failed", error=error)
