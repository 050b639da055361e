"""Idempotency: the same key and body get the same response again, from the store."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from agentserve.errors import IdempotencyConflict
from agentserve.events import ResponseEvents
from agentserve.interfaces import Store, StoredResponse
from agentserve.protocol.responses import ResponseBody
from agentserve.request import TurnRequest
from agentserve.token_stream import Sink


async def known_answer(request: TurnRequest, running: Iterable[TurnRequest], store: Store) -> StoredResponse | None:
    """The stored response of this request's idempotency key, None if it is new. running: requests that have not ended.

    Raises IdempotencyConflict if the key was used for another request, or its turn still runs.
    """
    key = request.idempotency_key
    if key is None:
        return None
    if any(r.idempotency_key == key and r.principal.id == request.principal.id for r in running):
        raise IdempotencyConflict("a request with this idempotency key is running; retry when it has ended", "idempotency_key")
    known = await store.by_idempotency_key(request.principal.id, key)
    if known is not None and known.request_digest != request.digest:
        raise IdempotencyConflict("this idempotency key was used for another request", "idempotency_key")
    return known


def replay(known: StoredResponse, request: TurnRequest, sink: Sink) -> ResponseBody:
    """Send a stored response again, under its own id, as whole items."""
    body = msgspec.json.decode(known.body, type=ResponseBody)
    begun = msgspec.structs.replace(
        body, status="in_progress", output=(), usage=None, completed_at=None, incomplete_details=None
    )
    events = ResponseEvents(begun, sink.put, request.stream_id)
    events.created()
    events.in_progress()
    for item in body.output:
        events.whole_item(item)
    events.body = body
    events.end()
    return body
