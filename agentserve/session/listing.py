"""Statements that list sessions, on an open connection. What they read does not grow with the turns of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Integer, and_, bindparam, func, literal, or_, select

from agentserve.interfaces import LINEAGE, LISTED_LINEAGE, SessionRow
from agentserve.session.tables import responses, sessions


def session_rows(
    connection: Connection, principal: str, *, only: str | None = None, limit: int = 1, after: str | None = None
) -> tuple[SessionRow, ...]:
    """Sessions of a principal, last used first. only: this one. after: those behind this one in that order."""
    query = select(sessions).where(sessions.c.principal == principal)
    if only is not None:
        query = query.where(sessions.c.id == only)
    if after is not None:
        at = select(sessions.c.updated_at).where(sessions.c.id == after, sessions.c.principal == principal).scalar_subquery()
        query = query.where(or_(sessions.c.updated_at < at, and_(sessions.c.updated_at == at, sessions.c.id < after)))
    rows = connection.execute(query.order_by(sessions.c.updated_at.desc(), sessions.c.id.desc()).limit(limit)).all()
    most = LISTED_LINEAGE if only is None else LINEAGE
    lines = _lineages(connection, [row.id for row in rows], most + 1)
    return tuple(
        SessionRow(
            id=row.id,
            created_at=int(row.created_at),
            updated_at=int(row.updated_at),
            turns=row.turns,
            last_response=row.last_response,
            context_tokens=row.context_tokens,
            reused_tokens=row.reused_tokens,
            lineage=tuple(lines[row.id][-most:]),
            lineage_has_more=len(lines[row.id]) > most,
        )
        for row in rows
    )


def kept_sessions(connection: Connection, principal: str, ids: Sequence[str]) -> frozenset[str]:
    """Which of these sessions a principal has here. Without their responses, of which one may have thousands."""
    query = select(sessions.c.id).where(sessions.c.principal == principal, sessions.c.id.in_(ids))
    return frozenset(connection.execute(query).scalars())


def _lines() -> Any:
    """(session, id) of the last response of each session of `of` and of those of the same session before it, oldest first, at
    most `most` of each. Reads these rows alone, however many responses the sessions have."""
    before = func.coalesce(responses.c.parent, responses.c.follows).label("before")
    first = (
        select(responses.c.session, responses.c.id, before, literal(1).label("place"))
        .join(sessions, and_(sessions.c.last_response == responses.c.id, sessions.c.id == responses.c.session))
        .where(sessions.c.id.in_(bindparam("of", expanding=True)))
    )
    line = first.cte("line", recursive=True)
    line = line.union_all(
        select(responses.c.session, responses.c.id, before, line.c.place + 1).where(
            responses.c.id == line.c.before,
            responses.c.session == line.c.session,
            line.c.place < bindparam("most", type_=Integer),
        )
    )
    return select(line.c.session, line.c.id).order_by(line.c.place.desc())


_LINES = _lines()
"""Made once: SQLAlchemy takes longer to put it together than SQLite to answer it."""


def _lineages(connection: Connection, of: Sequence[str], most: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in of}
    if of:
        for row in connection.execute(_LINES, {"of": list(of), "most": most}):
            found[row.session].append(row.id)
    return found
