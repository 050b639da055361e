"""Turns on the fake engine and a real state cache, in one process and without a pipe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentserve.worker.messages import Cut, FromWorker, Matched, Sampling, Saved, StartTurn, Tokens, TurnFailed, TurnFinished
from agentserve.worker.naming import namespace_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from statecache.durable import DiskSettings, open_states
from statecache.prefetch import Prefetcher
from statecache.reader import Reader
from statecache.store import StateCache
from statecache.types import MarkerTable
from tests.fakes.engine import EOS, FakeEngine

MARKERS = MarkerTable(think_open=(10,), think_close=(11,), call_open=(12,), call_close=(13,), turn_end=(EOS,))


class Harness:
    """clock_s: time as the loop sees it; starts now and moves only by hand. flushed: how many frames have been sent on.
    disk: where a disk tier is. reader: reads it; start() it or call its work()."""

    def __init__(
        self,
        *,
        ram_bytes: int = 1 << 20,
        chunk: int = 16,
        rows: int = 2,
        max_context: int = 4096,
        stays: bool = True,
        disk: Path | None = None,
    ) -> None:
        self.engine = FakeEngine(chunk=chunk, rows=rows, max_context=max_context)
        names = namespace_of(self.engine.info, self.engine.layout)
        settings = None if disk is None else DiskSettings(disk, 1 << 24, reserve_bytes=0)
        self.states = open_states(*names, ram_bytes, settings)
        self.cache: StateCache = self.states.cache
        prefetcher = Prefetcher(self.cache)
        self.reader = None if disk is None else Reader(prefetcher)
        self.frames: list[FromWorker] = []
        self.clock_s = time.monotonic()
        self.bridge = StateBridge(
            self.engine, self.cache, self.states.want, stays=stays, prefetch=prefetcher, reader=self.reader
        )
        self.loop = TurnLoop(self.engine, self.bridge, self.frames.append, flush=self._flush, clock=lambda: self.clock_s)
        self.flushed = 0
        self._count = 0

    def _flush(self) -> None:
        self.flushed = len(self.frames)

    def turn(
        self,
        ids: Sequence[int],
        *,
        cuts: Sequence[Cut] = (),
        script: Sequence[int] = (),
        max_tokens: int = 8,
        session: str = "s",
        salt: bytes = b"salt",
        generate: bool = True,
        deadline_s: float | None = None,
        grammar: str = "",
    ) -> str:
        """Submit a turn. script: what the engine will sample. deadline_s: enforced. Returns its id."""
        self._count += 1
        turn_id = f"t{self._count}"
        if script:
            self.engine.script[turn_id].extend(script)
        self.loop.start(
            StartTurn(
                turn_id=turn_id,
                ids=np.asarray(ids, "<u4").tobytes(),
                cuts=tuple(cuts),
                markers=MARKERS,
                salt=salt,
                session=session,
                sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
                accepted_at=self.clock_s,
                deadline_s=deadline_s,
                on_miss="continue" if deadline_s is None else "fail",
                generate=generate,
                grammar=grammar,
            )
        )
        return turn_id

    def run(self, steps: int = 10_000) -> None:
        """Step until the engine has nothing to do."""
        while self.engine.has_work and steps:
            self.bridge.chore()
            self.loop.step()
            steps -= 1

    def of(self, turn_id: str, kind: type) -> list:
        return [f for f in self.frames if isinstance(f, kind) and f.turn_id == turn_id]  # pyright: ignore[reportAttributeAccessIssue]

    def answer(self, turn_id: str) -> list[int]:
        return [token for frame in self.of(turn_id, Tokens) for token in frame.ids]

    def matched(self, turn_id: str) -> Matched:
        (frame,) = self.of(turn_id, Matched)
        return frame

    def saved(self, turn_id: str) -> list[tuple[int, str]]:
        return [(frame.position, frame.kind.value) for frame in self.of(turn_id, Saved)]

    def end(self, turn_id: str) -> TurnFinished | TurnFailed:
        """The only end of a turn, which is also its last frame."""
        ends = self.of(turn_id, TurnFinished) + self.of(turn_id, TurnFailed)
        assert len(ends) == 1, (turn_id, ends)
        assert [f for f in self.frames if getattr(f, "turn_id", None) == turn_id][-1] is ends[0]
        return ends[0]

    def assert_nothing_is_held(self) -> None:
        """Last call of a test: it empties the cache, which refuses to evict what is still in use."""
        assert self.loop.running == 0
        assert self.bridge.pins == 0
        assert len(self.engine.holds) == sum("device" in info.tiers for info in self.cache.checkpoints())
        assert all(self.cache.evict(info.id) for info in self.cache.checkpoints())
        assert self.engine.holds == {}
        counters = self.loop.load().counters
        assert (counters["turns"], counters["holds"], counters["pins"]) == (0, 0, 0)
