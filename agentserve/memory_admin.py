"""`/v1/memory`: how each worker's device memory is divided between expert slots and KV, for whoever runs the server.

What one model's experts get is everybody's business, so only the server's own token may change it, from the same machine.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve.errors import InvalidValue, ServerError
from agentserve.http import json_response, read_object
from agentserve.pages import check_operator
from agentserve.served import Served
from agentserve.services import Services


class _Resize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: Annotated[int, Meta(ge=1, le=1 << 31)]
    model: str | None = None


class MemoryApi:
    """Endpoints over one set of services."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def routes(self) -> list[Route]:
        return [
            Route("/v1/memory", self.get, methods=["GET"]),
            Route("/v1/memory/experts", self.resize, methods=["POST"]),
        ]

    async def get(self, request: Request) -> Response:
        check_operator(request)
        return await self._answer(self.services.models, None)

    async def resize(self, request: Request) -> Response:
        """Begins at once. While turns run, a piece of it is done between two steps."""
        check_operator(request)
        body = await read_object(request, self.services, _Resize)
        return await self._answer((self._model(body.model),), body.slots)

    def _model(self, name: str | None) -> Served:
        if name is None:
            return self.services.models[0]
        try:
            return self.services.served(name)
        except KeyError:
            raise InvalidValue("no model of this name is served", "model") from None

    async def _answer(self, models: tuple[Served, ...], slots: int | None) -> Response:
        answers = await asyncio.gather(*(model.worker.memory(slots) for model in models))
        workers = []
        for model, given in zip(models, answers, strict=True):
            for number, answer in enumerate(given):
                if answer is not None and answer.refused:
                    raise InvalidValue(answer.refused, "slots")
                memory = None if answer is None or answer.row is None else msgspec.structs.asdict(answer.row)
                workers.append({"model": model.name, "worker": number, "answered": answer is not None, "memory": memory})
        if not any(worker["answered"] for worker in workers):
            raise ServerError("no worker is ready to answer; retry")
        return json_response({"object": "memory", "workers": workers})
