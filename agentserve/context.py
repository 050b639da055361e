"""Where a turn's context comes from: its session, the responses before it, and the items of all of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from agentserve.errors import InvalidValue, PreviousResponseNotFound
from agentserve.interfaces import Store, StoredResponse
from agentserve.protocol.decode import decode_tools
from agentserve.protocol.items import Item, Tool
from agentserve.request import TurnRequest
from agentserve.sealing import opened
from agentserve.services import Services


@dataclass(frozen=True, slots=True)
class Context:
    """All items of a turn, oldest first. own: the turn's, which are the last of them. parent: the response it follows."""

    session: str
    parent: StoredResponse | None
    items: tuple[Item, ...]
    own: tuple[Item, ...]
    tools: tuple[Tool, ...]


@dataclass(slots=True)
class LocalResponses:
    """Responses with `store: false`: kept for the life of one connection, the oldest dropped first.

    Only what a following turn needs is kept: items and tools, not bodies and token ids.
    """

    limit: int = 256
    _kept: dict[str, StoredResponse] = field(default_factory=dict)

    def get(self, response_id: str) -> StoredResponse | None:
        return self._kept.get(response_id)

    def add(self, response: StoredResponse) -> None:
        self._kept[response.id] = msgspec.structs.replace(response, body=b"", prompt_ids=b"", generated_ids=b"")
        while len(self._kept) > self.limit:
            del self._kept[next(iter(self._kept))]


async def resolve(request: TurnRequest, services: Services, local: LocalResponses) -> Context:
    """Find the parent chain and the session, and open what is sealed. Raises PreviousResponseNotFound, InvalidValue."""
    own = opened(request.items, services.seal, request.principal.id)
    parent_id = request.create.previous_response_id
    if parent_id is None:
        if not own and not request.create.instructions:
            raise InvalidValue("nothing to answer: `input` and `instructions` are empty", "input")
        return Context(_first_session(request), None, own, own, request.tools or ())
    chain = await _chain(request.principal.id, parent_id, services.store, local)
    if chain is None:
        raise PreviousResponseNotFound(parent_id[:128])
    parent = chain[-1]
    items = tuple(item for turn in chain for part in (turn.input, turn.output) for item in part) + own
    tools = decode_tools(msgspec.json.decode(parent.tools, type=list[Raw]))[0] if request.tools is None else request.tools
    return Context(parent.session, parent, items, own, tools)


async def _chain(principal: str, response_id: str, store: Store, local: LocalResponses) -> tuple[StoredResponse, ...] | None:
    newer: list[StoredResponse] = []
    at: str | None = response_id
    while at is not None and (kept := local.get(at)) is not None:
        newer.append(kept)
        at = kept.parent
    older: tuple[StoredResponse, ...] | None = ()
    if at is not None:
        older = await store.chain(principal, at)
    return None if older is None else (*older, *reversed(newer))


def _first_session(request: TurnRequest) -> str:
    """Id of the session that a turn without a parent belongs to: by name if it has one, else by how its context begins."""
    if request.session_hint is not None:
        seed = request.session_hint.encode()
    else:
        first_user = next(
            (i for i, item in enumerate(request.items) if getattr(item, "role", None) == "user"), len(request.items)
        )
        head = tuple((getattr(item, "role", ""), getattr(item, "text", "")) for item in request.items[: first_user + 1])
        seed = msgspec.msgpack.encode((request.create.instructions, head))
    return "ses_" + hashlib.sha256(request.principal.id.encode() + b"\0" + seed).hexdigest()[:30]
