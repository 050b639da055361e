"""What the server itself adds: many streams at once, idle sockets, and a long cold prompt beside running answers.

    python -m benchmarks.load streams [--sessions 200] [--rate 50] [--seconds 20] [--record]
    python -m benchmarks.load idle    [--sockets 5000] [--record]
    python -m benchmarks.load gap     [--engine demo] [--streams 4] [--prompt 30000] [--record]

streams: the fake engine gives every session a token each 1 / rate seconds; the server has the first core for itself, worker
and client share the rest. Latency of an event: how much later it came than the steadiest schedule that fits its session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import cpu_s, report
from benchmarks.load.agents import TERMINAL, Behaviour, Corpus, Session
from benchmarks.load.client import Socket
from benchmarks.load.goals import Goal, judge
from benchmarks.load.lab import show
from benchmarks.load.policies import at
from benchmarks.load.server import ENGINES, LabServer, lab_server

DELTA = b'"response.output_text.delta"'


def late_by(arrivals: Sequence[float], period: float) -> list[float]:
    """Seconds of each event behind the beat: event i belongs at begin + i · period, begin being the earliest that fits."""
    begin = min(arrived - index * period for index, arrived in enumerate(arrivals))
    return [arrived - index * period - begin for index, arrived in enumerate(arrivals)]


async def steady_streams(port: int, sessions: int, events: int) -> list[list[float]]:
    """Arrival times of each session's deltas. Raises RuntimeError if one was lost or joined with another."""
    arrivals: list[list[float]] = [[] for _ in range(sessions)]
    left = sessions
    done = asyncio.get_running_loop().create_future()

    def listener(number: int) -> Any:
        mine = arrivals[number]

        def on_frame(payload: memoryview) -> None:
            nonlocal left
            head = bytes(payload[:120])
            if DELTA in head:
                mine.append(time.monotonic())
            elif any(f'"{kind}"'.encode() in head for kind in TERMINAL) or b'"error"' in head[:20]:
                left -= 1
                if not left and not done.done():
                    done.set_result(None)

        return on_frame

    sockets = [await Socket.connect(port, listener(number)) for number in range(sessions)]
    body = {"type": "response.create", "input": [{"role": "user", "content": "go"}], "store": False, "temperature": 0}
    body |= {"reasoning": {"effort": "none"}, "max_output_tokens": events}
    for socket in sockets:
        socket.send(json.dumps(body))
    await done
    for socket in sockets:
        socket.close()
    if any(len(mine) < events - 1 for mine in arrivals):
        raise RuntimeError(f"sessions got {min(map(len, arrivals))} to {max(map(len, arrivals))} events of {events}")
    return arrivals


def streams(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load streams", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--rate", type=int, default=50, help="events per second of each session")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    events = round(options.rate * options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        file.write_text(f"[model.engine]\nmax_rows = {options.sessions + 8}\nkv_tokens = {1 << 19}\n")
        settings = ["--config", str(file)]
        with lab_server(Path(folder) / "state", f"beat{options.rate}", settings, cpu=cores[0]) as server:
            if len(cores) > 1:
                os.sched_setaffinity(0, cores[1:])
                os.sched_setaffinity(server.pids["worker"], set(cores[1:]))
            before, used = server.rss_mib(), _cpu_s(server)
            arrivals = asyncio.run(steady_streams(server.port, options.sessions, events))
            after = server.rss_mib()
            used = {name: seconds - used[name] for name, seconds in _cpu_s(server).items()}
    # The first tenth: sessions still begin, so that steps are prefills.
    skip = max(1, events // 10)
    latencies = sorted(ms for mine in arrivals for ms in (1000 * s for s in late_by(mine[skip:], 1 / options.rate)))
    span = max(mine[-1] for mine in arrivals) - min(mine[0] for mine in arrivals)
    figures = {
        "events": sum(map(len, arrivals)),
        "events_per_s": round(sum(map(len, arrivals)) / span),
        "latency_ms": {p: round(at(latencies, q), 2) for p, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))},
        "cpu_us_per_event": {name: round(seconds / sum(map(len, arrivals)) * 1e6, 1) for name, seconds in used.items()},
        "rss_mib": {name: [round(before[name], 1), round(after[name], 1)] for name in after},
    }
    console = Console(width=120)
    show(console, f"{options.sessions} sessions at {options.rate} events/s, server on one core", figures)
    figures["goals"] = judge(console, [Goal("added latency of an event, p99 ms", figures["latency_ms"]["p99"], 50)])
    workload = {"sessions": options.sessions, "rate": options.rate, "seconds": options.seconds}
    report("load_streams", "fake engine", workload, figures, options.record)


def _cpu_s(server: LabServer) -> dict[str, float]:
    """Processor seconds so far of both processes and of this one, which is the client."""
    return {name: cpu_s(pid) for name, pid in (server.pids | {"client": os.getpid()}).items()}


def idle(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load idle", description="What an open socket costs that does nothing.")
    parser.add_argument("--sockets", type=int, default=5000)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)

    async def run(server: Any) -> dict[str, Any]:
        warm = [await Socket.connect(server.port) for _ in range(50)]
        for socket in warm:
            socket.close()
        await asyncio.sleep(1.0)
        before, descriptors = server.rss_mib()["server"], server.descriptors()["server"]
        sockets: list[Socket] = []
        while len(sockets) < options.sockets:
            sockets += await asyncio.gather(
                *(Socket.connect(server.port) for _ in range(min(50, options.sockets - len(sockets))))
            )
        await asyncio.sleep(2.0)
        opened = server.rss_mib()["server"]
        session = Session(server.port, Corpus(), random.Random(1), Behaviour(), 4096)
        asked = await session.ask(64, 8)
        session.close()
        still = sum(socket.code is None for socket in sockets)
        for socket in sockets:
            socket.close()
        for _ in range(100):
            await asyncio.sleep(0.1)
            if server.descriptors()["server"] <= descriptors + 4:
                break
        return {
            "open": still,
            "grown_mib": round(opened - before, 1),
            "kib_each": round((opened - before) * 1024 / options.sockets, 1),
            "turn_beside_them_s": asked.ttft and round(asked.ttft, 4),
            "descriptors": {"before": descriptors, "after": server.descriptors()["server"]},
            "mib_after": round(server.rss_mib()["server"] - before, 1),
        }

    with tempfile.TemporaryDirectory() as folder, lab_server(Path(folder), "instant") as server:
        figures = asyncio.run(run(server))
    console = Console(width=120)
    show(console, f"{options.sockets} idle sockets", figures)
    figures["goals"] = judge(
        console,
        [
            Goal("memory for the sockets, MiB", figures["grown_mib"], 300),
            Goal("sockets that stayed open", figures["open"], options.sockets, least=True),
        ],
    )
    report("load_idle", "fake engine", {"sockets": options.sockets}, figures, options.record)


def gap(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load gap", description="Running answers beside one long cold prompt.")
    parser.add_argument("--engine", choices=ENGINES, default="demo")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=30_000)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)

    async def run(port: int) -> dict[str, Any]:
        rng, corpus = random.Random(1), Corpus()
        until = [float("inf")]
        gaps: list[tuple[float, float]] = []

        async def stream(number: int) -> None:
            """Short answers, one after the other: the demo model ends by itself after a while."""
            while time.monotonic() < until[0]:
                session = Session(port, corpus, random.Random(number), Behaviour(), 8192)
                asked = await session.ask(64, 200)
                gaps.extend(asked.gaps)
                session.close()

        tasks = [asyncio.create_task(stream(number)) for number in range(options.streams)]
        await asyncio.sleep(3.0)
        begun = time.monotonic()
        long = Session(port, corpus, rng, Behaviour(), 32_000)
        asked = await long.ask(options.prompt, 4)
        ended = time.monotonic()
        until[0] = ended
        await asyncio.gather(*tasks)
        long.close()
        during = sorted(seconds for when, seconds in gaps if begun < when < ended)
        before = sorted(seconds for when, seconds in gaps if when <= begun)
        quarters = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
        return {
            "prompt_tokens": asked.prompt,
            "prompt_ttft_s": asked.ttft and round(asked.ttft, 3),
            "ended": asked.ends,
            "gaps": len(during),
            "gap_ms": {p: round(1000 * at(during, q), 1) for p, q in quarters.items()} if during else None,
            "gap_before_ms": {p: round(1000 * at(before, q), 1) for p, q in quarters.items()} if before else None,
        }

    with tempfile.TemporaryDirectory() as folder, lab_server(Path(folder), options.engine) as server:
        figures = asyncio.run(run(server.port))
    console = Console(width=120)
    show(console, f"{options.streams} answers beside {options.prompt} cold tokens, {options.engine}", figures)
    p99 = figures["gap_ms"]["p99"] if figures["gap_ms"] and figures["prompt_ttft_s"] else None
    figures["goals"] = judge(console, [Goal("gap of running answers, p99 ms", p99, 250)])
    workload = {"streams": options.streams, "prompt": options.prompt}
    report("load_gap", options.engine, workload, figures, options.record)
