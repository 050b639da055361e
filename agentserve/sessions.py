"""`/v1/sessions`: what the server keeps of each session, and why."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve.errors import NotFound
from agentserve.http import json_response
from agentserve.pages import limit_of, page, principal_of
from agentserve.services import Services


class SessionsApi:
    """Endpoints over one set of services."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def routes(self) -> list[Route]:
        return [
            Route("/v1/sessions", self.list, methods=["GET"]),
            Route("/v1/sessions/{id}", self.get, methods=["GET"]),
            Route("/v1/sessions/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/sessions/{id}/checkpoints", self.checkpoints, methods=["GET"]),
            Route("/v1/sessions/{id}/pin", self.pin, methods=["POST"]),
            Route("/v1/sessions/{id}/release", self.release, methods=["POST"]),
        ]

    async def list(self, request: Request) -> Response:
        limit = limit_of(request)
        rows = await self.services.store.sessions(principal_of(request).id, limit + 1, request.query_params.get("after"))
        return page(rows[:limit], more=len(rows) > limit, id_of=lambda row: row.id)

    async def get(self, request: Request) -> Response:
        row = await self.services.store.session(principal_of(request).id, request.path_params["id"])
        if row is None:
            raise _no_session(request.path_params["id"])
        return json_response(row)

    async def delete(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        if not await self.services.store.delete_session(principal_of(request).id, session_id):
            raise _no_session(session_id)
        self.services.worker.forget(session_id)
        return json_response({"id": session_id, "object": "session", "deleted": True})

    async def checkpoints(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        if await self.services.store.session(principal_of(request).id, session_id) is None:
            raise _no_session(session_id)
        return json_response({"object": "list", "data": await self.services.worker.checkpoints(session_id)})

    async def pin(self, request: Request) -> Response:
        return await self._pin(request, True)

    async def release(self, request: Request) -> Response:
        return await self._pin(request, False)

    async def _pin(self, request: Request, pinned: bool) -> Response:
        """Of the checkpoint that `?checkpoint=` names; without it the deepest is pinned, or all are released."""
        session_id, checkpoint = request.path_params["id"], request.query_params.get("checkpoint", "")
        if await self.services.store.session(principal_of(request).id, session_id) is None:
            raise _no_session(session_id)
        rows = await self.services.worker.pin(session_id, checkpoint, pinned)
        if rows is None:
            raise NotFound(f"no checkpoint '{checkpoint[:128]}' in this session", "checkpoint")
        return json_response({"object": "list", "data": rows})


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"Session with id '{session_id[:128]}' not found.", "session_id")
