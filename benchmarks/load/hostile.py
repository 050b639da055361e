"""What others notice of hostile clients.

    python -m benchmarks.load hostile [--sessions 50] [--rate 50] [--seconds 20] [--idle 1000] [--slow 16] [--deaf 4] [--record]

The same steady streams twice on one server, alone and beside a process that misbehaves: frames over the limit, frames as large
as it allows, nested too deeply, frames that come a byte at a time, sockets that do nothing, and consumers that never read. What
counts is how much later events come then; see wire.py for lateness and for who gets which core.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.common import report
from benchmarks.load.client import Closed, Socket
from benchmarks.load.goals import Goal, judge
from benchmarks.load.lab import show
from benchmarks.load.machines import MACHINES
from benchmarks.load.policies import at
from benchmarks.load.server import lab_server
from benchmarks.load.wire import late_by, steady_streams

RATES = tuple(int(name.removeprefix("beat")) for name in MACHINES if name.startswith("beat"))


ENDS = ("error", "response.completed", "response.incomplete", "response.failed")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of each. frame_bytes: the server's limit. deep_bytes: of a frame that only nests. deaf_tokens: asked for by each
    consumer that never reads. pause_s: between two rounds."""

    idle: int = 1000
    slow: int = 16
    deaf: int = 4
    frame_bytes: int = 8 << 20
    deep_bytes: int = 1 << 20
    deaf_tokens: int = 100_000
    pause_s: float = 0.05


async def attack(
    port: int, sizes: Sizes, go_on: Callable[[], bool], ready: Callable[[], object] = lambda: None
) -> Counter[str]:
    """Misbehave for as long as `go_on` says; what became of it, counted. ready: called once all sockets are open."""
    outcomes: Counter[str] = Counter()
    idle: list[Socket] = []
    while len(idle) < sizes.idle:
        idle += await asyncio.gather(*(Socket.connect(port) for _ in range(min(50, sizes.idle - len(idle)))))
    slow = [await Socket.connect(port) for _ in range(sizes.slow)]
    deaf = [await Socket.connect(port) for _ in range(sizes.deaf)]
    for socket in slow:
        socket.raw(b"\x81" + struct.pack("!BQ", 0xFF, 1 << 20) + bytes(4) + b"{")
    body = {"type": "response.create", "input": "go", "store": False, "max_output_tokens": sizes.deaf_tokens}
    for socket in deaf:
        socket.stop_reading()
        socket.send(json.dumps(body))
    ready()
    while go_on():
        outcomes[await _oversized(port, sizes)] += 1
        outcomes[await _deep(port, sizes)] += 1
        for name, frame in large_frames(sizes).items():
            outcomes[f"{name}_{await _large(port, frame)}"] += 1
        for socket in slow:
            socket.raw(b" ")
        await asyncio.sleep(sizes.pause_s)
    outcomes["idle_open"] = sum(socket.code is None for socket in idle)
    outcomes["slow_open"] = sum(socket.code is None for socket in slow)
    for socket in (*idle, *slow, *deaf):
        socket.abort()
    return outcomes


async def _oversized(port: int, sizes: Sizes) -> str:
    """A frame of one byte more than is allowed, of which the first 64 KiB come."""
    socket = await Socket.connect(port)
    socket.raw(b"\x81" + struct.pack("!BQ", 0xFF, sizes.frame_bytes + 1) + bytes(4) + b" " * (64 << 10))
    try:
        await socket.receive()
    except Closed as closed:
        return f"oversized_closed_{closed.code}"
    finally:
        socket.abort()
    return "oversized_answered"


@functools.cache
def large_frames(sizes: Sizes) -> dict[str, str]:
    """Frames as large as they can be, by what takes so long about them. Only the first has nothing wrong.

    text: escapes, which take longest to decode. numbers, keys: members, each of which becomes an object. wrong: is told only
    once all of it was looked at.
    """
    head, escapes = '{"type":"response.create","store":false,', r"\n\""
    frames: dict[str, tuple[str, Callable[[int], str], str]] = {
        "text": ('"input":"', lambda _: escapes, '"}'),
        "wrong": ('"input":"', lambda _: escapes, '","temperature":"hot"}'),
        "numbers": ('"input":[', lambda _: "1,", "1]}"),
        "keys": ('"metadata":{', lambda n: f'"{n:07x}":"",', '"":""}}'),
    }
    out: dict[str, str] = {}
    for name, (begin, unit, end) in frames.items():
        count = (sizes.frame_bytes - len(head + begin + end)) // len(unit(0))
        out[name] = head + begin + "".join(map(unit, range(count))) + end
    return out


async def _large(port: int, frame: str) -> str:
    """Send it, on a socket of its own; how that ended."""
    socket = await Socket.connect(port)
    socket.send(frame)
    try:
        while not (answer := json.loads(await socket.receive()))["type"].startswith(ENDS):
            pass
        return answer["error"]["code"] if answer["type"] == "error" else answer["type"]
    except Closed as closed:
        return f"closed_{closed.code}"
    finally:
        socket.abort()


async def _deep(port: int, sizes: Sizes) -> str:
    """A frame that opens lists and closes them again."""
    socket = await Socket.connect(port)
    half = sizes.deep_bytes // 2
    socket.send('{"type":"response.create","input":' + "[" * half + "]" * half + "}")
    try:
        answer = json.loads(await socket.receive())
        return f"deep_{answer['error']['code']}" if answer["type"] == "error" else "deep_accepted"
    except Closed as closed:
        return f"deep_closed_{closed.code}"
    finally:
        socket.abort()


def added(quiet: Sequence[float], hostile: Sequence[float]) -> dict[str, Any]:
    """Lateness in ms of both, at quantiles, and what the second has more."""
    quantiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    first, second = ({name: at(sorted(ms), q) for name, q in quantiles.items()} for ms in (quiet, hostile))
    return {
        "quiet_ms": {name: round(ms, 2) for name, ms in first.items()},
        "hostile_ms": {name: round(ms, 2) for name, ms in second.items()},
        "added_ms": {name: round(second[name] - first[name], 2) for name in quantiles},
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load hostile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--rate", type=int, choices=RATES, default=50, help="events per second of each session")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    for name in ("idle", "slow", "deaf", "deep_bytes"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Sizes(), name))
    options = parser.parse_args(arguments)
    sizes = Sizes(idle=options.idle, slow=options.slow, deaf=options.deaf, deep_bytes=options.deep_bytes)
    line = measure(sizes, options.sessions, options.rate, options.seconds)
    console = Console(width=120)
    show(console, f"{options.sessions} sessions beside hostile clients, server on one core", line)
    line["goals"] = judge(console, [Goal("added lateness of an event, p99 ms", line["added_ms"]["p99"], 50)])
    workload = {"sessions": options.sessions, "rate": options.rate, "seconds": options.seconds, **msgspec.to_builtins(sizes)}
    report("load_hostile", "fake engine", workload, line, options.record)


def measure(sizes: Sizes, sessions: int, rate: int, seconds: float) -> dict[str, Any]:
    """Both runs on one server; figures of the result."""
    cores, events = sorted(os.sched_getaffinity(0)), round(rate * seconds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        rows = sessions + sizes.deaf + 8
        file.write_text(f"[model.engine]\nmax_rows = {rows}\nkv_tokens = {1 << 19}\n")
        with lab_server(Path(folder) / "state", f"beat{rate}", ["--config", str(file)], cpu=cores[0]) as server:
            try:
                if len(cores) > 1:
                    os.sched_setaffinity(0, cores[1:])
                    os.sched_setaffinity(server.pids["worker"], set(cores[1:]))
                quiet = asyncio.run(steady_streams(server.port, sessions, events))
                command = [sys.executable, "-m", "benchmarks.load.hostile", str(server.port)]
                with subprocess.Popen([*command, msgspec.json.encode(sizes).decode()], stdout=subprocess.PIPE) as other:
                    assert other.stdout is not None
                    if other.stdout.readline() != b"ready\n":
                        raise RuntimeError("the hostile clients did not begin")
                    hostile = asyncio.run(steady_streams(server.port, sessions, events))
                    other.send_signal(signal.SIGTERM)
                    outcomes = json.loads(other.stdout.read())
            finally:
                os.sched_setaffinity(0, cores)
    skip = max(1, events // 10)  # sessions still begin, so that steps are prefills
    late = [[1000 * s for mine in run for s in late_by(mine[skip:], 1 / rate)] for run in (quiet, hostile)]
    return {**added(*late), "outcomes": outcomes}


def _attacker(port: str, sizes: str) -> None:
    """The other process: misbehaves until it is told to end."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    run = attack(int(port), msgspec.json.decode(sizes, type=Sizes), lambda: not told, lambda: print("ready", flush=True))
    print(json.dumps(asyncio.run(run)), flush=True)


if __name__ == "__main__":
    _attacker(*sys.argv[1:])
