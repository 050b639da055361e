"""What engine tests share: small engines on the hash model, and a loop that runs them to the end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.device.base import Device
from engine.engine import Engine
from engine.types import CutReached, EngineEvent, Finished, PrefillProgress, Request, SamplingParams, TokenEvent
from tests.fakes.hash_model import VOCAB, HashModel

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def make_engine(
    model: Any = None, *, clock_ns: Callable[[], int] = time.monotonic_ns, device: Device | None = None, **settings: Any
) -> Engine:
    """Page 16, chunk 64, poisoned: stale reads turn into NaN and end a request with "error". device: where state lies."""
    defaults: dict[str, Any] = {
        "page_size": 16,
        "chunk_tokens": 64,
        "max_rows": 8,
        "kv_tokens": 16 * 128,
        "snapshot_rows": 64,
        "memory_bytes": 1 << 24,
        "decode_gap_ms": 0,
        "poison_freed": True,
    }
    return Engine(model or HashModel(), EngineConfig(**(defaults | settings)), device=device, clock_ns=clock_ns)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def request(id: str, tokens: list[int], max_tokens: int = 8, **more: Any) -> Request:
    sampling = more.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(id=id, token_ids=np.array(tokens, dtype=np.int32), sampling=sampling, **more)


@dataclass
class Log:
    """Events sorted by request."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    cuts: dict[str, list[CutReached]] = field(default_factory=lambda: defaultdict(list))
    progress: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[str, Finished] = field(default_factory=dict)

    def add(self, events: list[EngineEvent]) -> None:
        for event in events:
            assert event.request_id not in self.finished, "an event after the last"
            match event:
                case TokenEvent():
                    assert event.index == len(self.tokens[event.request_id])
                    self.tokens[event.request_id].append(event.token_id)
                case CutReached():
                    self.cuts[event.request_id].append(event)
                case PrefillProgress():
                    self.progress[event.request_id].append(event.processed)
                case Finished():
                    self.finished[event.request_id] = event

    def hold_at(self, id: str, position: int):
        return next(c.hold for c in self.cuts[id] if c.position == position)


def run(engine: Engine, log: Log | None = None, limit: int = 10_000) -> Log:
    """Step until nothing is left to do, checking the accounts each time."""
    log = log or Log()
    for _ in range(limit):
        if not engine.has_work:
            return log
        log.add(engine.step())
        engine.check()
    raise AssertionError(f"still busy after {limit} steps: {engine.stats()}")


def release_all(engine: Engine) -> None:
    """Give every hold back; then everything must be free."""
    for hold in list(engine.store.holds):
        engine.release(hold)
    engine.check()
    stats = engine.stats()
    assert stats.free_pages == stats.total_pages
    assert stats.free_rows == stats.total_rows
