"""The same prefill and decode, run by this engine's model and by transformers, for comparison in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import spread
from engine.batch import ForwardBatch, SeqSlice
from engine.config import EngineConfig
from engine.kvcache.pool import KvPools
from engine.kvcache.recurrent import RecurrentPools
from engine.runner import load_model

PAGE, CHUNK = 64, 512  # as the engine runs by default


class Ours:
    """One sequence on the fast backend, pages and rows as the engine would hand them out."""

    name = "engine"

    def __init__(self, directory: Path, threads: int, max_tokens: int) -> None:
        self.model = load_model(EngineConfig(model_dir=directory, threads=threads)).model
        pages = -(-max_tokens // PAGE)
        self._kv, self._states = KvPools(self.model.spec, pages, PAGE), RecurrentPools(self.model.spec, 1)
        self._table = torch.arange(pages, dtype=torch.int32)
        self._context = 0

    def prefill(self, tokens: list[int], chunk: int = CHUNK) -> int:
        self._context, logits = 0, torch.empty(0)
        for start in range(0, len(tokens), chunk):
            logits = self._forward(tokens[start : start + chunk])
        return int(logits[0].argmax())

    def go_on(self, context: int, tokens: list[int]) -> None:
        """One pass over tokens as if `context` others had been read, whose keys and values are random."""
        if self._context == 0:
            for pool in (*self._kv.k, *self._kv.v):
                pool.normal_()
        self._context = context
        self._forward(tokens)

    def decode(self, token: int) -> int:
        return int(self._forward([token])[0].argmax())

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        n, context = len(tokens), self._context
        batch = ForwardBatch(
            torch.tensor(tokens),
            torch.arange(context, context + n),
            (SeqSlice(0, n, context, self._table[: -(-(context + n) // PAGE)], 0, context == 0),),
            torch.tensor([n - 1]),
        )
        self._context += n
        return self.model.forward(batch, self._kv, self._states).rows


class Transformers:
    """The same checkpoint in transformers: eager mode, dynamic cache, logits of the last token only."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self._cache: Any = None

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> int:
        out = self.model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        return int(out.logits[0, -1].argmax())

    @torch.inference_mode()
    def decode(self, token: int) -> int:
        out = self.model(torch.tensor([[token]]), past_key_values=self._cache, use_cache=True)
        return int(out.logits[0, -1].argmax())


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of wall time, and per second that the process was on a CPU.

    With one thread the two agree on a quiet machine; on a busy one the second still says what the code does.
    """

    wall: float
    cpu: float


def time_prefill(runner: Ours | Transformers, tokens: list[int]) -> Rate:
    return _timed(len(tokens), lambda: runner.prefill(tokens))


def time_decode(runner: Ours | Transformers, token: int, count: int) -> Rate:
    """`count` decode steps that go on from the runner's state."""

    def steps() -> None:
        last = token
        for _ in range(count):
            last = runner.decode(last)

    return _timed(count, steps)


def _timed(tokens: int, work: Callable[[], object]) -> Rate:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Rate(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu))


def compare(ours: list[Rate], theirs: list[Rate]) -> dict[str, dict[str, float]]:
    """Speeds of both and the ratios of their pairs."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "engine": spread([rate.wall for rate in ours]),
        "transformers": spread([rate.wall for rate in theirs]),
        "ratio": spread([a.wall / b.wall for a, b in pairs]),
        "cpu_time_ratio": spread([a.cpu / b.cpu for a, b in pairs]),
    }
