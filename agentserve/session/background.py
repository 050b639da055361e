"""Responses that nobody waits for, from their acceptance until they are stored: a restart then still knows of them.

Statements on an open connection. One that is stored as a response is no longer here; one that failed stays, so that whoever
looks it up is told.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, and_, delete, func, select, update

from agentserve.protocol.responses import ErrorDetail, ResponseBody, encode_body
from agentserve.session.tables import background

RUNNING = "in_progress"
DAYS = 30
"""A failed one is forgotten so long after it was accepted."""
STOPPED = "the server was stopped while this response ran; its context is unchanged, retry"


def begin(connection: Connection, principal: str, body: ResponseBody, now: float) -> None:
    row = {"id": body.id, "principal": principal, "status": RUNNING, "created_at": now, "body": encode_body(body)}
    connection.execute(background.insert(), row)


def fail(connection: Connection, body: ResponseBody) -> None:
    """body: as it ended."""
    values = {"status": body.status, "body": encode_body(body)}
    connection.execute(update(background).where(background.c.id == body.id).values(values))


def stored(connection: Connection, response_id: str) -> None:
    """It is among the responses now."""
    connection.execute(delete(background).where(background.c.id == response_id))


def find(connection: Connection, principal: str, response_id: str) -> ResponseBody | None:
    mine = and_(background.c.id == response_id, background.c.principal == principal)
    body = connection.execute(select(background.c.body).where(mine)).scalar()
    return None if body is None else msgspec.json.decode(body, type=ResponseBody)


def remove(connection: Connection, principal: str, response_id: str) -> bool:
    """Delete one that has ended."""
    mine = and_(background.c.id == response_id, background.c.principal == principal, background.c.status != RUNNING)
    return connection.execute(delete(background).where(mine)).rowcount > 0


def held_bytes(connection: Connection, principal: str) -> int:
    size = select(func.coalesce(func.sum(func.length(background.c.body)), 0)).where(background.c.principal == principal)
    return int(connection.execute(size).scalar_one())


def fail_all(connection: Connection, now: float) -> int:
    """At the start, when none can be running: all that were are failed, and old ones are forgotten. Returns how many failed.

    Where servers share a database, one that starts does this to what another one runs; that is put right when it is stored.
    """
    connection.execute(delete(background).where(background.c.created_at < now - DAYS * 86_400))
    left = connection.execute(select(background.c.body).where(background.c.status == RUNNING)).scalars().all()
    error = ErrorDetail(code="server_error", message=STOPPED, type="server_error", param=None)
    for body in left:
        fail(connection, msgspec.structs.replace(msgspec.json.decode(body, type=ResponseBody), status="failed", error=error))
    return len(left)
