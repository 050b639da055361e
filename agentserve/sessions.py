"""`/v1/sessions`: what the server keeps of each session, and why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve.errors import InvalidValue, NotFound
from agentserve.events import new_id
from agentserve.http import json_response, read_object
from agentserve.interfaces import LISTED_LINEAGE, SessionRow, StoredResponse
from agentserve.pages import limit_of, page, principal_of
from agentserve.protocol.responses import ResponseBody, encode_body
from agentserve.services import Services
from agentserve.worker.messages import CheckpointRow


class _Fork(Struct, frozen=True, kw_only=True):
    response_id: str | None = None


class SessionsApi:
    """Endpoints over one set of services."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def routes(self) -> list[Route]:
        return [
            Route("/v1/sessions", self.list, methods=["GET"]),
            Route("/v1/sessions/{id}", self.get, methods=["GET"]),
            Route("/v1/sessions/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/sessions/{id}/fork", self.fork, methods=["POST"]),
            Route("/v1/sessions/{id}/checkpoints", self.checkpoints, methods=["GET"]),
            Route("/v1/sessions/{id}/pin", self.pin, methods=["POST"]),
            Route("/v1/sessions/{id}/release", self.release, methods=["POST"]),
        ]

    async def list(self, request: Request) -> Response:
        """Those of which nothing is stored first, then the stored ones."""
        principal, limit, after = principal_of(request).id, limit_of(request), request.query_params.get("after")
        known = self.services.unstored.names(principal)
        place = next((i for i, name in enumerate(known) if name == after), None)
        here = known if after is None else [] if place is None else known[place + 1 :]
        after = None if place is not None else after
        asked = here + ([] if after is None else [after])
        kept = await self.services.store.kept_sessions(principal, asked) if asked else frozenset()
        if after is not None and after not in kept:
            raise InvalidValue("no session of this id in the list", "after")
        stored = await self.services.store.sessions(principal, limit + 1, after)
        names = [name for name in here if name not in kept][: limit + 1]
        shown = (self.services.unstored.row(principal, name, LISTED_LINEAGE) for name in names)
        rows = [*(row for row in shown if row is not None), *stored]
        return page(rows[:limit], more=len(rows) > limit, id_of=lambda row: row.id)

    async def get(self, request: Request) -> Response:
        return json_response(await self._find(request))

    async def delete(self, request: Request) -> Response:
        session_id, principal = request.path_params["id"], principal_of(request).id
        known = self.services.unstored.forget(principal, session_id)
        if not await self.services.store.delete_session(principal, session_id) and not known:
            raise _no_session(session_id)
        for model in self.services.models:
            model.worker.forget(session_id)
        return json_response({"id": session_id, "object": "session", "deleted": True})

    async def checkpoints(self, request: Request) -> Response:
        session = await self._find(request)
        return json_response({"object": "list", "data": await self._checkpoints(session.id)})

    async def pin(self, request: Request) -> Response:
        return await self._pin(request, True)

    async def release(self, request: Request) -> Response:
        return await self._pin(request, False)

    async def _pin(self, request: Request, pinned: bool) -> Response:
        """Of the checkpoint that `?checkpoint=` names; without it the deepest is pinned, or all are released."""
        session, checkpoint = await self._find(request), request.query_params.get("checkpoint", "")
        chosen = self.services.models
        if pinned and not checkpoint:
            last = None if session.last_response is None else await self._last(request, session.last_response)
            chosen = tuple(m for m in chosen if last is not None and m.name == last.model) or chosen[:1]
        answers = await asyncio.gather(*(model.worker.pin(session.id, checkpoint, pinned) for model in chosen))
        if all(answer is None for answer in answers):
            raise NotFound(f"no checkpoint '{checkpoint[:128]}' in this session", "checkpoint")
        return json_response({"object": "list", "data": await self._checkpoints(session.id)})

    async def _last(self, request: Request, response_id: str) -> StoredResponse | None:
        return await self.services.store.get(principal_of(request).id, response_id)

    async def _checkpoints(self, session_id: str) -> list[CheckpointRow]:
        """Of all models that the session used."""
        lists = await asyncio.gather(*(model.worker.checkpoints(session_id) for model in self.services.models))
        return [row for rows in lists for row in rows]

    async def fork(self, request: Request) -> Response:
        """A session of its own that begins with what another says up to a response (`{"response_id": …}`, else its last)."""
        session = await self._find(request)
        body = await read_object(request, self.services, _Fork)
        principal = principal_of(request)
        response_id = body.response_id or session.last_response or ""
        chain = await self.services.store.chain(principal.id, response_id)
        if chain is None or chain[-1].session != session.id:
            raise NotFound(f"Response with id '{response_id[:128]}' is not stored in this session.", "response_id")
        await self.services.quotas.check_stored(principal.id, self.services.store)
        last = await self.services.store.get(principal.id, response_id)
        made = None if last is None else forked(chain, last)
        if made is None:
            raise NotFound(f"Response with id '{response_id[:128]}' not found.", "response_id")
        await self.services.store.commit(made)
        return json_response(await self.services.store.session(principal.id, made.session))

    async def _stored(self, request: Request, session_id: str) -> SessionRow | None:
        return await self.services.store.session(principal_of(request).id, session_id)

    async def _find(self, request: Request) -> SessionRow:
        session_id = request.path_params["id"]
        row = await self._stored(request, session_id) or self.services.unstored.row(principal_of(request).id, session_id)
        if row is None:
            raise _no_session(session_id)
        return row


def forked(chain: Sequence[StoredResponse], last: StoredResponse) -> StoredResponse:
    """The last response of a chain, with the whole context before it, as the first of a session of its own."""
    before = tuple(item for turn in chain[:-1] for part in (turn.input, turn.output) for item in part)
    body, name = msgspec.json.decode(last.body, type=ResponseBody), new_id("resp")
    now = time.time()
    return msgspec.structs.replace(
        last,
        id=name,
        session=new_id("ses"),
        parent=None,
        follows=None,
        created_at=now,
        completed_at=now,
        input=before + last.input,
        body=encode_body(msgspec.structs.replace(body, id=name, previous_response_id=None, conversation=None)),
        conversation=None,
        request_digest=None,
    )


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"Session with id '{session_id[:128]}' not found.", "session_id")
