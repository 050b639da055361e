"""The server that the settings describe, where it runs already: what `doctor` finds of it. Asks over HTTP only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentserve.cli.connect import Target, Unreachable, local_target
from agentserve.cli.findings import Finding
from agentserve.cli.shapes import size

if TYPE_CHECKING:
    from agentserve.config import Config

READINESS = ("ready", "starting", "failed", "draining")


@dataclass(frozen=True, slots=True)
class Running:
    """A server at the address of the settings. readiness: what its /readyz says. own: it takes the token of these settings.

    models: names that it serves; none are known of a server that is not our own.
    """

    target: Target
    readiness: Mapping[str, Any]
    own: bool
    models: tuple[str, ...] = ()


def find_running(config: Config) -> Running | None:
    """None if nothing answers there as a server of this kind does."""
    if not config.server.port:
        return None
    target = local_target(config)
    readiness: Any = target.readiness()
    if not isinstance(readiness, dict) or readiness.get("status") not in READINESS:
        return None
    try:
        listed = target.get("/v1/models", timeout_s=5.0)["data"]
        return Running(target, readiness, True, tuple(model["id"] for model in listed))
    except (Unreachable, LookupError, TypeError):
        return Running(target, readiness, False)


def examine_running(running: Running, config: Config) -> Iterator[Finding]:
    """What stands instead of a free address and enough free memory where our own server has taken both."""
    address = f"{config.server.host}:{config.server.port}"
    yield Finding("address", "ok", f"{address} is taken by this server, which runs")
    yield _ready(running.readiness)
    missing = [model.name for model in config.served if model.name not in running.models]
    if missing:
        served = f"it serves {', '.join(running.models)}, the settings name {', '.join(missing)}"
        yield Finding("served models", "warn", served, "The settings have changed since it began: restart it.")
    else:
        yield Finding("served models", "ok", ", ".join(running.models))
    yield _saved(running.target)


def _ready(readiness: Mapping[str, Any]) -> Finding:
    status = readiness["status"]
    if status == "ready":
        return Finding("server", "ok", f"ready ({readiness.get('backend')}, up to {readiness.get('max_context')} tokens)")
    verdict: Literal["warn", "fail"] = "fail" if status == "failed" else "warn"
    reason = readiness.get("reason") or (readiness.get("loading") or {}).get("what") or "turns wait until it is ready"
    return Finding("server", verdict, f"{status}: {reason}", "/readyz says more, with each worker.")


def _saved(target: Target) -> Finding:
    try:
        tiers = target.get("/v1/cache", timeout_s=5.0)["tiers"]
    except Unreachable as error:
        return Finding("saved states", "warn", str(error))
    held = [f"{tier['tier']} {size(tier['used_bytes'])} of {size(tier['budget_bytes'])}" for tier in tiers]
    return Finding("saved states", "ok", ", ".join(held) or "none are kept")
