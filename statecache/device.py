"""The first tier: states that stay in the engine's pools under a hold, and are used again without a copy.

Knows which checkpoints have a hold and what the engine says of it; moves.py decides what stays. The holds are the engine's, so
whoever calls add(), release() or read() must be the thread that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from statecache.checkpoint import Record, TierStats
from statecache.types import KvRun, Payload


class Copied(Protocol):
    """On the host, read-only, each array of its own. kv: uint8 [tokens, kv_token_bytes], in order. logits: f32."""

    @property
    def kv(self) -> Sequence[np.ndarray]: ...
    @property
    def state(self) -> Mapping[str, np.ndarray]: ...
    @property
    def logits(self) -> np.ndarray | None: ...


class Copy(Protocol):
    """Bytes on their way to the host. May be forgotten before it is done."""

    @property
    def done(self) -> bool:
        """Whether result() will not wait."""
        ...

    def result(self) -> Copied:
        """Waits; raises what went wrong."""
        ...


class Pools(Protocol):
    """What the state cache asks of an engine. A hold names one state there until it is released; its bytes never change."""

    @property
    def used_bytes(self) -> int:
        """Of all held states, what they share counted once."""
        ...

    @property
    def budget_bytes(self) -> int: ...

    def tokens(self, hold: int) -> np.ndarray:
        """uint32 [position]: the ids that made the state."""
        ...

    def rows(self, hold: int, start: int, stop: int, each: int) -> Copy:
        """Begin to copy its KV rows [start, stop), in arrays of `each` tokens."""
        ...

    def rest(self, hold: int, start: int) -> Copy:
        """Begin to copy its KV rows from `start` on, in one array if there are any, its recurrent components, each
        uint8 [nbytes], and its logits if it has them."""
        ...

    def own_bytes(self, hold: int) -> int:
        """Bytes that its release would free."""
        ...

    def release(self, hold: int) -> None: ...


@dataclass(slots=True, eq=False)
class Resident:
    """A checkpoint's place in the pools. logits: whether they are there. readers: matches that are about to be restored.

    stuck: no other tier took it, so it is not tried again while it is here.
    """

    record: Record
    hold: int
    logits: bool
    readers: int = 0
    stuck: bool = False


class Device:
    """residents: by checkpoint id, oldest first. copied_bytes: brought to another tier. dropped: released without any copy."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.residents: dict[str, Resident] = {}
        self.hits = 0
        self.evictions = 0
        self.copied_bytes = 0
        self.dropped = 0
        self.on_release: Callable[[Resident], None] = lambda resident: None
        """Told of each that leaves, for whatever reason."""

    def add(self, record: Record, hold: int, *, logits: bool) -> None:
        """Take over a hold. Of two for one checkpoint the one with logits stays."""
        known = self.residents.get(record.id)
        if known is None:
            self.residents[record.id] = Resident(record, hold, logits)
        elif logits and not known.logits:
            old, known.hold, known.logits, known.stuck = known.hold, hold, True, False
            self.pools.release(old)
        else:
            self.pools.release(hold)

    def release(self, record: Record) -> None:
        """Let the engine have its pages and row again."""
        resident = self.residents.pop(record.id)
        self.evictions += 1
        self.on_release(resident)
        self.pools.release(resident.hold)

    def read(self, resident: Resident) -> Payload:
        """A copy of everything."""
        position = resident.record.position
        copied = self.pools.rest(resident.hold, 0).result()
        runs = tuple(KvRun(0, rows) for rows in copied.kv)
        return Payload(position, runs, copied.state, copied.logits if resident.logits else None)

    def stats(self) -> TierStats:
        return TierStats(
            used_bytes=self.pools.used_bytes,
            budget_bytes=self.pools.budget_bytes,
            checkpoints=len(self.residents),
            blocks=0,
            evictions=self.evictions,
            hits=self.hits,
            written_bytes=0,
            refused=0,
            quarantined=0,
        )
