"""A fake engine: the real one, its scheduler, pages, rows and holds included, over a model that only takes the time of another.

The model computes nothing. A step advances a clock by what machines.py says, and the next token is a fixed word: so turns,
order, pauses, restores and accounts are those that serve, at the speed of a machine that is not here. The clock is virtual
(hours in seconds, the same on any machine) or real (a worker process under a server).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.load.machines import Machine
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.base import LayerSpec, Logits, ModelSpec
from engine.scheduler.pace import Work, pairs
from engine.types import Request, StateSnapshot


class Clock(Protocol):
    def now_ns(self) -> int: ...

    def spend(self, us: int) -> None:
        """Let this much time pass."""
        ...


class VirtualClock:
    """Time passes when it is spent or moved."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def now_ns(self) -> int:
        return self.ns

    def now_s(self) -> float:
        return self.ns / 1e9

    def spend(self, us: int) -> None:
        self.ns += us * 1000

    def until(self, us: int) -> None:
        """Move on to that time, if it is not over."""
        self.ns = max(self.ns, us * 1000)


class UnsteadyClock(VirtualClock):
    """A machine whose steps take more or less than they should: each by itself, and all of some seconds together.

    spread: standard deviation of either, relative.
    """

    LASTS_US = 2_000_000

    def __init__(self, spread: float, seed: int) -> None:
        super().__init__()
        self._spread = spread
        self._rng = random.Random(seed)
        self._lasting = 0.0

    def spend(self, us: int) -> None:
        kept = math.exp(-us / self.LASTS_US)
        self._lasting = kept * self._lasting + math.sqrt(1 - kept * kept) * self._rng.gauss(0, self._spread)
        super().spend(round(us * math.exp(self._lasting + self._rng.gauss(0, self._spread))))


class RealClock:
    """Sleeps. What the program itself needed since the last step is part of the step, so that steps keep their beat."""

    def __init__(self) -> None:
        self._due = 0.0

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def spend(self, us: int) -> None:
        now = time.monotonic()
        # Late by more than this step: whatever held it up is not caught up with.
        begin = self._due if now - self._due < us / 1e6 else now
        self._due = begin + us / 1e6
        if self._due > now:
            time.sleep(self._due - now)


def timed_spec(vocab_size: int, end: int, max_context: int) -> ModelSpec:
    """State as small as it can be: 8 bytes of KV a token, three numbers of recurrent state."""
    return ModelSpec(
        model_type="timed",
        vocab_size=vocab_size,
        hidden=1,
        layers=(LayerSpec(0, "attention", 0, moe=False), LayerSpec(1, "delta", 0, moe=False)),
        kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        eos_token_ids=(end,),
        max_context=max_context,
        parameters=0,
        H_v=1,
        d_k=1,
        d_v=1,
        conv_dim=1,
        conv_kernel=2,
    )


class TimedModel:
    """words: ids that answers are made of, one after the other by position."""

    def __init__(self, spec: ModelSpec, machine: Machine, clock: Clock, words: Sequence[int]) -> None:
        self.spec = spec
        self._machine = machine
        self._clock = clock
        self._words = np.array(words)
        self._table = torch.zeros(len(words), spec.vocab_size)
        for row, word in enumerate(words):
            self._table[row, word] = 50.0

    def forward(self, batch: ForwardBatch, kv: Any, states: Any) -> Logits:
        rows = context = prefill = back = 0
        for seq in batch.seqs:
            if seq.length == 1 and seq.context:
                rows += 1
                context += seq.context
            else:
                prefill += seq.length
                back += pairs(seq.context, seq.context + seq.length)
        self._clock.spend(self._machine.step_us(Work(rows, context, prefill, back)))
        at = batch.positions[batch.logit_rows] % len(self._words)
        return Logits(self._table[at], self._words[at.numpy()].tolist())


class TimedEngine(Engine):
    """Restores take the time that bringing back the full-size state would."""

    machine: Machine
    clock: Clock

    def submit(self, request: Request) -> None:
        super().submit(request)
        if isinstance(request.restore, StateSnapshot):
            self.clock.spend(self.machine.restore_us(request.restore.position, "ram"))


def timed_engine(
    machine: Machine, clock: Clock, *, vocab_size: int, end: int, words: Sequence[int], kv_tokens: int, **settings: Any
) -> TimedEngine:
    """kv_tokens: room for running contexts. settings: further fields of EngineConfig."""
    spec = timed_spec(vocab_size, end, machine.most_context)
    chosen = {"chunk_tokens": machine.chunk, "max_rows": machine.rows, "snapshot_rows": 64, **settings}
    config = EngineConfig(kv_tokens=kv_tokens, memory_bytes=1 << 30, **chosen)
    engine = TimedEngine(TimedModel(spec, machine, clock, words), config, f"timed {machine.name}", clock_ns=clock.now_ns)
    engine.machine, engine.clock = machine, clock
    return engine
