"""`/v1/cache`: what the tiers of saved states hold, and how much they may, for whoever runs the server.

A budget belongs to all principals together, so only the server's own token may change it, and only from the same machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentserve.errors import InvalidValue, ServerError
from agentserve.http import json_response, read_object
from agentserve.pages import check_operator
from agentserve.services import Services
from agentserve.worker.fleet import merged
from agentserve.worker.messages import Tiers


class _Quota(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ram_bytes: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None
    disk_bytes: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None


class CacheApi:
    """Endpoints over one set of services."""

    def __init__(self, services: Services) -> None:
        self.services = services

    def routes(self) -> list[Route]:
        return [
            Route("/v1/cache", self.get, methods=["GET"]),
            Route("/v1/cache/quota", self.quota, methods=["POST"]),
        ]

    async def get(self, request: Request) -> Response:
        check_operator(request)
        return self._answer(merged(await asyncio.gather(*(model.worker.tiers() for model in self.services.models))))

    async def quota(self, request: Request) -> Response:
        """Takes effect at once: what is over a smaller budget is evicted, except what is in use or pinned."""
        check_operator(request)
        body = await read_object(request, self.services, _Quota)
        if body.ram_bytes is None and body.disk_bytes is None:
            raise InvalidValue("got no budget; accepted: ram_bytes, disk_bytes or both")
        parts = _parts(body.ram_bytes, [model.ram_cache_bytes for model in self.services.config.served])
        answers = (
            model.worker.tiers(ram_bytes=part, disk_bytes=body.disk_bytes)
            for model, part in zip(self.services.models, parts, strict=True)
        )
        return self._answer(merged(await asyncio.gather(*answers)))

    def _answer(self, tiers: Tiers | None) -> Response:
        if tiers is None:
            raise ServerError("no worker is ready to answer; retry")
        if tiers.refused:
            raise InvalidValue(tiers.refused, "disk_bytes")
        served, hello = self.services.config.served, self.services.models[0].worker.hello
        return json_response(
            {
                "object": "cache",
                "namespace": None if hello is None else hello.namespace,
                "tiers": tiers.rows,
                "at_restart": {
                    "ram_bytes": sum(model.ram_cache_bytes for model in served),
                    "disk_bytes": served[0].disk_cache_bytes,
                },
            }
        )


def _parts(total: int | None, weights: Sequence[int]) -> list[int | None]:
    """A total divided as the models' settings divide theirs; equally where those have none."""
    if total is None:
        return [None] * len(weights)
    whole = sum(weights)
    return [total * weight // whole if whole else total // len(weights) for weight in weights]
