"""What the turns of one server share. Made by app.py."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentserve.config import Config
from agentserve.constraints.rules import Rules
from agentserve.idempotency import Claims
from agentserve.interfaces import Store
from agentserve.large import reader
from agentserve.metrics import Metrics
from agentserve.protocol.responses import ResponseBody
from agentserve.quotas import Quotas
from agentserve.replay import Endings
from agentserve.sealing import Seal
from agentserve.served import Served
from agentserve.session.unstored import Unstored

if TYPE_CHECKING:
    from agentserve.turn import Turn


@dataclass(slots=True)
class Services:
    """Each is used by all turns.

    models: those that are served; clients that name none get the first. threads: runs rendering, which takes long for long
    contexts. active: running turns by response id. beginning: those of sockets that do not run yet, and whether they were
    cancelled. claims: their idempotency keys. endings: turns that failed.
    reader: the thread that large messages are read on. rules: what answers must be. background: tasks that nobody waits for.
    seal: for what clients carry.
    """

    config: Config
    models: tuple[Served, ...]
    store: Store
    threads: Executor
    metrics: Metrics = field(default_factory=Metrics)
    active: dict[str, Turn] = field(default_factory=dict)
    beginning: dict[str, bool] = field(default_factory=dict)
    seal: Seal = field(default_factory=Seal)
    quotas: Quotas = field(init=False)
    claims: Claims = field(default_factory=Claims)
    rules: Rules = field(default_factory=Rules)
    unstored: Unstored = field(default_factory=Unstored)
    endings: Endings = field(default_factory=Endings)
    reader: Executor = field(default_factory=reader)
    background: set[asyncio.Task[ResponseBody]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.quotas = Quotas(self.config.limits)

    def served(self, name: str) -> Served:
        """A served model by its own name. Raises KeyError."""
        for model in self.models:
            if model.name == name:
                return model
        raise KeyError(name)
