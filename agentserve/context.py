"""Where a turn's context comes from: its session, the responses before it, and the items of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Raw

from agentserve.errors import InvalidValue, NotFound, PreviousResponseNotFound
from agentserve.interfaces import InConversation, Store, StoredResponse
from agentserve.kept import Kept
from agentserve.protocol.decode import decode_tools
from agentserve.protocol.items import InputItem, Item, Tool
from agentserve.request import TurnRequest
from agentserve.sealing import going_on_from, opened
from agentserve.services import Services
from agentserve.session_ids import conversation_session


@dataclass(frozen=True, slots=True)
class Context:
    """All items of a turn, oldest first, from the newest compaction on. own: those that the turn is stored with: its new ones,
    or all if the response before it does not say the rest. parent: the response that does. follows: one that does not.
    inherited_tools: as they are stored, where the request names none of its own.
    """

    session: str
    parent: StoredResponse | None
    items: tuple[Item, ...]
    own: tuple[InputItem, ...]
    tools: tuple[Tool, ...]
    inherited_tools: bytes | None = None
    follows: str | None = None
    conversation: InConversation | None = None


LOCAL_BYTES = 32 << 20
PER_TEXT_BYTE = 3
"""What decoded items take for each byte of their JSON; more of it is text than in schemas and arguments."""


class LocalResponses:
    """Responses with `store: false`: kept for the life of one connection, the longest unused dropped first.

    Only what a following turn needs is kept: items and tools, not bodies and token ids.
    """

    def __init__(self, limit_bytes: int = LOCAL_BYTES) -> None:
        self._kept: Kept[str, StoredResponse] = Kept(limit_bytes)

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        return self._kept.get(response_id)

    def add(self, response: StoredResponse, input_bytes: int) -> None:
        """input_bytes: of its input as JSON."""
        size = PER_TEXT_BYTE * (input_bytes + len(response.body)) + len(response.tools)
        self._kept.put(response.id, msgspec.structs.replace(response, body=b"", prompt_ids=b"", generated_ids=b""), size)


async def resolve(request: TurnRequest, services: Services, local: LocalResponses) -> Context:
    """Find the parent chain and the session, and open what is sealed. Raises PreviousResponseNotFound, InvalidValue."""
    own = opened(request.items, services.seal, request.principal.id)
    if request.conversation is not None:
        return await _extended(request, request.conversation, own, services)
    parent_id = request.create.previous_response_id
    if parent_id is None:
        if not own and not request.create.instructions:
            raise InvalidValue("nothing to answer: `input` and `instructions` are empty", "input")
        items, session = going_on_from(own, services.seal, request.principal.id)
        return Context(request.session or session or request.begins, None, items, own, request.tools or ())
    chain = await _chain(request.principal.id, parent_id, services.store, local)
    if chain is None:
        raise PreviousResponseNotFound(parent_id[:128], _why_not(services, request.principal.id, parent_id))
    parent = chain[-1]
    whole = tuple(item for turn in chain for part in (turn.input, turn.output) for item in part) + own
    items, _ = going_on_from(whole, services.seal, request.principal.id)
    return Context(parent.session, parent, items, own, *_tools(request, parent))


def _why_not(services: Services, principal: str, response_id: str) -> str:
    """Why a response cannot be followed by another."""
    turn = services.active.get(response_id)
    if turn is not None and turn.request.principal.id == principal:
        return "is still running; wait for its end, or cancel it."
    if services.endings.get(principal, response_id) is not None:
        return "failed, so that nothing follows it; name the response before it, and send the input again."
    return "not found."


def _tools(request: TurnRequest, before: StoredResponse | None) -> tuple[tuple[Tool, ...], bytes | None]:
    """The request's; left out, those of the response before it, and these as they are stored."""
    if request.tools is not None or before is None:
        return request.tools or (), None
    return decode_tools(msgspec.json.decode(before.tools, type=list[Raw]))[0], before.tools


async def _extended(request: TurnRequest, conversation_id: str, own: tuple[InputItem, ...], services: Services) -> Context:
    """The context of a conversation's next turn. Raises NotFound."""
    principal, store = request.principal.id, services.store
    conversation = await store.conversations.get(principal, conversation_id)
    kept = None if conversation is None else await store.conversations.items(principal, conversation_id)
    if conversation is None or kept is None:
        raise NotFound(f"Conversation with id '{conversation_id[:128]}' not found.", "conversation")
    if not kept and not own and not request.create.instructions:
        raise InvalidValue("nothing to answer: the conversation, `input` and `instructions` are empty", "input")
    last = conversation.last_response
    chain = None if last is None else await store.chain(principal, last)
    before = None if chain is None else chain[-1]
    parent = before if conversation.version == conversation.told else None
    return Context(
        conversation_session(principal, conversation.id),
        parent,
        going_on_from(kept + own, services.seal, principal)[0],
        own if parent is not None else kept + own,
        *_tools(request, before),
        follows=None if before is None or parent is not None else before.id,
        conversation=InConversation(id=conversation.id, version=conversation.version, last_response=last, new_items=len(own)),
    )


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
