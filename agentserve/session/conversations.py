"""Conversations: contexts that the server keeps and a client edits item by item. Statements, and the async calls around them.

A turn appends its input and output in the transaction that commits it. While nobody edits, the response chain says the same
as the items do, and turns are stored as differences; after an edit the next turn is stored with its whole context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from sqlalchemy import Connection, Row, and_, delete, func, select, update

from agentserve.errors import InvalidValue
from agentserve.events import new_id
from agentserve.interfaces import Conversation, StoredResponse
from agentserve.protocol.items import ID_PREFIX, InputItem, decode_items, encode_items
from agentserve.session.tables import conversation_items, conversations

T = TypeVar("T")
ASKED = 1000
"""Ids in one query; SQLite takes 32,766 parameters, PostgreSQL 65,535."""

_raw = msgspec.json.Decoder(list[msgspec.Raw])


class Run(Protocol):
    """Runs a function on an open connection, in a thread."""

    def __call__(self, function: Callable[[Connection], T], /) -> Coroutine[Any, Any, T]: ...


class SqlConversations:
    """Implements interfaces.Conversations. read, write: run a function on a connection."""

    def __init__(self, read: Run, write: Run) -> None:
        self._read = read
        self._write = write

    async def create(self, principal: str, metadata: dict[str, str], items: Sequence[InputItem]) -> Conversation:
        made = Conversation(id=new_id("conv"), created_at=time.time(), metadata=metadata)
        row = {
            "id": made.id,
            "principal": principal,
            "created_at": made.created_at,
            "metadata": msgspec.json.encode(metadata),
            "last_response": None,
            "version": made.version,
            "told": made.told,
        }

        def write(connection: Connection) -> None:
            connection.execute(conversations.insert(), row)
            _add(connection, made.id, items)

        await self._write(write)
        return made

    async def get(self, principal: str, conversation_id: str) -> Conversation | None:
        return await self._read(lambda c: _find(c, principal, conversation_id))

    async def update(self, principal: str, conversation_id: str, metadata: dict[str, str]) -> Conversation | None:
        def write(connection: Connection) -> Conversation | None:
            values = {"metadata": msgspec.json.encode(metadata)}
            connection.execute(update(conversations).where(_mine(principal, conversation_id)).values(values))
            return _find(connection, principal, conversation_id)

        return await self._write(write)

    async def delete(self, principal: str, conversation_id: str) -> bool:
        def write(connection: Connection) -> bool:
            return connection.execute(delete(conversations).where(_mine(principal, conversation_id))).rowcount > 0

        return await self._write(write)

    async def items(self, principal: str, conversation_id: str) -> tuple[InputItem, ...] | None:
        """All, oldest first. None if there is no such conversation."""

        def read(connection: Connection) -> tuple[InputItem, ...] | None:
            return None if _find(connection, principal, conversation_id) is None else _items(connection, conversation_id)

        return await self._read(read)

    async def page(
        self, principal: str, conversation_id: str, *, limit: int, after: str | None, ascending: bool
    ) -> tuple[InputItem, ...] | None:
        def read(connection: Connection) -> tuple[InputItem, ...] | None:
            if _find(connection, principal, conversation_id) is None:
                return None
            column = conversation_items.c.position
            query = select(conversation_items.c.body).where(conversation_items.c.conversation == conversation_id)
            if after is not None:
                at = _position(connection, conversation_id, after)
                if at is None:
                    raise InvalidValue("no item of this id in the list", "after")
                query = query.where(column > at if ascending else column < at)
            return _decoded(connection, query.order_by(column if ascending else column.desc()).limit(limit))

        return await self._read(read)

    async def item(self, principal: str, conversation_id: str, item_id: str) -> InputItem | None:
        def read(connection: Connection) -> InputItem | None:
            if "\0" in item_id or _find(connection, principal, conversation_id) is None:
                return None
            at = and_(conversation_items.c.conversation == conversation_id, conversation_items.c.id == item_id)
            return next(iter(_decoded(connection, select(conversation_items.c.body).where(at))), None)

        return await self._read(read)

    async def add(
        self, principal: str, conversation_id: str, items: Sequence[InputItem], most: int
    ) -> tuple[InputItem, ...] | None:
        def write(connection: Connection) -> tuple[InputItem, ...] | None:
            if not _edit(connection, principal, conversation_id):
                return None
            count = select(func.count()).where(conversation_items.c.conversation == conversation_id)
            if connection.execute(count).scalar_one() + len(items) > most:
                raise InvalidValue(f"a conversation has at most {most} items", "items")
            return _add(connection, conversation_id, items)

        return await self._write(write)

    async def replace(self, principal: str, conversation_id: str, item_id: str, item: InputItem | None) -> bool:
        """Put another item in the place of one, or remove it (None). False if there is no such item."""

        def write(connection: Connection) -> bool:
            if not _edit(connection, principal, conversation_id):
                return False
            at = and_(conversation_items.c.conversation == conversation_id, conversation_items.c.id == item_id)
            if item is None:
                return connection.execute(delete(conversation_items).where(at)).rowcount > 0
            body = encode_items((msgspec.structs.replace(item, id=item_id),))[1:-1]
            return connection.execute(update(conversation_items).where(at).values(body=body)).rowcount > 0

        return await self._write(write)


def append_turn(connection: Connection, new: StoredResponse) -> None:
    """Add a turn's items to the conversation that it extends, if that is still there."""
    seen = new.in_conversation
    if seen is None:
        return
    row = connection.execute(select(conversations).where(_mine(new.principal, seen.id)).with_for_update()).first()
    if row is None:
        return
    added = new.input[len(new.input) - seen.new_items :] + new.output
    _add(connection, seen.id, added, rename=True)
    # If another turn came between, this response's chain does not have what that one said.
    told = seen.version if row.last_response == seen.last_response else -1
    values = {"last_response": new.id, "told": told}
    connection.execute(update(conversations).where(conversations.c.id == seen.id).values(values))


def _mine(principal: str, conversation_id: str) -> Any:
    return and_(conversations.c.id == conversation_id, conversations.c.principal == principal)


def _find(connection: Connection, principal: str, conversation_id: str) -> Conversation | None:
    if "\0" in conversation_id:
        return None
    row: Row[Any] | None = connection.execute(select(conversations).where(_mine(principal, conversation_id))).first()
    if row is None:
        return None
    return Conversation(
        id=row.id,
        created_at=row.created_at,
        metadata=msgspec.json.decode(row.metadata, type=dict[str, str]),
        last_response=row.last_response,
        version=row.version,
        told=row.told,
    )


def _edit(connection: Connection, principal: str, conversation_id: str) -> bool:
    """Count an edit. False if there is no such conversation."""
    if "\0" in conversation_id:
        return False
    counted = update(conversations).where(_mine(principal, conversation_id)).values(version=conversations.c.version + 1)
    return connection.execute(counted).rowcount > 0


def _items(connection: Connection, conversation_id: str) -> tuple[InputItem, ...]:
    query = (
        select(conversation_items.c.body)
        .where(conversation_items.c.conversation == conversation_id)
        .order_by(conversation_items.c.position)
    )
    return _decoded(connection, query)


def _decoded(connection: Connection, query: Any) -> tuple[InputItem, ...]:
    return decode_items(b"[" + b",".join(connection.execute(query).scalars()) + b"]")


def _position(connection: Connection, conversation_id: str, item_id: str) -> int | None:
    if "\0" in item_id:
        return None
    at = and_(conversation_items.c.conversation == conversation_id, conversation_items.c.id == item_id)
    return connection.execute(select(conversation_items.c.position).where(at)).scalar()


def _taken(connection: Connection, conversation_id: str, items: Sequence[InputItem]) -> set[str]:
    """Which of the items' ids the conversation has already."""
    asked = [item.id for item in items if item.id and "\0" not in item.id]
    found: set[str] = set()
    for first in range(0, len(asked), ASKED):
        query = select(conversation_items.c.id).where(
            conversation_items.c.conversation == conversation_id, conversation_items.c.id.in_(asked[first : first + ASKED])
        )
        found.update(connection.execute(query).scalars())
    return found


def _add(
    connection: Connection, conversation_id: str, items: Sequence[InputItem], *, rename: bool = False
) -> tuple[InputItem, ...]:
    """Append items; each gets an id if it has none. rename: one whose id is taken gets another, else it is an InvalidValue."""
    here = conversation_items.c.conversation == conversation_id
    taken = _taken(connection, conversation_id, items)
    column = conversation_items.c.position
    last = connection.execute(select(column).where(here).order_by(column.desc()).limit(1)).scalar()
    named: list[InputItem] = []
    for i, item in enumerate(items):
        name = item.id
        if name is not None and not rename and (name in taken or not 1 <= len(name) <= 128 or "\0" in name):
            raise InvalidValue("it is taken in this conversation, or has not 1 to 128 characters", f"items[{i}].id")
        if name is None or name in taken or len(name) > 128 or "\0" in name:
            name = new_id(ID_PREFIX[str(item.__struct_config__.tag)])
        taken.add(name)
        named.append(msgspec.structs.replace(item, id=name))
    first = 0 if last is None else last + 1
    rows = [
        {"conversation": conversation_id, "id": item.id, "position": first + i, "body": bytes(body)}
        for i, (item, body) in enumerate(zip(named, _raw.decode(encode_items(tuple(named))), strict=True))
    ]
    if rows:
        connection.execute(conversation_items.insert(), rows)
    return tuple(named)
