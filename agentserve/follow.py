"""A response's events for somebody who did not start it or lost it: while it runs, when it has ended, after a restart."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from agentserve.audience import Sink, on_lane
from agentserve.errors import InvalidValue, NotFound
from agentserve.protocol.responses import ResponseBody
from agentserve.replay import send, stored_history, whole_history
from agentserve.services import Services


def no_response(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id[:128]}' not found.", "response_id")


async def follow(
    services: Services,
    principal: str,
    response_id: str,
    sink: Sink,
    *,
    after: int = -1,
    stream_id: str | UnsetType = UNSET,
) -> ResponseBody:
    """Send every event with a number above `after`; returns the final body.

    Raises NotFound, or InvalidValue if there is no event `after`; both before the first event.
    """
    turn = services.active.get(response_id)
    if turn is not None and turn.request.principal.id == principal:
        _check(after, turn.events.order.next_number)
        return await turn.sink.attend(sink, stream_id, next_number=after + 1)
    ended = services.endings.get(principal, response_id)
    if ended is None:
        stored = await services.store.get(principal, response_id)
        if stored is None:
            return await _failed(services, principal, response_id, sink, after, stream_id)
        ended = stored_history(stored)
    body, events = ended
    _check(after, len(events))
    await send([on_lane(event, stream_id) for event in events[after + 1 :]], sink)
    return body


async def _failed(
    services: Services, principal: str, response_id: str, sink: Sink, after: int, stream_id: str | UnsetType
) -> ResponseBody:
    """One of the background that was lost with its server. How many events it had sent is not known: who has some of them is
    told the last one."""
    body = await services.store.in_background(principal, response_id)
    if body is None or body.status != "failed":
        raise no_response(response_id)
    events = whole_history(body, None)
    left = events[after + 1 :] or [msgspec.structs.replace(events[-1], sequence_number=after + 1)]
    await send([on_lane(event, stream_id) for event in left], sink)
    return body


def _check(after: int, sent: int) -> None:
    if after >= sent:
        raise InvalidValue(f"got {after}; accepted: −1 to {sent - 1}, the last event so far", "starting_after")
