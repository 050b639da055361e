"""Stages `restore`, `save` and `resize`: saved contexts against the link, memory that changes hands while a stream decodes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.context import Context, percentiles, rounded, spread_of
from engine.engine import Engine
from engine.types import HoldId, KvRun, StateSnapshot

SUFFIX = 8
"""Tokens after a restored context; the same for every way, so that they cancel out."""


def snapshot_bytes(snapshot: StateSnapshot) -> int:
    return sum(run.rows.nbytes for run in snapshot.kv) + sum(part.nbytes for part in snapshot.state.values())


def to_file(path: Path, snapshot: StateSnapshot) -> None:
    """All arrays one after another, on the disk and out of the page cache, as after a restart."""
    with path.open("wb") as file:
        for run in snapshot.kv:
            run.rows.tofile(file)
        for name in sorted(snapshot.state):
            snapshot.state[name].tofile(file)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_file(path: Path, like: StateSnapshot) -> StateSnapshot:
    """The same snapshot, read back. like: says how the bytes are divided."""
    data = np.fromfile(path, dtype=np.uint8)
    at = 0

    def take(nbytes: int) -> np.ndarray:
        nonlocal at
        at += nbytes
        return data[at - nbytes : at]

    runs = tuple(KvRun(run.start, take(run.rows.nbytes).reshape(run.rows.shape)) for run in like.kv)
    state = {name: take(like.state[name].nbytes) for name in sorted(like.state)}
    return StateSnapshot(like.position, runs, state, like.logits)


def restore(context: Context) -> None:
    """A context comes back from the engine's own pools, from memory and from a file; what is beyond the first is its price."""
    for tokens in context.plan.contexts:
        context.measure("restore", lambda tokens=tokens: _restores(context, tokens), context=tokens)


def _restores(context: Context, tokens: int) -> dict[str, Any]:
    plan, player, words, engine = context.plan, context.player, context.words(4), context.running.engine
    prefix = words.take(tokens)
    hold = player.run(prefix, 0, hold=True).hold
    assert hold is not None
    began = time.perf_counter()
    snapshot = engine.copy_out(hold)
    copy_out_s = time.perf_counter() - began
    path = context.directory / "context.bin"
    ways: dict[str, Callable[[], HoldId | StateSnapshot]] = {
        "pools": lambda: hold,
        "memory": lambda: snapshot,
        "file": lambda: from_file(path, snapshot),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    answers = set()
    for index in range(plan.repeats + 1):
        prompt = [*prefix, *words.take(SUFFIX, prefix[-1])]
        answers.clear()
        for way, source in ways.items():
            if way == "file":
                to_file(path, snapshot)
            began = time.perf_counter()
            restored = source()
            answer = player.run(prompt, 1, restored)
            answers.add(answer.tokens[0])
            if index:
                seconds[way].append(time.perf_counter() - began)
    path.unlink()
    engine.release(hold)
    nbytes = snapshot_bytes(snapshot)
    figures: dict[str, Any] = {
        "bytes": nbytes,
        "copy_out_gb_s": rounded(nbytes / copy_out_s / 1e9),
        "same_token": len(answers) == 1,
    }
    for way, values in seconds.items():
        figures[f"{way}_ttft_s"] = spread_of(values)
        # What a copy takes beyond what every way takes; too little to be seen at toy size.
        extra = [second - statistics.median(seconds["pools"]) for second in values]
        if way != "pools" and min(extra) > 0:
            figures[f"{way}_gb_s"] = spread_of([nbytes / second / 1e9 for second in extra])
    return figures


def save(context: Context) -> None:
    """A stream decodes while a long context is copied out, a piece between two steps."""
    context.measure("save", lambda: _saves(context), context=context.plan.contexts[-1])


def _saves(context: Context) -> dict[str, Any]:
    plan, player, words, engine = context.plan, context.player, context.words(5), context.running.engine
    tokens, piece = plan.contexts[-1], plan.saved_piece
    hold = player.run(words.take(tokens), 0, hold=True).hold
    assert hold is not None
    pieces = [(start, min(tokens, start + piece)) for start in range(0, tokens, piece)]
    prompt = words.take(8)
    stream = player.start(prompt, 2 + plan.decode_warm + (plan.repeats + 1) * 2 * len(pieces))
    player.until(stream, 1 + plan.decode_warm)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    ratio, nbytes = [], 0
    for index in range(plan.repeats + 1):
        mean = {}
        for saving in (False, True) if index % 2 == 0 else (True, False):
            first = len(stream.tokens)
            for start, stop in pieces:
                if saving:
                    nbytes += engine.copy_kv(hold, start, stop).nbytes
                player.until(stream, len(stream.tokens) + 1)
            mine = stream.gaps_ms(first)
            mean[saving] = sum(mine) / len(mine)
            if index:
                gaps[saving] += mine
        if index:
            ratio.append(mean[False] / mean[True])
    player.stop()
    engine.release(hold)
    return {
        "rate_while_saving_of_rate": spread_of(ratio),
        "gap_ms": rounded(percentiles(gaps[False])),
        "gap_ms_while_saving": rounded(percentiles(gaps[True])),
        "bytes_of_a_save": nbytes // (plan.repeats + 1),
    }


def resize(context: Context) -> None:
    """The cache of experts gives up a quarter of its slots and takes them back, again and again, while a stream decodes."""
    if not hasattr(Engine, "resize_experts"):
        print("resize: not measured, since this engine cannot resize its slots while it serves")
        return
    context.measure("resize", lambda: _resizes(context))


def _resizes(context: Context) -> dict[str, Any]:
    plan, player, words = context.plan, context.player, context.words(6)
    engine: Any = context.running.engine
    slots, part = context.running.slots, max(1, plan.decode_tokens)
    prompt = words.take(8)
    stream = player.start(prompt, 2 + 3 * part * (plan.repeats + 1))
    player.until(stream, 1 + part)
    quiet, stalls, calls = stream.gaps_ms(plan.decode_warm + 1), [], []
    for index in range(2 * plan.repeats):
        first = len(stream.tokens)
        began = time.perf_counter()
        engine.resize_experts(slots if index % 2 else slots * 3 // 4)
        calls.append(1000 * (time.perf_counter() - began))
        player.until(stream, first + part)
        stalls.append(max(stream.gaps_ms(first)))
    player.stop()
    engine.resize_experts(slots)
    return {
        "gap_ms_before": rounded(percentiles(quiet)),
        "worst_gap_ms": spread_of(stalls),
        "call_ms": spread_of(calls),
        "walked_right": words.right(prompt, stream.tokens),
    }
