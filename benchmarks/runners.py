"""The same prefill and decode, run by this engine's model and by transformers, for comparison in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from engine.batch import ForwardBatch, SeqSlice
from engine.config import EngineConfig
from engine.kvcache.pool import KvPools
from engine.kvcache.recurrent import RecurrentPools
from engine.runner import load_model

PAGE = 64


class Ours:
    """One sequence on the fast backend, pages and rows as the engine would hand them out."""

    name = "engine"

    def __init__(self, directory: Path, threads: int, max_tokens: int) -> None:
        self.model = load_model(EngineConfig(model_dir=directory, threads=threads)).model
        pages = -(-max_tokens // PAGE)
        self._kv, self._states = KvPools(self.model.spec, pages, PAGE), RecurrentPools(self.model.spec, 1)
        self._table = torch.arange(pages, dtype=torch.int32)
        self._context = 0

    def prefill(self, tokens: list[int], chunk: int = 2048) -> int:
        self._context, logits = 0, torch.empty(0)
        for start in range(0, len(tokens), chunk):
            logits = self._forward(tokens[start : start + chunk])
        return int(logits[0].argmax())

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
        return self.model.forward(batch, self._kv, self._states)


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


def time_prefill(runner: Ours | Transformers, tokens: list[int]) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    runner.prefill(tokens)
    return len(tokens) / (time.perf_counter() - began)


def time_decode(runner: Ours | Transformers, token: int, count: int) -> float:
    """Tokens per second of `count` decode steps that go on from the runner's state."""
    began = time.perf_counter()
    for _ in range(count):
        token = runner.decode(token)
    return count / (time.perf_counter() - began)
