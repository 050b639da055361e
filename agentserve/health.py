"""`/healthz`: this process answers. `/readyz`: it can run turns, or what is missing."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from agentserve.http import json_response
from agentserve.served import Served
from agentserve.services import Services


def healthz() -> Response:
    return json_response({"status": "ok"})


def readyz(services: Services, *, draining: bool) -> Response:
    """200 when every model has a ready worker, else 503 with the reason; turns that come now wait for it all the same.

    At the top is what is said of the first model that is not ready, or of the first one; `models` has all, with each worker.
    """
    if draining:
        return json_response({"status": "draining"}, 503)
    models = [_model(model) for model in services.models]
    shown = next((model for model in models if model["status"] != "ready"), models[0])
    top = {name: value for name, value in shown.items() if name != "workers"}
    return json_response({**top, "models": models}, 200 if shown["status"] == "ready" else 503)


def _model(model: Served) -> dict[str, Any]:
    worker, hello = model.worker, model.worker.hello
    workers = [_state(client) for client in getattr(worker, "clients", ())]
    if not worker.ready or hello is None:
        return {"model": model.name, **_missing(worker), "workers": workers}
    return {
        "model": model.name,
        "status": "ready",
        "model_type": hello.model_type,
        "backend": hello.backend,
        "max_context": hello.max_context,
        "workers": workers,
    }


def _state(client: Any) -> dict[str, Any]:
    """One worker. client: worker.client.WorkerClient."""
    hello = client.hello
    if hello is None or not client.ready:
        return _missing(client) | ({"status": "draining"} if client.draining and hello is not None else {})
    return {"status": "ready"}


def _missing(worker: Any) -> dict[str, Any]:
    failure, loading = getattr(worker, "failure", None), getattr(worker, "loading", None)
    return {
        "status": "failed" if failure else "starting",
        "reason": failure or getattr(worker, "reason", None),
        "loading": None if loading is None else {"fraction": loading.fraction, "what": loading.what},
    }
