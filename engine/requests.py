"""Checks everything about a request before it is queued, so that nothing that can never run waits. Changes nothing."""

from __future__ import annotations

import math

import numpy as np

from engine.errors import ContextTooLong, InvalidRequest, SnapshotMismatch
from engine.kvcache.store import Held
from engine.types import Request, SamplingParams, StateLayout, StateSnapshot


def check_request(request: Request, vocab_size: int, max_context: int, has_token_bytes: bool) -> None:
    """Raises InvalidRequest or ContextTooLong. The restored state is checked by check_snapshot or check_hold."""
    ids = request.token_ids
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest("token_ids", type(ids).__name__, "a one-dimensional integer array")
    if len(ids) == 0:
        raise InvalidRequest("token_ids", "no tokens", "at least one token")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidRequest("token_ids", low if low < 0 else high, f"ids from 0 to {vocab_size - 1}")
    if len(ids) + 1 > max_context:
        raise ContextTooLong(len(ids), max_context - 1)
    for name in ("cuts", "edges"):
        for position in getattr(request, name):
            if not 1 <= position <= len(ids):
                raise InvalidRequest(name, position, f"positions from 1 to {len(ids)}")
    check_sampling(request.sampling, vocab_size, has_token_bytes)


def check_sampling(p: SamplingParams, vocab_size: int, has_token_bytes: bool) -> None:
    """Raises InvalidRequest, naming the field."""

    def demand(name: str, accepted: str, good: bool) -> None:
        if not good:
            raise InvalidRequest(name, getattr(p, name), accepted)

    demand("max_tokens", "an integer ≥ 0", p.max_tokens >= 0)
    demand("temperature", "a finite number ≥ 0", math.isfinite(p.temperature) and p.temperature >= 0)
    demand("top_p", "a number in (0, 1]", 0 < p.top_p <= 1)
    demand("top_k", "an integer ≥ 0 (0 = off)", p.top_k >= 0)
    demand("min_p", "a number in [0, 1]", 0 <= p.min_p <= 1)
    demand("repetition_penalty", "a number from 0.01 to 100", 0.01 <= p.repetition_penalty <= 100)
    demand("presence_penalty", "a finite number", math.isfinite(p.presence_penalty))
    demand("frequency_penalty", "a finite number", math.isfinite(p.frequency_penalty))
    demand("logprobs", f"None or 0 to {vocab_size}", p.logprobs is None or 0 <= p.logprobs <= vocab_size)
    demand("stop_token_ids", f"ids from 0 to {vocab_size - 1}", all(0 <= t < vocab_size for t in p.stop_token_ids))
    demand("stop", "byte strings that are not empty", all(len(s) > 0 for s in p.stop))
    demand("stop", "nothing, before set_token_bytes was called", has_token_bytes or not p.stop)


def check_hold(request: Request, held: Held) -> None:
    """Raises SnapshotMismatch unless held is the state of a prefix of the prompt that leaves something to draw from."""
    _check_position(request, held.position, held.logits is not None)
    if not np.array_equal(request.token_ids[: held.position], held.tokens):
        agree = int(np.argmin(request.token_ids[: held.position] == held.tokens))
        raise SnapshotMismatch(f"the held state is of other tokens: prompt and hold differ at position {agree}")


def check_snapshot(request: Request, snapshot: StateSnapshot, layout: StateLayout) -> None:
    """Raises SnapshotMismatch unless every component is there, of the right size, and covers exactly the position."""
    _check_position(request, snapshot.position, snapshot.logits is not None)
    at = 0
    for run in snapshot.kv:
        rows = run.rows
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != layout.kv_token_bytes or not rows.flags.c_contiguous:
            raise SnapshotMismatch(
                f"kv run at {run.start}: {rows.dtype} {rows.shape}, expected contiguous uint8 [tokens, {layout.kv_token_bytes}]"
            )
        if run.start != at:
            raise SnapshotMismatch(f"kv run starts at {run.start}, expected {at}")
        at += len(rows)
    if layout.kv_token_bytes and at != snapshot.position:
        raise SnapshotMismatch(f"kv rows end at {at}, the snapshot is at {snapshot.position}")
    expected = {c.name: c.nbytes for c in layout.state}
    if set(snapshot.state) != set(expected):
        missing = sorted(set(expected) - set(snapshot.state))
        surplus = sorted(set(snapshot.state) - set(expected))
        raise SnapshotMismatch(f"recurrent components missing {missing}, unknown {surplus}")
    for name, nbytes in expected.items():
        part = snapshot.state[name]
        if part.dtype != np.uint8 or part.shape != (nbytes,):
            raise SnapshotMismatch(f"{name}: {part.dtype} {part.shape}, expected uint8 ({nbytes},)")
    logits = snapshot.logits
    if logits is not None:
        if logits.dtype != np.float32 or logits.shape != (layout.vocab_size,):
            raise SnapshotMismatch(f"logits: {logits.dtype} {logits.shape}, expected float32 ({layout.vocab_size},)")
        if not np.isfinite(logits).all():
            raise SnapshotMismatch("logits hold NaN or infinity")


def _check_position(request: Request, position: int, has_logits: bool) -> None:
    prompt = len(request.token_ids)
    if not 1 <= position <= prompt:
        raise SnapshotMismatch(f"restored position {position}, the prompt has {prompt} tokens")
    if position == prompt and not has_logits:
        raise SnapshotMismatch(f"restored position {position} is the whole prompt, which needs its final logits")
