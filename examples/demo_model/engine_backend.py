"""Generates with this project's own engine, in process: greedy, as many prompts at a time as the engine has rows.

A prompt that goes on from an earlier one and its output, as in a session, starts from the state that was kept there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import CutReached, Finished, HoldId, Request, SamplingParams, TokenEvent

MAX_TOKENS = 400
KEPT = 40
"""States kept between calls, the newest ones: more than the sessions that are played side by side for long."""


def engine_backend(model: Path, end: int, threads: int = 1) -> Callable[[list[list[int]]], list[list[int]]]:
    """prompts → outputs, each up to and with the token `end`, or MAX_TOKENS long."""
    engine = Engine.load(EngineConfig(model_dir=model, threads=threads, kv_tokens=1 << 18, snapshot_rows=2 * KEPT))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=(end,))
    kept: dict[HoldId, np.ndarray] = {}  # oldest first: the tokens of each held state

    def before(prompt: np.ndarray) -> HoldId | None:
        """The state of the longest proper prefix."""
        fits = [h for h, ids in kept.items() if len(ids) < len(prompt) and np.array_equal(prompt[: len(ids)], ids)]
        return max(fits, key=lambda hold: len(kept[hold]), default=None)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in prompts]
        used: set[HoldId] = set()
        keep = len(prompts) <= KEPT
        for index, prompt in enumerate(prompts):
            ids = np.array(prompt, dtype=np.int32)
            start = before(ids)
            if start is not None:
                used.add(start)
            engine.submit(Request(str(index), ids, sampling, restore=start, hold_at_end=keep))
        reached: dict[HoldId, tuple[int, int]] = {}  # which prompt and how much of it and its output
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    outputs[int(event.request_id)].append(event.token_id)
                elif isinstance(event, CutReached):
                    reached[event.hold] = int(event.request_id), event.position
                elif isinstance(event, Finished) and event.reason == "error":
                    raise RuntimeError(f"prompt {event.request_id}: {event.error}")
        for hold in used:
            del kept[hold]
            engine.release(hold)
        for hold, (index, position) in reached.items():
            kept[hold] = np.array([*prompts[index], *outputs[index]][:position], dtype=np.int32)
        while len(kept) > KEPT:
            oldest = next(iter(kept))
            del kept[oldest]
            engine.release(oldest)
        return outputs

    return generate
