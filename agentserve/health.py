"""`/healthz`: this process answers. `/readyz`: it can run turns, or what is missing."""

from __future__ import annotations

from starlette.responses import Response

from agentserve.http import json_response
from agentserve.services import Services


def healthz() -> Response:
    return json_response({"status": "ok"})


def readyz(services: Services, *, draining: bool) -> Response:
    """200 when a worker is ready, else 503 with the reason; turns that come now wait for it all the same."""
    hello = services.worker.hello
    if draining:
        return json_response({"status": "draining"}, 503)
    if not services.worker.ready or hello is None:
        failure = getattr(services.worker, "failure", None)
        loading = getattr(services.worker, "loading", None)
        return json_response(
            {
                "status": "failed" if failure else "starting",
                "reason": failure or getattr(services.worker, "reason", None),
                "loading": None if loading is None else {"fraction": loading.fraction, "what": loading.what},
            },
            503,
        )
    return json_response(
        {
            "status": "ready",
            "model": services.config.model.name,
            "model_type": hello.model_type,
            "backend": hello.backend,
            "max_context": hello.max_context,
        }
    )
