"""What one streamed token event costs the server process: worker pipe in, WebSocket frame out, nothing joined.

Processes as in production: this one is the client and reads every event, a server, a worker that sends scripted frames over
the real pipe. The server's CPU time is read from the kernel around the stream. Paces: as fast as the pipe takes it, one
turn at 500 tokens per second, and eight turns at 100 tokens per second each.

    python -m benchmarks.event_cost [--tokens 20000] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import report, spread

GOAL_US = 30.0
WORD = "token "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--role", choices=("server", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "worker":
        _worker(args.fd)
    elif args.role == "server":
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_server())
    else:
        figures = measure(args.tokens, args.rounds)
        report(
            "event_cost", "scripted", {"tokens": args.tokens, "rounds": args.rounds, "goal_us": GOAL_US}, figures, args.record
        )


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """Microseconds of server CPU per token event, per pace."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.event_cost", "--role", "server"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        _stream(port, server.pid, tokens=2_000, turns=1, every_ms=0)
        figures: dict[str, Any] = {}
        paces = (("burst", 1, 0, tokens), ("paced_1_turn", 1, 2, 1_000), ("paced_8_turns", 8, 10, 250))
        for name, turns, every_ms, count in paces:
            costs = [_stream(port, server.pid, tokens=count, turns=turns, every_ms=every_ms) for _ in range(rounds)]
            figures[name] = {"us_per_event": spread(costs)}
        figures["goal_met"] = all(f["us_per_event"]["median"] <= GOAL_US for f in figures.values())
        return figures
    finally:
        server.terminate()
        server.wait(30)


def _stream(port: int, pid: int, *, tokens: int, turns: int, every_ms: int) -> float:
    """Run `turns` lanes of `tokens` events each; server CPU per event in µs."""
    from websockets.sync.client import connect

    events = 0
    with connect(f"ws://127.0.0.1:{port}/v1/responses", compression=None, max_size=None) as ws:
        left = turns
        before = _cpu_s(pid)
        for lane in range(turns):
            frame = {"type": "response.create", "stream_id": f"l{lane}", "input": f"{tokens} {every_ms}", "store": False}
            ws.send(json.dumps(frame))
        while left:
            text = str(ws.recv(timeout=120))
            if '"response.output_text.delta"' in text[:60]:
                events += 1
            elif '"response.completed"' in text[:60]:
                left -= 1
            elif '"error"' in text[:60]:
                raise RuntimeError(text)
        cost = _cpu_s(pid) - before
    if events != tokens * turns:
        raise RuntimeError(f"got {events} token events, expected {tokens * turns}: something was joined or lost")
    return cost / events * 1e6


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads so far, from the scheduler's nanosecond counters."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _loop_factory() -> Any:
    import uvicorn

    return uvicorn.Config("", log_config=None).get_loop_factory()


async def _server() -> None:
    from agentserve.config import load
    from agentserve.server import DrainingServer, create_app, uvicorn_config
    from agentserve.turn import Services
    from agentserve.worker.client import WorkerClient
    from agentserve.worker.settings import WorkerSettings
    from agentserve.worker.supervisor import Supervisor
    from tests.fakes.store import FakeStore
    from tests.fakes.text import FakeText

    flags = {"server.auth": "none", "server.port": 0, "model.name": "scripted", "turn.max_output_tokens": 10_000_000}
    # The client of this benchmark cannot keep up with a burst; joining deltas for it would hide what is measured.
    limits = {"limits.buffer_events": 1_000_000, "limits.buffer_bytes": 1 << 30}
    config = load(flags=flags | limits, environ={"HOME": "/nonexistent"})
    client = WorkerClient()
    settings = WorkerSettings(model_dir="", model_name="scripted", state_dir="")
    supervisor = Supervisor(client, settings, spawn=_spawn)
    supervisor.start()
    await client.wait_ready(30)
    services = Services(config, FakeText(), FakeStore(), client, ThreadPoolExecutor(1))
    app, api = create_app(services, None)
    server = DrainingServer(uvicorn_config(app, services), api)
    running = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    if profile := os.environ.get("EVENT_COST_PROFILE"):
        import cProfile

        profiler = cProfile.Profile()
        profiler.enable()
        await running
        profiler.disable()
        profiler.dump_stats(profile)
    else:
        await running
    await supervisor.stop(1.0)


async def _spawn(_: Any, sock: socket.socket) -> Any:
    command = [sys.executable, "-m", "benchmarks.event_cost", "--role", "worker", "--fd", str(sock.fileno())]
    return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),))


def _worker(fd: int) -> None:
    """Streams single-token frames. A turn's prompt ends in `<tokens> <ms between frames>`."""
    import numpy as np

    from agentserve.worker.messages import PROTOCOL_VERSION, Drain, StartTurn, Tokens
    from agentserve.worker.pipe import PipeClosed, WorkerPipe
    from tests.fakes.text import THINK
    from tests.fakes.worker import HELLO, finished

    pipe = WorkerPipe(socket.socket(fileno=fd))
    pipe.send(msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION, pid=os.getpid()))
    pipe.flush()
    turns: list[tuple[StartTurn, int, float, int]] = []
    try:
        while True:
            for frame in pipe.receive(None if not turns else 0.0):
                if isinstance(frame, StartTurn):
                    text = "".join(chr(i) for i in np.frombuffer(frame.ids, "<u4") if i < THINK)
                    count, every_ms = text.rsplit("|", 1)[1].split()
                    turns.append((frame, int(count), int(every_ms) / 1000, 0))
                elif isinstance(frame, Drain):
                    return
            if turns and turns[0][2]:
                time.sleep(turns[0][2])
            after: list[tuple[StartTurn, int, float, int]] = []
            for start, count, pause_s, sent in turns:
                pipe.send(Tokens(turn_id=start.turn_id, ids=(ord(WORD[sent % len(WORD)]),)))
                if sent + 1 < count:
                    after.append((start, count, pause_s, sent + 1))
                else:
                    pipe.send(finished(start, count))
            turns = after
            pipe.flush()
    except PipeClosed:
        return


if __name__ == "__main__":
    main()
