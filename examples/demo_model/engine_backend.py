"""Generates with this project's own engine, in process: greedy, as many prompts at a time as the engine has rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Finished, Request, SamplingParams, TokenEvent

MAX_TOKENS = 400


def engine_backend(model: Path, end: int, threads: int = 1) -> Callable[[list[list[int]]], list[list[int]]]:
    """prompts → outputs, each up to and with the token `end`, or MAX_TOKENS long."""
    engine = Engine.load(EngineConfig(model_dir=model, threads=threads, kv_tokens=1 << 18))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=(end,))

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        for index, prompt in enumerate(prompts):
            engine.submit(Request(str(index), np.array(prompt, dtype=np.int32), sampling, hold_at_end=False))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    outputs[int(event.request_id)].append(event.token_id)
                elif isinstance(event, Finished) and event.reason == "error":
                    raise RuntimeError(f"prompt {event.request_id}: {event.error}")
        return outputs

    return generate
