"""The models that a server serves, each with its text and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentserve.interfaces import Text, Worker
from agentserve.session.divergence import Contexts


@dataclass(frozen=True, slots=True)
class Served:
    """One model. name: what clients call it, aliases apart. contexts: its newest ones, to say why the next differ."""

    name: str
    text: Text
    worker: Worker
    contexts: Contexts = field(default_factory=Contexts)
