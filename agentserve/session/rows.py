"""Statements over responses, items and sessions, on an open connection. No threads, no caches; store.py has those."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, and_, delete, func, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite

from agentserve.interfaces import StoredResponse
from agentserve.protocol.items import InputItem, decode_items, encode_items
from agentserve.session import shared_items
from agentserve.session.tables import conversation_items, conversations, idempotency, items, responses, sessions

MAX_BASES = 32
"""Responses whose prompt is told as a difference to the one before, in a row; then one is told in full."""

_raw_items = msgspec.json.Decoder(list[msgspec.Raw])


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    input_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_body = msgspec.json.Decoder(_Body)


def insert(connection: Connection, table: Any) -> Any:
    """An INSERT that knows ON CONFLICT."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def of_session(connection: Connection, principal: str, session_id: str) -> tuple[str, ...]:
    """Ids of a session's responses."""
    mine = and_(responses.c.session == session_id, responses.c.principal == principal)
    return tuple(connection.execute(select(responses.c.id).where(mine)).scalars())


def bodies_of(values: Sequence[InputItem]) -> list[bytes]:
    """Items as they are stored."""
    return [bytes(body) for body in _raw_items.decode(encode_items(tuple(values)))]


def add_response(
    connection: Connection,
    new: StoredResponse,
    base: str | None,
    kept_tokens: int,
    input_base: str | None = None,
    kept_items: int = 0,
) -> None:
    """Insert a response with its items and count it in its session. base, kept_tokens: whose ids its prompt begins with.

    input_base, kept_items: whose items its input begins with.

    Raises sqlalchemy.exc.IntegrityError if the id exists, PermissionError if the session belongs to another principal.
    """
    _count_turn(connection, new)
    if base is not None:
        # It may have been deleted since its ids were looked at; it must stay until this row is there.
        still = select(responses.c.id).where(responses.c.id == base).with_for_update(read=True)
        if connection.execute(still).first() is None:
            base, kept_tokens = None, 0
    if input_base is not None and not shared_items.is_there(connection, input_base, new.session):
        input_base, kept_items = None, 0
    rows = [*_item_rows(new.id, 0, new.input)[kept_items:], *_item_rows(new.id, 1, new.output)]
    connection.execute(
        responses.insert(),
        {
            "id": new.id,
            "session": new.session,
            "principal": new.principal,
            "parent": new.parent,
            "model": new.model,
            "status": new.status,
            "created_at": new.created_at,
            "completed_at": new.completed_at,
            "instructions": None if new.instructions is None else new.instructions.encode("utf-8", "surrogatepass"),
            "tools": new.tools,
            "body": new.body,
            "prompt_base": base,
            "prompt_kept": kept_tokens,
            "prompt_ids": new.prompt_ids[4 * kept_tokens :],
            "generated_ids": new.generated_ids,
            "follows": new.follows,
            "context_items": new.context_items,
            "stream": new.stream,
            "conversation": new.conversation,
            "bytes": _size(new, kept_tokens, rows),
            "input_base": input_base,
            "input_kept": kept_items,
        },
    )
    if rows:
        connection.execute(items.insert(), rows)
    if new.idempotency_key is not None:
        row = {
            "principal": new.principal,
            "key": _key_digest(new.idempotency_key),
            "response": new.id,
            "digest": new.request_digest,
        }
        connection.execute(insert(connection, idempotency).on_conflict_do_nothing(), row)


def _item_rows(response: str, output: int, values: Sequence[InputItem]) -> list[dict[str, Any]]:
    return [
        {"response": response, "output": output, "position": i, "type": value.__struct_config__.tag, "body": body}
        for i, (value, body) in enumerate(zip(values, bodies_of(values), strict=True))
    ]


def _size(new: StoredResponse, kept_tokens: int, rows: Sequence[dict[str, Any]]) -> int:
    """Bytes that the response takes here, for its principal's quota."""
    own = len(new.prompt_ids) - 4 * kept_tokens + len(new.generated_ids) + len(new.body) + len(new.tools)
    return own + len(new.instructions or "") + sum(len(row["body"]) for row in rows)


def _count_turn(connection: Connection, new: StoredResponse) -> None:
    usage = _body.decode(new.body).usage
    details = None if usage is None else usage.input_tokens_details
    statement = insert(connection, sessions)
    excluded = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=["id"],
        set_={
            "updated_at": excluded.updated_at,
            "turns": sessions.c.turns + 1,
            "last_response": excluded.last_response,
            "context_tokens": excluded.context_tokens,
            "reused_tokens": sessions.c.reused_tokens + excluded.reused_tokens,
        },
        where=sessions.c.principal == excluded.principal,
    ).returning(sessions.c.id)
    row = {
        "id": new.session,
        "principal": new.principal,
        "created_at": new.created_at,
        "updated_at": new.completed_at,
        "turns": 1,
        "last_response": new.id,
        "context_tokens": (len(new.prompt_ids) + len(new.generated_ids)) // 4,
        "reused_tokens": 0 if details is None else details.cached_tokens,
    }
    if connection.execute(statement, row).first() is None:
        raise PermissionError(f"session {new.session} belongs to another principal")


def _lock(connection: Connection, session: str) -> bool:
    """Whether a session is there, and nobody else's until the transaction ends.

    Whoever changes a session takes its row first and those of its responses then, a turn that is added too: in another order
    each of two could wait for what the other has, and PostgreSQL would end one of them.
    """
    return connection.execute(select(sessions.c.id).where(sessions.c.id == session).with_for_update()).first() is not None


def remove_response(connection: Connection, principal: str, response_id: str) -> bool:
    """Delete a response; what others were told as a difference to it they get first."""
    mine = and_(responses.c.id == response_id, responses.c.principal == principal)
    row = connection.execute(select(responses.c.session).where(mine)).first()
    if row is None or not _lock(connection, row.session):
        return False
    # Whoever is about to stand on it comes before this, and is seen below.
    if connection.execute(select(responses.c.id).where(mine).with_for_update()).first() is None:
        return False
    shared_items.let_go(connection, response_id)
    for child in connection.execute(select(responses.c.id).where(responses.c.prompt_base == response_id)).scalars().all():
        whole = prompt_ids(connection, child)
        values = {"prompt_base": None, "prompt_kept": 0, "prompt_ids": whole}
        connection.execute(update(responses).where(responses.c.id == child).values(values))
    connection.execute(delete(responses).where(mine))
    newest = connection.execute(
        select(responses.c.id)
        .where(responses.c.session == row.session)
        .order_by(responses.c.completed_at.desc(), responses.c.id.desc())
        .limit(1)
    ).scalar()
    if newest is None:
        connection.execute(delete(sessions).where(sessions.c.id == row.session))
    else:
        values = {"turns": sessions.c.turns - 1, "last_response": newest}
        connection.execute(update(sessions).where(sessions.c.id == row.session).values(values))
    return True


def remove_session(connection: Connection, principal: str, session_id: str) -> tuple[str, ...] | None:
    """Delete a session with all its responses; returns their ids, None if there is no such session."""
    mine = and_(sessions.c.id == session_id, sessions.c.principal == principal)
    if connection.execute(select(sessions.c.id).where(mine).with_for_update()).first() is None:
        return None
    inside = select(responses.c.id).where(responses.c.session == session_id)
    gone = connection.execute(inside.with_for_update()).scalars().all()
    outside = select(responses.c.id).where(responses.c.prompt_base.in_(gone), responses.c.session != session_id)
    for child in connection.execute(outside).scalars().all():
        values = {"prompt_base": None, "prompt_kept": 0, "prompt_ids": prompt_ids(connection, child)}
        connection.execute(update(responses).where(responses.c.id == child).values(values))
    connection.execute(delete(sessions).where(mine))
    return tuple(gone)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def prompt_ids(connection: Connection, response_id: str) -> bytes:
    """Prompt ids of a response, put together along its bases."""
    context, generated, _ = whole_context(connection, response_id)
    return context[: len(context) - generated]


def whole_context(connection: Connection, response_id: str) -> tuple[bytes, int, int]:
    """Prompt and generated ids of a response, how many bytes of them were generated, and how many bases it stands on."""
    parts: list[tuple[int, bytes, bytes]] = []
    at: str | None = response_id
    columns = (responses.c.prompt_base, responses.c.prompt_kept, responses.c.prompt_ids, responses.c.generated_ids)
    while at is not None:
        row = connection.execute(select(*columns).where(responses.c.id == at)).first()
        if row is None:
            raise LookupError(f"response {at}, which the prompt of {response_id} begins with, is gone")
        parts.append((row.prompt_kept, row.prompt_ids, row.generated_ids))
        at = row.prompt_base
    whole = b""
    for kept, own, generated in reversed(parts):
        prompt = whole[: 4 * kept] + own
        whole = prompt + generated
    return whole, len(parts[0][2]), len(parts) - 1


def before(connection: Connection, new: StoredResponse, limit: int) -> tuple[str, ...]:
    """Ids of the same session's responses with fewer context items than this one, most first."""
    query = (
        select(responses.c.id)
        .where(
            responses.c.session == new.session,
            responses.c.principal == new.principal,
            responses.c.context_items < new.context_items,
            responses.c.context_items > 0,
        )
        .order_by(responses.c.context_items.desc(), responses.c.completed_at.desc())
        .limit(limit)
    )
    return tuple(connection.execute(query).scalars())


def load(connection: Connection, principal: str, ids: Sequence[str]) -> dict[str, StoredResponse]:
    """Responses by id, without their prompt ids (see prompt_ids). Foreign and unknown ids are absent."""
    mine = and_(responses.c.id.in_(ids), responses.c.principal == principal)
    wanted = [c for c in responses.c if c.name != "prompt_ids"]
    rows = connection.execute(select(*wanted).where(mine)).all()
    if not rows:
        return {}
    found = [r.id for r in rows]
    given, said, keys = shared_items.inputs(connection, found), _outputs(connection, found), _keys(connection, found)
    return {r.id: _stored(r, given.get(r.id, []), said.get(r.id, []), keys.get(r.id)) for r in rows}


def _outputs(connection: Connection, ids: Sequence[str]) -> dict[str, list[bytes]]:
    bodies: dict[str, list[bytes]] = {}
    query = select(items.c.response, items.c.body).where(items.c.response.in_(ids), items.c.output == 1)
    for row in connection.execute(query.order_by(items.c.response, items.c.position)):
        bodies.setdefault(row.response, []).append(row.body)
    return bodies


def _keys(connection: Connection, ids: Sequence[str]) -> dict[str, Any]:
    query = select(idempotency.c.response, idempotency.c.key, idempotency.c.digest).where(idempotency.c.response.in_(ids))
    return {row.response: row for row in connection.execute(query)}


def _stored(row: Row[Any], inputs: Iterable[bytes], outputs: Iterable[bytes], key: Any) -> StoredResponse:
    return StoredResponse(
        id=row.id,
        principal=row.principal,
        session=row.session,
        parent=row.parent,
        model=row.model,
        status=row.status,
        created_at=row.created_at,
        completed_at=row.completed_at,
        instructions=None if row.instructions is None else row.instructions.decode("utf-8", "surrogatepass"),
        tools=row.tools,
        input=decode_items(b"[" + b",".join(inputs) + b"]"),
        output=decode_items(b"[" + b",".join(outputs) + b"]"),  # type: ignore[arg-type]
        body=row.body,
        prompt_ids=b"",
        generated_ids=row.generated_ids,
        follows=row.follows,
        context_items=row.context_items,
        stream=row.stream,
        conversation=row.conversation,
        request_digest=None if key is None else key.digest,
    )


def ancestry(connection: Connection, principal: str, response_id: str) -> tuple[str, ...] | None:
    """Ids from the root to a response; None if it or an ancestor is unknown, foreign or deleted."""
    first = select(responses.c.id, responses.c.parent, literal(0).label("depth")).where(
        responses.c.id == response_id, responses.c.principal == principal
    )
    line = first.cte("line", recursive=True)
    line = line.union_all(
        select(responses.c.id, responses.c.parent, line.c.depth + 1).where(
            responses.c.id == line.c.parent, responses.c.principal == principal
        )
    )
    rows = connection.execute(select(line.c.id, line.c.parent).order_by(line.c.depth.desc())).all()
    if not rows or rows[0].parent is not None:
        return None
    return tuple(row.id for row in rows)


def by_key(connection: Connection, principal: str, key: str) -> str | None:
    """Id of the response that was made under an idempotency key."""
    mine = and_(idempotency.c.principal == principal, idempotency.c.key == _key_digest(key))
    return connection.execute(select(idempotency.c.response).where(mine)).scalar()


def stored_bytes(connection: Connection, principal: str) -> int:
    """What a principal's responses and conversations take."""
    of_responses = select(func.coalesce(func.sum(responses.c.bytes), 0)).where(responses.c.principal == principal)
    of_items = (
        select(func.coalesce(func.sum(func.length(conversation_items.c.body)), 0))
        .join(conversations, conversations.c.id == conversation_items.c.conversation)
        .where(conversations.c.principal == principal)
    )
    return int(connection.execute(of_responses).scalar_one()) + int(connection.execute(of_items).scalar_one())


def count(connection: Connection) -> int:
    """Responses in the database."""
    return connection.execute(select(func.count()).select_from(responses)).scalar_one()


def _key_digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
