"""Stages `restore`, `save` and `resize`: saved contexts against the link, memory that changes hands while a stream decodes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agentserve.worker.state_bridge import BUSY_PIECE_BYTES
from benchmarks.gpu.context import Context, percentiles, rounded, spread_of
from benchmarks.gpu.saving import Saves
from engine.engine import Engine
from engine.types import HoldId, KvRun, StateSnapshot

SUFFIX = 8
"""Tokens after a restored context; the same for every way, so that they cancel out."""


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


def from_file(path: Path, like: StateSnapshot, take: Callable[[int], np.ndarray]) -> StateSnapshot:
    """The same snapshot, read back into memory for copies. like: says how the bytes are divided."""
    with path.open("rb", buffering=0) as file:

        def read(nbytes: int) -> np.ndarray:
            out = take(nbytes)
            file.readinto(out.data)
            return out

        runs = tuple(KvRun(run.start, read(run.rows.nbytes).reshape(run.rows.shape)) for run in like.kv)
        state = {name: read(like.state[name].nbytes) for name in sorted(like.state)}
    return StateSnapshot(like.position, runs, state, like.logits)


def restore(context: Context) -> None:
    """A context comes back from the engine's own pools, from memory and from a file; what is beyond the first is its price."""
    for tokens in context.plan.contexts:
        context.measure("restore", lambda tokens=tokens: _restores(context, tokens), context=tokens)


def _restores(context: Context, tokens: int) -> dict[str, Any]:
    plan, player, words, engine = context.plan, context.player, context.words(4), context.running.engine
    prefix = words.take(tokens)
    hold, saved = _held_twice(context, prefix)
    nbytes = tokens * engine.layout.kv_token_bytes + engine.layout.state_bytes
    saves = Saves(engine, 3 * nbytes)
    saves.admit(prefix, saved)
    began = time.perf_counter()
    while saves.piece(busy=False):
        pass
    copied_s = time.perf_counter() - began
    saves.memory.fill()  # what is read from the file has to lie somewhere, too
    path = context.directory / "context.bin"
    ids = np.array([*prefix, 0], dtype=np.uint32)  # as a worker has them
    snapshot = saves.read(ids)
    ways: dict[str, Callable[[], HoldId | StateSnapshot]] = {
        "pools": lambda: hold,
        "memory": lambda: saves.read(ids),
        "file": lambda: from_file(path, snapshot, saves.memory.take),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: list[float] = []
    answers = set()
    for index in range(plan.repeats + 1):
        prompt = [*prefix, *words.take(SUFFIX, prefix[-1])]
        answers.clear()
        for way, source in ways.items():
            if way == "file":
                to_file(path, snapshot)
            began = time.perf_counter()
            restored = source()
            found_s = time.perf_counter() - began
            answer = player.run(prompt, 1, restored)
            answers.add(answer.tokens[0])
            if index:
                seconds[way].append(time.perf_counter() - began)
                found += [1000 * found_s] if way == "memory" else []
            del restored
    path.unlink()
    elsewhere = saves.memory.stats().elsewhere
    saves.close()
    engine.release(hold)
    figures: dict[str, Any] = {
        "bytes": nbytes,
        "leaves_gb_s": rounded(nbytes / copied_s / 1e9),
        "found_ms": spread_of(found),
        "same_token": len(answers) == 1,
        "not_pinned_bytes": elsewhere,
        "pinning_s_per_gb": rounded(saves.pinned_s_per_gb),
    }
    for way, values in seconds.items():
        figures[f"{way}_ttft_s"] = spread_of(values)
        # What a copy takes beyond what every way takes; too little to be seen at toy size.
        extra = [second - statistics.median(seconds["pools"]) for second in values]
        if way != "pools" and min(extra) > 0:
            figures[f"{way}_gb_s"] = spread_of([nbytes / second / 1e9 for second in extra])
    return figures


def _held_twice(context: Context, prefix: list[int]) -> tuple[HoldId, HoldId]:
    """One state under two holds, computed once."""
    first = context.player.run(prefix, 0, hold=True).hold
    assert first is not None
    return first, _held_again(context, prefix, first)


def _held_again(context: Context, prefix: list[int], hold: HoldId) -> HoldId:
    again = context.player.run(prefix, 0, hold, hold=True).hold
    assert again is not None
    return again


def save(context: Context) -> None:
    """A stream decodes while a long context is saved to memory, as a worker does it: a piece beside each step."""
    context.measure("save", lambda: _saves(context), context=context.plan.contexts[-1])


def _saves(context: Context) -> dict[str, Any]:
    plan, player, words, engine = context.plan, context.player, context.words(5), context.running.engine
    tokens = plan.contexts[-1]
    prefix = words.take(tokens)
    master = player.run(prefix, 0, hold=True).hold
    assert master is not None
    holds = [_held_again(context, prefix, master) for _ in range(plan.repeats + 1)]
    nbytes = tokens * engine.layout.kv_token_bytes + engine.layout.state_bytes
    saves = Saves(engine, 2 * nbytes)
    more = False

    def beside() -> None:
        nonlocal more
        more = more and saves.piece(busy=True)

    engine.set_beside(beside)
    steps = 8 + nbytes // BUSY_PIECE_BYTES * 5  # a piece waits for the steps that were begun before it
    stream = player.start(words.take(8), 2 + plan.decode_warm + (plan.repeats + 1) * 2 * steps)
    player.until(stream, 1 + plan.decode_warm)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    ratio: list[float] = []
    pieces = 8
    for index, hold in enumerate(holds):
        mean = {}
        for saving in (False, True) if index % 2 == 0 else (True, False):
            first = len(stream.tokens)
            if saving:
                saved, more = saves.admit(prefix, hold), True
                while more and len(stream.tokens) - first < steps:
                    player.until(stream, len(stream.tokens) + 1)
                assert not more, f"not saved after {steps} steps"
                pieces = len(stream.tokens) - first
                assert saves.cache.evict(saved)
            else:
                player.until(stream, first + pieces)
            mine = stream.gaps_ms(first)
            mean[saving] = sum(mine) / len(mine)
            if index:
                gaps[saving] += mine
        if index:
            ratio.append(mean[False] / mean[True])
    player.stop()
    calls, elsewhere = saves.calls_ms, saves.memory.stats().elsewhere
    saves.close()
    engine.release(master)
    return {
        "rate_while_saving_of_rate": spread_of(ratio),
        "gap_ms": rounded(percentiles(gaps[False])),
        "gap_ms_while_saving": rounded(percentiles(gaps[True])),
        "call_ms": rounded(percentiles(calls)),
        "steps_of_a_save": pieces,
        "bytes_of_a_save": nbytes,
        "not_pinned_bytes": elsewhere,
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
