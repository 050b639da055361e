"""What one streamed token event costs the server process: worker pipe in, WebSocket frame out, nothing joined.

Processes as in production: this one is the client and reads every event, a server, a worker that sends scripted frames over
the real pipe. The server's CPU time is read from the kernel around the stream.

The goal is for a busy server: frames as fast as the pipe takes them. Slower streams also pay for waking up, once for all turns
of a step, and how much that is depends on the machine (20 to 200 µs on virtual ones): so there are one turn at 500 tokens
per second, sixteen at 100, and `relay`, the pace of one turn through a loop that only copies bytes from a pipe to a TCP socket.

    python -m benchmarks.event_cost [--tokens 20000] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

from benchmarks.common import cpu_s, report, spread

GOAL_US = 30.0
EVENT_BYTES = 170
RELAY_EVENTS = 1_000
MODEL = Path(__file__).parent.parent / "agentserve" / "demo_model"
"""Its tokenizer, template and dialect are the real ones; only the sampled ids are made up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--role", choices=("server", "worker", "relay", "ticker"), help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "worker":
        _worker(args.fd)
    elif args.role == "ticker":
        _ticker(args.fd)
    elif args.role is not None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_server() if args.role == "server" else _relay())
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
        paces = (("burst", 1, 0, tokens), ("paced_1_turn", 1, 2, 1_000), ("paced_16_turns", 16, 10, 250))
        for name, turns, every_ms, count in paces:
            costs = [_stream(port, server.pid, tokens=count, turns=turns, every_ms=every_ms) for _ in range(rounds)]
            figures[name] = {"us_per_event": spread(costs)}
        figures["goal_met"] = figures["burst"]["us_per_event"]["median"] <= GOAL_US
        figures["relay"] = {"us_per_event": spread([_stream_relay() for _ in range(rounds)])}
        return figures
    finally:
        server.terminate()
        server.wait(30)


def _stream_relay() -> float:
    """CPU of the relay per event in µs, at the pace of one turn."""
    relay = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.event_cost", "--role", "relay"], stdout=subprocess.PIPE, text=True
    )
    with relay, socket.socket() as sock:
        assert relay.stdout is not None
        sock.connect(("127.0.0.1", int(relay.stdout.readline())))
        received = sock.recv(1 << 16)
        before, size = cpu_s(relay.pid), 0
        while received:
            size += len(received)
            if size >= RELAY_EVENTS * EVENT_BYTES:
                break
            received = sock.recv(1 << 16)
        cost = cpu_s(relay.pid) - before
        relay.terminate()
    return cost / RELAY_EVENTS * 1e6


def _stream(port: int, pid: int, *, tokens: int, turns: int, every_ms: int) -> float:
    """Run `turns` lanes of `tokens` events each; server CPU per event in µs, without the turns' own beginning and end.

    Paced, the window opens when every lane has begun. At full speed the client lags behind: the window is the whole turn.
    """
    from websockets.sync.client import connect

    events, counted = 0, 0
    with connect(f"ws://127.0.0.1:{port}/v1/responses", compression=None, max_size=None) as ws:
        begun: set[str] = set()
        before = after = cpu_s(pid)
        left = turns
        for lane in range(turns):
            frame = {"type": "response.create", "stream_id": f"l{lane}", "input": "go", "store": False}
            ws.send(json.dumps({**frame, "max_output_tokens": tokens, "seed": every_ms}))
        while left:
            text = str(ws.recv(timeout=120))
            if '"response.output_text.delta"' in text[:60]:
                events += 1
                if every_ms and len(begun) < turns:
                    begun.add(json.loads(text)["stream_id"])
                    before, counted = cpu_s(pid), events
                if events == tokens * turns:
                    after = cpu_s(pid)
            elif '"response.completed"' in text[:60]:
                left -= 1
            elif '"error"' in text[:60]:
                raise RuntimeError(text)
    if events != tokens * turns:
        raise RuntimeError(f"got {events} token events, expected {tokens * turns}: something was joined or lost")
    return (after - before) / (events - counted) * 1e6


def _loop_factory() -> Any:
    import uvicorn

    return uvicorn.Config("", log_config=None).get_loop_factory()


async def _server() -> None:
    from agentserve.config import load
    from agentserve.served import Served
    from agentserve.server import DrainingServer, create_app, uvicorn_config
    from agentserve.services import Services
    from agentserve.text.model_text import ModelText
    from agentserve.worker.client import WorkerClient
    from agentserve.worker.fleet import Fleet
    from agentserve.worker.settings import WorkerSettings
    from agentserve.worker.supervisor import Supervisor
    from tests.fakes.store import FakeStore

    flags = {"server.auth": "none", "server.port": 0, "model.name": "scripted", "model.dir": str(MODEL)}
    # The client of this benchmark cannot keep up with a burst; joining deltas for it would hide what is measured.
    limits = {"limits.buffer_events": 1_000_000, "limits.buffer_bytes": 1 << 30}
    config = load(flags=flags | limits, environ={"HOME": "/nonexistent"})
    client = WorkerClient()
    settings = WorkerSettings(model_dir="", model_name="scripted", state_dir="")
    supervisor = Supervisor(client, settings, spawn=_spawn)
    supervisor.start()
    await client.wait_ready(30)
    models = (Served("scripted", ModelText.load(MODEL), Fleet([client])),)
    services = Services(config, models, FakeStore(), ThreadPoolExecutor(1))
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


async def _relay() -> None:
    """Copy: one TCP client, one pipe, `EVENT_BYTES` out for every read."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    connected = loop.create_future()

    class ToClient(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            connected.set_result(transport)

    class FromPipe(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            out.write(b"x" * EVENT_BYTES)

    server = await loop.create_server(ToClient, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    out = await connected
    await loop.create_unix_connection(FromPipe, sock=ours)
    command = [sys.executable, "-m", "benchmarks.event_cost", "--role", "ticker", "--fd", str(theirs.fileno())]
    process = await asyncio.create_subprocess_exec(*command, pass_fds=(theirs.fileno(),))
    await process.wait()
    await asyncio.sleep(60)


def _ticker(fd: int) -> None:
    with socket.socket(fileno=fd) as sock, contextlib.suppress(BrokenPipeError):
        for _ in range(RELAY_EVENTS + 10):
            time.sleep(0.002)
            sock.send(b"x" * 64)


async def _spawn(_: Any, sock: socket.socket) -> Any:
    command = [sys.executable, "-m", "benchmarks.event_cost", "--role", "worker", "--fd", str(sock.fileno())]
    return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),))


def _worker(fd: int) -> None:
    """Streams single-token frames: as many as `max_tokens`, one every `seed` milliseconds."""
    from agentserve.text.tokenizer import Tokenizer
    from agentserve.worker.messages import PROTOCOL_VERSION, Drain, StartTurn, Tokens
    from agentserve.worker.pipe import PipeClosed, WorkerPipe
    from tests.fakes.worker import HELLO, finished

    words = [int(ids[0]) for ids in Tokenizer.load(MODEL).encode_many(["the", "a", "is", "not", "in", "it"])]
    pipe = WorkerPipe(socket.socket(fileno=fd))
    pipe.send(msgspec.structs.replace(HELLO, version=PROTOCOL_VERSION, pid=os.getpid(), max_context=1 << 30))
    pipe.flush()
    turns: list[tuple[StartTurn, int, float, int]] = []
    try:
        while True:
            for frame in pipe.receive(None if not turns else 0.0):
                if isinstance(frame, StartTurn):
                    turns.append((frame, frame.sampling.max_tokens, (frame.sampling.seed or 0) / 1000, 0))
                elif isinstance(frame, Drain):
                    return
            if turns and turns[0][2]:
                time.sleep(turns[0][2])
            after: list[tuple[StartTurn, int, float, int]] = []
            for start, count, pause_s, sent in turns:
                pipe.send(Tokens(turn_id=start.turn_id, ids=(words[sent % len(words)],)))
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
