"""A worker that plays scripts. Implements agentserve.interfaces.Worker in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from agentserve.interfaces import TurnFrame
from agentserve.worker.messages import (
    CheckpointRow,
    Hello,
    Load,
    Matched,
    Memory,
    MemoryRow,
    Progress,
    StartTurn,
    TierRow,
    Tiers,
    TokenLogprob,
    Tokens,
    TurnFailed,
    TurnFinished,
)
from statecache.types import BoundaryKind
from tests.fakes.text import END, ids_of

HELLO = Hello(
    version=1,
    model="fake",
    model_type="fake",
    vocab_size=0x110010,
    eos_token_ids=(END,),
    max_context=100_000,
    backend="fake",
    namespace="00",
    pid=0,
)

Step = TurnFrame | float | asyncio.Event
"""A frame to yield, seconds to wait, or an event to wait for."""


def finished(start: StartTurn, output: int, **fields: Any) -> TurnFinished:
    values: dict[str, Any] = {
        "turn_id": start.turn_id,
        "reason": "stop",
        "prompt_tokens": len(start.ids) // 4,
        "output_tokens": output,
        "reused_tokens": 0,
        "written_tokens": len(start.ids) // 4,
        "queue_s": 0.0,
        "restore_s": 0.0,
        "prefill_s": 0.0,
        "ttft_s": 0.01,
        "decode_s": 0.0,
    }
    return TurnFinished(**(values | fields))


def answer(
    ids: Sequence[int] | str, *, reused: int = 0, reason: str = "stop", chunk: int = 1, logprobs: bool = False
) -> Callable[[StartTurn], list[Step]]:
    """Script of an ordinary turn: match, progress, `chunk` ids per Tokens frame, finish."""
    tokens = ids_of(ids) if isinstance(ids, str) else tuple(ids)

    def script(start: StartTurn) -> list[Step]:
        n = len(start.ids) // 4
        frames: list[Step] = [
            Matched(
                turn_id=start.turn_id,
                position=reused,
                tier="ram" if reused else None,
                kind=BoundaryKind.TURN if reused else None,
                divergence=None,
                cause="none" if reused else "cold",
                predicted_ttft_s=0.02,
            ),
            Progress(turn_id=start.turn_id, processed=n, total=n, cached=reused, queued=0, eta_s=0.01),
        ]
        if start.generate:
            for i in range(0, len(tokens), chunk):
                part = tokens[i : i + chunk]
                marks = tuple(TokenLogprob(-0.5, ((part[0], -0.5),)) for _ in part) if logprobs else ()
                frames.append(Tokens(turn_id=start.turn_id, ids=part, logprobs=marks))
        frames.append(finished(start, len(tokens) if start.generate else 0, reused_tokens=reused, reason=reason))
        return frames

    return script


def progress(start: StartTurn, *, queued: int = 0) -> Progress:
    return Progress(turn_id=start.turn_id, processed=0, total=len(start.ids) // 4, cached=0, queued=queued, eta_s=1.0)


def failing(code: str, message: str) -> Callable[[StartTurn], list[Step]]:
    return lambda start: [TurnFailed(start.turn_id, code, message)]


class FakeWorker:
    """scripts: played in order, one per turn; then `default`. starts: every StartTurn. cancelled: ids asked to stop or left."""

    def __init__(self) -> None:
        self.ready = True
        self.hello: Hello | None = HELLO
        self.load: Load | None = None
        self.scripts: deque[Callable[[StartTurn], list[Step]]] = deque()
        self.default = answer("Hello there")
        self.starts: list[StartTurn] = []
        self.cancelled: list[str] = []
        self.device_memory = MemoryRow(
            slots=32,
            wanted_slots=32,
            least_slots=8,
            most_slots=64,
            experts=128,
            slot_bytes=6 << 20,
            pages=100,
            wanted_pages=100,
            page_tokens=64,
            page_bytes=1 << 20,
            moves=0,
            lent_bytes=0,
            fixed="",
            trouble="",
        )
        self.left: list[str] = []
        self.forgotten: list[str] = []
        self.expected: dict[str, tuple[bytes, bytes]] = {}
        self._stop: dict[str, asyncio.Event] = {}

    async def run(self, start: StartTurn, on_tokens: Callable[[Tokens], bool] | None = None) -> AsyncGenerator[TurnFrame, None]:
        self.starts.append(start)
        stop = self._stop[start.turn_id] = asyncio.Event()
        script = self.scripts.popleft() if self.scripts else self.default
        output, ended = 0, False
        try:
            for step in script(start):
                if isinstance(step, float | asyncio.Event):
                    wait = asyncio.sleep(step) if isinstance(step, float) else step.wait()
                    tasks = {asyncio.ensure_future(wait), asyncio.ensure_future(stop.wait())}
                    try:
                        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for task in tasks:
                            task.cancel()
                if stop.is_set():
                    ended = True
                    yield finished(start, output, reason="cancelled")
                    return
                if isinstance(step, float | asyncio.Event):
                    continue
                if isinstance(step, Tokens):
                    output += len(step.ids)
                if isinstance(step, Tokens) and on_tokens is not None and on_tokens(step):
                    await asyncio.sleep(0)
                    continue
                ended = isinstance(step, TurnFinished | TurnFailed)
                yield step
                await asyncio.sleep(0)
        finally:
            del self._stop[start.turn_id]
            if not ended:
                self.left.append(start.turn_id)

    def cancel(self, turn_id: str) -> None:
        self.cancelled.append(turn_id)
        if turn_id in self._stop:
            self._stop[turn_id].set()

    async def checkpoints(self, session: str) -> tuple[CheckpointRow, ...]:
        return (CheckpointRow(id="c1", position=10, kind=BoundaryKind.USER, tier="ram", bytes=4096, hits=1, age_s=0.5),)

    async def pin(self, session: str, checkpoint: str, pinned: bool) -> tuple[CheckpointRow, ...] | None:
        rows = await self.checkpoints(session)
        return None if checkpoint not in ("", "c1") else rows

    async def tiers(self, *, ram_bytes: int | None = None, disk_bytes: int | None = None) -> Tiers | None:
        if disk_bytes is not None:
            return Tiers(1, (), "there is no disk tier")
        budget = 1 << 30 if ram_bytes is None else ram_bytes
        return Tiers(1, (TierRow(tier="ram", used_bytes=4096, budget_bytes=budget, checkpoints=1),))

    async def memory(self, slots: int | None = None) -> tuple[Memory | None, ...]:
        if slots is not None and not 8 <= slots <= 64:
            return (Memory(1, self.device_memory, f"slots: got {slots}, accepted: 8 to 64"),)
        if slots is not None:
            self.device_memory = msgspec.structs.replace(self.device_memory, slots=slots, wanted_slots=slots)
        return (Memory(1, self.device_memory),)

    def forget(self, session: str) -> None:
        self.forgotten.append(session)

    def expect(self, key: str, ids: bytes, salt: bytes, session: str = "") -> None:
        self.expected[key] = (ids, salt)

    def unexpect(self, key: str) -> None:
        self.expected.pop(key, None)
