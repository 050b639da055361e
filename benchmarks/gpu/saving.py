"""Saved states as a worker has them: the engine's pools, and below them a memory tier that the device copies to by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from agentserve.worker.naming import namespace_of
from agentserve.worker.pools import EnginePools
from agentserve.worker.state_bridge import BUSY_PIECE_BYTES, IDLE_PIECE_BYTES
from engine.engine import Engine
from engine.kvcache.arena import STEP_BYTES
from engine.kvcache.spans import joined
from engine.types import HoldId, KvRun, StateSnapshot
from statecache.index.radix import RadixIndex
from statecache.store import StateCache
from statecache.tiers.ram import RamTier
from statecache.types import Boundary, BoundaryKind

SALT = b"benchmark"


class Saves:
    """limit_bytes: of the memory tier, pinned before anything is measured. calls_ms: what the thread that steps spent in each
    piece of a copy."""

    def __init__(self, engine: Engine, limit_bytes: int) -> None:
        self._engine = engine
        memory = engine.memory_for_copies(limit_bytes + STEP_BYTES)
        assert memory is not None
        self.memory = memory
        began = time.perf_counter()
        memory.fill()
        self.pinned_s_per_gb = (time.perf_counter() - began) / max(1, memory.stats().pinned) * 1e9
        namespace, layout = namespace_of(engine.info, engine.layout)
        tier = RamTier(limit_bytes, take=memory.take)
        self.cache = StateCache(namespace, layout, tiers=[tier], index=RadixIndex(), take=memory.take, join=joined)
        self.cache.attach(EnginePools(engine, engine.release))
        self.calls_ms: list[float] = []

    def admit(self, tokens: Sequence[int], hold: HoldId) -> str:
        """The cache's from now on. Returns the checkpoint's id."""
        boundary = Boundary(len(tokens), BoundaryKind.TURN)
        logits = self._engine.held(hold).logits
        result = self.cache.admit(np.array(tokens, dtype=np.uint32), SALT, boundary, hold, logits=logits)
        assert result.checkpoint_id is not None, result.reason
        return result.checkpoint_id

    def piece(self, *, busy: bool) -> bool:
        """Go on with what leaves the pools, as the worker does. False: it is all in memory."""
        began = time.perf_counter()
        more = self.cache.move(BUSY_PIECE_BYTES if busy else IDLE_PIECE_BYTES, short=True)
        self.calls_ms.append(1000 * (time.perf_counter() - began))
        return more

    def read(self, tokens: np.ndarray) -> StateSnapshot:
        """What memory has of all but the last of these tokens, uint32, without a copy."""
        with self.cache.match(tokens, SALT) as match:
            assert (match.position, match.tier) == (len(tokens) - 1, "ram")
            payload = match.read()
        runs = tuple(KvRun(run.start, run.rows) for run in payload.kv)
        return StateSnapshot(payload.position, runs, self._engine.layout.split(payload.state), payload.logits)

    def close(self) -> None:
        """Forget all of it, and let others have the memory."""
        self._engine.set_beside(lambda: None)
        self._engine.settle()
        for info in self.cache.checkpoints():
            self.cache.evict(info.id)
        self._engine.forget_memory()
