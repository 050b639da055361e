"""Routes, lifespan and drain of the server process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from agentserve import health
from agentserve.cache_admin import CacheApi
from agentserve.compaction import compact
from agentserve.compat.chat import create_completion
from agentserve.compat.messages import count_message_tokens, create_message
from agentserve.connection import Sockets
from agentserve.conversations import ConversationsApi
from agentserve.errors import (
    ApiError,
    InvalidValue,
    MethodNotAllowed,
    NotFound,
    RateLimitExceeded,
    ResponseRunning,
    ServerError,
)
from agentserve.follow import follow, no_response
from agentserve.heads import http_protocol
from agentserve.http import (
    HUNG_UP,
    EventStream,
    ResponsesWire,
    count_input_tokens,
    create_response,
    error_response,
    json_response,
)
from agentserve.interfaces import StoredResponse
from agentserve.memory_admin import MemoryApi
from agentserve.metrics import CONTENT_TYPE
from agentserve.pages import page, page_of, principal_of
from agentserve.protocol.codec import error_body_for
from agentserve.protocol.items import ID_PREFIX, InputItem
from agentserve.security import App, Guard, Receive, Scope, Send, Tokens, refuse
from agentserve.served import Served
from agentserve.services import Services
from agentserve.sessions import SessionsApi
from agentserve.turn import Turn
from agentserve.websocket import DirectSocket

log = logging.getLogger(__name__)

CANCEL_S = 30.0
"""How long a cancel waits for the end of its response, which is one step away; longer steps are answered as they stand."""
Endpoint = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Any], contextlib.AbstractAsyncContextManager[None]]


class Api:
    """Endpoints over one set of services."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.sockets = Sockets(services)

    # ── responses ────────────────────────────────────────────────────────────────────────────────────────────────

    async def websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.sockets.serve(scope, receive, send)

    async def create(self, request: Request) -> Response:
        self._check_open()
        return await create_response(request, self.services)

    async def input_tokens(self, request: Request) -> Response:
        return await count_input_tokens(request, self.services)

    async def compact(self, request: Request) -> Response:
        self._check_open()
        return await compact(request, self.services)

    def _check_open(self) -> None:
        if self.sockets.draining:
            raise RateLimitExceeded("the server restarts", 5)

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream") in ("true", "1"):
            response_id, after = request.path_params["id"], _starting_after(request)
            principal = principal_of(request).id
            return EventStream(
                lambda sink: follow(self.services, principal, response_id, sink, after=after), self.services, ResponsesWire()
            )
        return await self._as_it_stands(request)

    async def delete(self, request: Request) -> Response:
        principal, response_id = principal_of(request).id, request.path_params["id"]
        if self._running(request) is not None:
            raise ResponseRunning(response_id[:128])
        forgotten = self.services.endings.drop(principal, response_id)
        if not await self.services.store.delete(principal, response_id) and not forgotten:
            raise no_response(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Stops a running response and answers with what became of it; one that has ended is answered as it is."""
        turn = self._running(request)
        if turn is None:
            return await self._as_it_stands(request)
        turn.cancel()
        await turn.sink.ended(CANCEL_S)
        return json_response(turn.body)

    def _running(self, request: Request) -> Turn | None:
        turn = self.services.active.get(request.path_params["id"])
        return turn if turn is not None and turn.request.principal.id == principal_of(request).id else None

    async def _as_it_stands(self, request: Request) -> Response:
        turn = self._running(request)
        if turn is not None:
            return json_response(turn.body)
        principal, response_id = principal_of(request).id, request.path_params["id"]
        ended = self.services.endings.get(principal, response_id)
        if ended is not None:
            return json_response(ended[0])
        stored = await self.services.store.get(principal, response_id)
        if stored is not None:
            return json_response(stored.body)
        begun = await self.services.store.in_background(principal, response_id)
        if begun is None:
            raise no_response(response_id)
        return json_response(begun)

    async def input_items(self, request: Request) -> Response:
        stored = await self._stored(request)
        taken: set[str | None] = {None, ""}
        items: list[InputItem] = []
        for i, item in enumerate(stored.input):
            items.append(_with_id(item, stored.id, i) if item.id in taken else item)
            taken.add(item.id)
        return page_of(request, items, lambda item: item.id)

    async def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        stored = await self.services.store.get(principal_of(request).id, response_id)
        if stored is None:
            if self._running(request) is not None:
                raise ResponseRunning(response_id[:128])
            raise no_response(response_id)
        return stored

    # ── other APIs ───────────────────────────────────────────────────────────────────────────────────────────────

    async def chat_completions(self, request: Request) -> Response:
        self._check_open()
        return await create_completion(request, self.services)

    async def messages(self, request: Request) -> Response:
        self._check_open()
        return await create_message(request, self.services)

    async def message_tokens(self, request: Request) -> Response:
        return await count_message_tokens(request, self.services)

    async def here(self, request: Request) -> Response:
        """Clients of Messages ask `HEAD /` whether there is anybody."""
        return Response()

    # ── models ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def models(self, request: Request) -> Response:
        models = [self._model_object(name, model) for name, model in self._models().items()]
        return page(models, more=False, id_of=lambda model: model["id"])

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        models = self._models()
        if name not in models:
            raise NotFound(f"model '{name[:128]}' is not served here; served: {', '.join(models)}", "model")
        return json_response(self._model_object(name, models[name]))

    def _model_object(self, name: str, model: Served) -> dict[str, Any]:
        """context_length, not in the standard: tokens of prompt and answer; null while no worker has said."""
        hello = model.worker.hello
        length = None if hello is None else hello.max_context
        return {"id": name, "object": "model", "created": 0, "owned_by": "agentserve", "context_length": length}

    def _models(self) -> dict[str, Served]:
        """By every name that clients may use, but for `*`."""
        return {
            name: self.services.served(model.name)
            for model in self.services.config.served
            for name in (model.name, *model.aliases)
            if name != "*"
        }

    # ── operation ────────────────────────────────────────────────────────────────────────────────────────────────

    async def healthz(self, request: Request) -> Response:
        return health.healthz()

    async def readyz(self, request: Request) -> Response:
        return health.readyz(self.services, draining=self.sockets.draining)

    async def metrics(self, request: Request) -> Response:
        return Response(self.services.metrics.render(), media_type=CONTENT_TYPE)

    async def drain(self) -> None:
        """Let running turns end, for at most `server.drain_s`; sockets close after theirs."""
        config = self.services.config
        log.info(
            "draining sockets=%d turns=%d limit_s=%.0f", len(self.sockets), len(self.services.active), config.server.drain_s
        )
        self.sockets.drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + config.server.drain_s
        while (self.services.active or len(self.sockets)) and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class _Socket:
    """The WebSocket route as plain ASGI: Starlette's wrapper would cost a state check per event."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api.websocket(scope, receive, send)


def routes(api: Api) -> list[Route | WebSocketRoute]:
    return [
        WebSocketRoute("/v1/responses", _Socket(api)),
        Route("/v1/responses", api.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", api.input_tokens, methods=["POST"]),
        Route("/v1/responses/compact", api.compact, methods=["POST"]),
        Route("/v1/responses/{id}", api.get, methods=["GET"]),
        Route("/v1/responses/{id}", api.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", api.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", api.input_items, methods=["GET"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.message_tokens, methods=["POST"]),
        Route("/", api.here, methods=["HEAD"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{id:path}", api.model, methods=["GET"]),
        *ConversationsApi(api.services).routes(),
        *SessionsApi(api.services).routes(),
        *CacheApi(api.services).routes(),
        *MemoryApi(api.services).routes(),
        Route("/healthz", api.healthz, methods=["GET"]),
        Route("/readyz", api.readyz, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
    ]


def create_app(services: Services, tokens: Tokens | None, lifespan: Lifespan | None = None) -> tuple[App, Api]:
    """The ASGI app, guarded, and its endpoints. lifespan: starts and stops what the services need."""
    api = Api(services)

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with lifespan(app) if lifespan is not None else contextlib.nullcontext():
            yield

    app = Starlette(
        routes=routes(api),
        lifespan=life,
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_hang_up,
            Exception: _on_bug,
        },
    )
    app.router.default = _nowhere
    return Guard(app, services.config.server, tokens, services.metrics.refused), api


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """No route: by Starlette itself an upgrade would be refused with 403 and not a word, as if the token were wrong."""
    if scope["type"] != "websocket":
        raise HTTPException(status_code=404)
    await refuse(scope, receive, send, NotFound(f"no WebSocket at {scope['path'][:128]}; accepted: /v1/responses"))


def _on_api_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError)
    return error_response(exc, request.url.path)


def _on_http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    what = f"{request.method} {request.url.path[:128]} is not served here"
    allowed = (exc.headers or {}).get("Allow")
    error: ApiError = NotFound(f"{what}; turns go to POST or WebSocket /v1/responses")
    if exc.status_code == MethodNotAllowed.status:
        error = MethodNotAllowed(f"{what}; accepted: {allowed}" if allowed else what)
    body = error_body_for(request.url.path, error)
    return Response(body, status_code=exc.status_code, media_type="application/json", headers=exc.headers)


async def _on_hang_up(request: Request, exc: Exception) -> Response:
    """The client left in the middle of its body. Nobody reads this answer; without it the log would have an error for each."""
    return Response(status_code=HUNG_UP)


def _on_bug(request: Request, exc: Exception) -> Response:
    return error_response(ServerError("the server failed on this request"), request.url.path)


class DrainingServer(uvicorn.Server):
    """uvicorn that lets turns end before it closes sockets."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api = api

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        drain = asyncio.ensure_future(self._api.drain())
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.1)
        drain.cancel()
        await super().shutdown(sockets)


def uvicorn_config(app: App, services: Services) -> uvicorn.Config:
    config = services.config
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=config.server.host,
        port=config.server.port,
        http=http_protocol(),
        ws=DirectSocket,
        ws_max_size=config.limits.frame_bytes,
        ws_per_message_deflate=config.server.compression,
        ws_ping_interval=20.0,
        ws_ping_timeout=60.0,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=10,
        lifespan="on",
    )


# ── small shapes ─────────────────────────────────────────────────────────────────────────────────────────────────


def _starting_after(request: Request) -> int:
    raw = request.query_params.get("starting_after", "")
    if raw in ("", "-1"):
        return -1
    if not raw.isascii() or not raw.isdigit() or len(raw) > 9:
        raise InvalidValue(f"got '{raw[:16]}'; accepted: the sequence_number of an event", "starting_after")
    return int(raw)


def _with_id(item: InputItem, response_id: str, index: int) -> InputItem:
    """Items without an id of their own, which pages need, get one that stays the same."""
    prefix = ID_PREFIX[str(item.__struct_config__.tag)]
    return msgspec.structs.replace(item, id=f"{prefix}_{response_id.removeprefix('resp_')}_{index}")
