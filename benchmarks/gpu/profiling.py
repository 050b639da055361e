"""Stage `profile`: where the time of decode steps and of a short prompt goes, kernel by kernel, as the device saw it.

Only when asked for by name. Prints a table per kernel and one layer's timeline; figures are the profiler's, so a little dearer
than without it.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from benchmarks.gpu.context import Context

_STEPS = 8
_TIMELINE = 60


def profile(context: Context) -> None:
    """Decode with one stream, each way to deal with misses, and a prompt of 64 tokens."""
    player, words, pool = context.player, context.words(3), context.running.pool
    answer = player.start(words.take(8), 4096)
    player.until(answer, 64)
    arms = ("resident",) if pool.resident else ("fetch", "cpu", "hybrid")
    for arm in arms:
        context.running.arms.use(arm)
        player.until(answer, len(answer.tokens) + 8)
        name = f"{context.variant}, {context.share}%: decode, {arm}"
        _show(name, _STEPS, lambda: player.until(answer, len(answer.tokens) + _STEPS))
    _host(f"{context.variant}, {context.share}%: 200 decode steps", lambda: player.until(answer, len(answer.tokens) + 200))
    player.stop()
    for arm in ("resident",) if pool.resident else ("hybrid", "hybrid, no overlap"):
        context.running.arms.use(arm)
        _empty(context, arm)
    context.running.arms.use("auto")
    for tokens in context.plan.suffixes[2:]:
        player.run(words.take(tokens), 1)
        _show(f"{context.variant}, {context.share}%: prompt of {tokens}", 1, lambda n=tokens: player.run(words.take(n), 1))
        _host(f"{context.variant}, {context.share}%: prompt of {tokens}", lambda n=tokens: player.run(words.take(n), 1))


def _host(name: str, work: Callable[[], Any]) -> None:
    """Which Python takes how long beside waiting for the device."""
    profile = cProfile.Profile()
    profile.runcall(work)
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(32)
    print(f"\n{name} on the host")
    print("\n".join(line[:120] for line in out.getvalue().splitlines() if line.strip()))


def _empty(context: Context, arm: str) -> None:
    """A step on no sequence: what the graph itself takes, launch and gaps, without any work to speak of."""
    model: Any = context.running.engine.model
    graph, _ = model.steps.graph(1, context.running.pool.use_table(1) if not context.running.pool.resident else 0)
    model.look_ahead(None)
    took, asked = [], []
    for _ in range(50):
        model.steps.tables.fill(torch.zeros(0, dtype=torch.int64), ())
        model.device.synchronize()
        began = time.perf_counter()
        graph.replay()
        asked.append(time.perf_counter() - began)
        model.device.synchronize()
        took.append(time.perf_counter() - began)
        model.steps.tables.launched(model.device.moment())
    middle = len(took) // 2
    print(
        f"\n{context.variant}, {context.share}%: a step on nothing, {arm}: {1e6 * sorted(took)[middle]:.0f} µs, "
        f"of which asking {1e6 * sorted(asked)[middle]:.0f} µs"
    )


def _show(name: str, steps: int, work: Callable[[], Any]) -> None:
    """steps: by which sums are divided."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    if not torch.cuda.is_available():
        activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as run:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events: list[FunctionEvent] = [e for e in run.events() or [] if torch.cuda.is_available() is (e.device_type.name == "CUDA")]
    if not events:
        print(f"{name}: the profiler saw nothing")
        return
    events.sort(key=lambda e: e.time_range.start)
    sums: dict[str, list[float]] = defaultdict(list)
    for event in events:
        sums[event.name].append(event.time_range.elapsed_us())
    span = events[-1].time_range.end - events[0].time_range.start
    busy = sum(map(sum, sums.values()))
    idle, end = 0.0, events[0].time_range.start
    for event in events:
        idle += max(0.0, event.time_range.start - end)
        end = max(end, event.time_range.end)
    print(
        f"\n{name}: {span / steps:.0f} µs a step from first to last, {len(events) / steps:.0f} kernels of "
        f"{busy / steps:.0f} µs, nothing runs for {idle / steps:.0f} µs"
    )
    for kernel, times in sorted(sums.items(), key=lambda item: -sum(item[1]))[:26]:
        print(f"  {sum(times) / steps:9.1f} µs {len(times) / steps:7.1f} × {sum(times) / len(times):8.2f}  {kernel[:70]}")
    middle = len(events) // 2
    begin = events[middle].time_range.start
    print("  timeline: start, length, gap since the last end")
    last = begin
    for event in events[middle : middle + _TIMELINE]:
        at = event.time_range
        print(f"  {at.start - begin:9.1f} {at.elapsed_us():8.2f} {at.start - last:7.2f}  {event.name[:60]}")
        last = max(last, at.end)
