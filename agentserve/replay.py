"""A response's events once more: from what it has put out and how that was cut, with the same sequence numbers.

A response keeps no copies of its events. Its `cuts` say in order what was sent: see Cut. Log-probabilities come with the
`done` events only, since cuts do not say which delta they were in.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from agentserve.audience import Sink
from agentserve.events import CLOSED, IN_PROGRESS, OPENED, QUEUED, Cut, ResponseEvents, text_of
from agentserve.interfaces import StoredResponse
from agentserve.kept import Kept
from agentserve.protocol.items import ResponseItem
from agentserve.protocol.responses import ResponseBody, encode_body
from agentserve.protocol.server_events import CacheReport, DeadlineReport, Event, PrefillProgress

_cuts = msgspec.msgpack.Decoder(list[int | PrefillProgress | CacheReport | DeadlineReport])
encode_cuts = msgspec.msgpack.Encoder().encode


def history(begun: ResponseBody, items: Sequence[ResponseItem], cuts: Sequence[Cut], stream_id: str | UnsetType) -> list[Event]:
    """Every event of a response up to now, without its terminal one. items: also the one that is not closed yet."""
    sent: list[Event] = []
    _retell(begun, items, cuts, sent, stream_id)
    return sent


def whole_history(body: ResponseBody, cuts: Sequence[Cut] | None) -> list[Event]:
    """Every event of a response that has ended. cuts None: not known, each item becomes one delta."""
    begun = msgspec.structs.replace(
        body,
        status="in_progress",
        output=(),
        usage=None,
        completed_at=None,
        incomplete_details=None,
        error=None,
        stop_sequence=UNSET,
    )
    sent: list[Event] = []
    events = _retell(begun, body.output, _whole(body.output) if cuts is None else cuts, sent, UNSET)
    events.body = body
    events.end()
    return sent


def stored_history(stored: StoredResponse) -> tuple[ResponseBody, list[Event]]:
    """The body of a stored response and all its events."""
    body = msgspec.json.decode(stored.body, type=ResponseBody)
    return body, whole_history(body, None if stored.stream is None else _cuts.decode(stored.stream))


class Endings:
    """Responses that ended and are in no store: failed ones. The newest only, and none after a restart."""

    def __init__(self, limit_bytes: int = 16 << 20) -> None:
        self._kept: Kept[str, tuple[str, ResponseBody, tuple[Cut, ...]]] = Kept(limit_bytes)

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    def add(self, principal: str, body: ResponseBody, cuts: Sequence[Cut]) -> None:
        self._kept.put(body.id, (principal, body, tuple(cuts)), len(encode_body(body)) + 100 * len(cuts))

    def get(self, principal: str, response_id: str) -> tuple[ResponseBody, list[Event]] | None:
        """The body and all events, None if it is unknown or another principal's."""
        found = self._kept.get(response_id)
        if found is None or found[0] != principal:
            return None
        return found[1], whole_history(found[1], found[2])

    def drop(self, principal: str, response_id: str) -> bool:
        """Forget a response. False if it is unknown or another principal's."""
        found = self._kept.get(response_id)
        if found is None or found[0] != principal:
            return False
        self._kept.drop(response_id)
        return True


async def send(events: Sequence[Event], sink: Sink) -> None:
    """At the pace of the reader."""
    for event in events:
        sink.put(event)
        if sink.full:
            await sink.room()


def _retell(
    begun: ResponseBody, items: Sequence[ResponseItem], cuts: Sequence[Cut], sent: list[Event], stream_id: str | UnsetType
) -> ResponseEvents:
    events = ResponseEvents(begun, sent.append, stream_id)
    events.created()
    item, at, rest = None, iter(items), ""
    for cut in cuts:
        if not isinstance(cut, int):
            events.again(cut)
        elif cut == IN_PROGRESS:
            events.in_progress()
        elif cut == QUEUED:
            events.queued()
        elif cut == OPENED:
            item = next(at)
            rest = text_of(item)
            events.begin(item)
        elif cut == CLOSED:
            assert item is not None
            events.close_as(item)
        else:
            events.write_text(rest[:cut])
            rest = rest[cut:]
    return events


def _whole(items: Sequence[ResponseItem]) -> list[Cut]:
    cuts: list[Cut] = [IN_PROGRESS]
    for item in items:
        size = len(text_of(item))
        cuts += [OPENED, *([size] if size else []), CLOSED]
    return cuts
