"""`/v1/conversations`: contexts that the server keeps. A turn names one and extends it; a client edits it item by item.

Editing in place (`POST …/items/{item_id}`) is ours, so that an old tool result can be cleared where it stands. An edit needs
no word to the state cache: the next turn matches the longest prefix that still holds.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve.errors import InvalidValue, NotFound
from agentserve.http import json_response, read_as, read_object
from agentserve.interfaces import Conversation
from agentserve.pages import limit_of, order_of, page, principal_of
from agentserve.protocol.decode import decode_input
from agentserve.protocol.items import InputItem
from agentserve.protocol.responses import check_metadata
from agentserve.sealing import opened
from agentserve.services import Services

NOTHING = Raw(b"null")


class _Create(Struct, frozen=True, kw_only=True):
    items: Raw = NOTHING
    metadata: dict[str, str] | None = None


class _Update(Struct, frozen=True, kw_only=True):
    metadata: dict[str, str]


class _Items(Struct, frozen=True, kw_only=True):
    items: Raw


class _Item(Struct, frozen=True, kw_only=True):
    item: Raw


class ConversationsApi:
    """Endpoints over one set of services."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def routes(self) -> list[Route]:
        one, items = "/v1/conversations/{id}", "/v1/conversations/{id}/items"
        return [
            Route("/v1/conversations", self.create, methods=["POST"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(items, self.list_items, methods=["GET"]),
            Route(items, self.add_items, methods=["POST"]),
            Route(items + "/{item_id}", self.get_item, methods=["GET"]),
            Route(items + "/{item_id}", self.replace_item, methods=["POST"]),
            Route(items + "/{item_id}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        body, items = await read_as(request, self.services, _Create, lambda body: (body, self._items(request, body.items)))
        metadata = body.metadata or {}
        check_metadata(metadata)
        await self.services.quotas.check_stored(principal_of(request).id, self.services.store)
        return _shown(await self.services.store.conversations.create(principal_of(request).id, metadata, items))

    async def get(self, request: Request) -> Response:
        return _shown(await self._find(request))

    async def update(self, request: Request) -> Response:
        body = await read_object(request, self.services, _Update)
        check_metadata(body.metadata)
        changed = await self.services.store.conversations.update(principal_of(request).id, _id(request), body.metadata)
        if changed is None:
            raise _unknown(request)
        return _shown(changed)

    async def delete(self, request: Request) -> Response:
        if not await self.services.store.conversations.delete(principal_of(request).id, _id(request)):
            raise _unknown(request)
        return json_response({"id": _id(request), "object": "conversation.deleted", "deleted": True})

    # ── items ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_items(self, request: Request) -> Response:
        limit, ascending, after = limit_of(request), order_of(request) == "asc", request.query_params.get("after")
        principal, conversations = principal_of(request).id, self.services.store.conversations
        items = await conversations.page(principal, _id(request), limit=limit + 1, after=after, ascending=ascending)
        if items is None:
            raise _unknown(request)
        return page(items[:limit], more=len(items) > limit, id_of=lambda item: item.id)

    async def add_items(self, request: Request) -> Response:
        items = await read_as(request, self.services, _Items, lambda body: self._items(request, body.items))
        await self.services.quotas.check_stored(principal_of(request).id, self.services.store)
        most = self.services.config.limits.items
        added = await self.services.store.conversations.add(principal_of(request).id, _id(request), items, most)
        if added is None:
            raise _unknown(request)
        return page(added, more=False, id_of=lambda item: item.id)

    async def get_item(self, request: Request) -> Response:
        await self._find(request)
        item_id = request.path_params["item_id"]
        item = await self.services.store.conversations.item(principal_of(request).id, _id(request), item_id)
        if item is None:
            raise _unknown_item(request)
        return json_response(item)

    async def replace_item(self, request: Request) -> Response:
        """Ours: `{"item": …}` takes the place of the item and keeps its id."""

        def make(body: _Item) -> tuple[InputItem, ...]:
            return self._items(request, Raw(b"[" + bytes(body.item) + b"]"))

        (item,) = await read_as(request, self.services, _Item, make)
        await self._edit(request, item)
        return await self.get_item(request)

    async def delete_item(self, request: Request) -> Response:
        await self._edit(request, None)
        return _shown(await self._find(request))

    async def _edit(self, request: Request, item: InputItem | None) -> None:
        item_id = request.path_params["item_id"]
        await self._find(request)
        if not await self.services.store.conversations.replace(principal_of(request).id, _id(request), item_id, item):
            raise _unknown_item(request)

    def _items(self, request: Request, raw: Raw) -> tuple[InputItem, ...]:
        if bytes(memoryview(raw)[:1]) == b'"':
            raise InvalidValue("Expected an array of items", "items")
        items = decode_input(raw, max_items=self.services.config.limits.items, where="items")
        return opened(items, self.services.seal, principal_of(request).id, "items")

    async def _find(self, request: Request) -> Conversation:
        found = await self.services.store.conversations.get(principal_of(request).id, _id(request))
        if found is None:
            raise _unknown(request)
        return found


def _id(request: Request) -> str:
    return request.path_params["id"]


def _unknown(request: Request) -> NotFound:
    return NotFound(f"Conversation with id '{_id(request)[:128]}' not found.", "conversation_id")


def _unknown_item(request: Request) -> NotFound:
    return NotFound(f"InputItem with id '{request.path_params['item_id'][:128]}' not found in this conversation.", "item_id")


def _shown(conversation: Conversation) -> Response:
    body: dict[str, Any] = {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "metadata": conversation.metadata,
    }
    return json_response(body)
