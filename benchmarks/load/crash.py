"""What breaks while eight agents run, whether each of them gets its right answer after all, and how soon.

    python -m benchmarks.load crash [--kinds worker_killed database …] [--backend cpu|exact|reference] [--record]

Real sockets, a real server, the demo model behind a worker that can be told to fail (faults.py). Agents play the same turns
without any failure first; after each kind of failure every answer must be the one of that run, every committed turn must be
readable as it was told, and nothing may be left over. first_s, all_s: from the end of the outage (the failure itself, or when
what was missing is back) to the first answer and to the last agent's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentserve.cli.connect import Target
from agentserve.cli.private_server import ReservedPort
from benchmarks.common import report
from benchmarks.load.goals import Goal, judge
from benchmarks.load.server import counters
from benchmarks.load.survivors import TURNS, Meeting, Survivor

AGENTS = 8
LIMIT_S = 600.0
"""For a play or a start, on any machine; only a server that hangs needs it."""
STUCK_S = 10.0
"""Of the watchdog where a step sticks. Elsewhere it is as always: a busy machine can keep a worker silent for seconds."""
DRAIN_S = 1.0
DISK_BYTES = 8 << 20
BUSY = ("agentserve_active_responses", "agentserve_open_sockets", 'agentserve_worker_counter{name="turns"')
KEPT = tuple(f'agentserve_worker_counter{{name="{name}"' for name in ("pins", "release_errors"))


class NotHere(Exception):
    """This machine cannot play a kind; the text says what it lacks."""


class CrashServer:
    """A server of the lab that can be killed and started again on the same port and state. orders: of its worker."""

    def __init__(self, folder: Path, *, backend: str = "cpu", settings: Sequence[str] = ()) -> None:
        self.orders = folder / "orders"
        self.orders.mkdir(parents=True)
        self.state = folder / "state"
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.target = Target(f"http://127.0.0.1:{self.port}", None)
        self.log = folder / "server.log"
        config = folder / "settings.toml"
        config.write_text(f'[model.engine]\nbackend = "{backend}"\nmemory_bytes = {256 << 20}\n')
        self._command = [sys.executable, "-m", "benchmarks.load.server", "--port", str(self.port), "--engine", "demo"]
        self._command += ["--state-dir", str(self.state), "--config", str(config)]
        self._command += ["--orders", str(self.orders)]
        self._command += ["model.threads=1", "model.ram_cache_bytes=67108864", "log.level=INFO", *settings]
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the process; it is ready later."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def start(self) -> None:
        self.launch()
        until = time.monotonic() + LIMIT_S
        while (state := self.target.readiness())["status"] != "ready":
            if self.process is None or self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not become ready: {state}\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def end(self, number: int) -> None:
        """Send it a signal and wait for its end."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(LIMIT_S)

    @property
    def worker_pid(self) -> int:
        assert self.process is not None
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def order(self, name: str) -> Path:
        path = self.orders / name
        path.touch()
        return path


@dataclass
class Play:
    """One play under way. healed_at: when the outage ended; outage_s: how long it was. extra: what a kind found besides."""

    server: CrashServer
    agents: list[Survivor]
    broken_at: float = 0.0
    healed_at: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not reached():  # noqa: ASYNC110 - what is waited for lies in agents and processes
                await asyncio.sleep(0.01)

    def told(self, word: str) -> int:
        """Agents that were told something with this word in it."""
        return sum(any(word in text for _, text in agent.told) for agent in self.agents)

    def broken(self) -> None:
        """It has happened; the agents' turns need not be slow any more."""
        self.broken_at = self.healed_at = time.monotonic()
        (self.server.orders / "slow").unlink(missing_ok=True)

    def healed(self) -> None:
        self.healed_at = time.monotonic()


Kind = Callable[[Play], Awaitable[None]]


async def nothing(play: Play) -> None:
    play.broken()


async def worker_killed(play: Play) -> None:
    os.kill(play.server.worker_pid, signal.SIGKILL)
    play.broken()


def ordered(name: str) -> Kind:
    async def fail(play: Play) -> None:
        order = play.server.order(name)
        await play.until(lambda: not order.exists())
        play.broken()

    return fail


async def server_killed(play: Play) -> None:
    """And a response in the background, which the next server knows to have failed."""
    body = {"input": "Count from one to ten.", "background": True, "max_output_tokens": 400}
    begun = await asyncio.to_thread(play.server.target.post, "/v1/responses", body)
    play.server.end(signal.SIGKILL)
    play.broken()
    await asyncio.to_thread(play.server.start)
    path = f"/v1/responses/{begun['id']}"
    play.extra["background"] = (await asyncio.to_thread(play.server.target.get, path))["status"]


async def upgrade(play: Play) -> None:
    """SIGTERM, and the next server as soon as that one has ended."""
    play.broken()
    await asyncio.to_thread(play.server.end, signal.SIGTERM)
    play.server.launch()


async def drained(play: Play) -> None:
    """SIGTERM while turns run that take longer than the drain may."""
    asked_at = time.monotonic()
    await asyncio.to_thread(play.server.end, signal.SIGTERM)
    play.broken()
    play.broken_at = asked_at
    play.server.launch()


def database(stop: Callable[[], None], start: Callable[[], None]) -> Kind:
    async def lose(play: Play) -> None:
        await asyncio.to_thread(stop)
        play.broken()
        await play.until(lambda: play.told("session database") >= AGENTS // 2)
        await asyncio.to_thread(start)
        play.healed()

    return lose


def full_disk(disk: Path) -> Kind:
    """Nothing more fits on the file system of the server's state until half of the agents were told so."""
    ballast = disk / "ballast"

    def fill(sessions: Path) -> None:
        # What the log of the sessions has room for would be written still, and turns as small as these are: it gives it back.
        with contextlib.closing(sqlite3.connect(sessions, timeout=LIMIT_S)) as other:
            other.execute("pragma wal_checkpoint(truncate)")
        with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    async def lack(play: Play) -> None:
        await asyncio.to_thread(fill, play.server.state / "sessions.db")
        play.broken()
        while play.told("disk is full") < AGENTS // 2:
            await asyncio.to_thread(fill, play.server.state / "sessions.db")
            await asyncio.sleep(0.05)
        ballast.unlink()
        play.healed()

    return lack


async def play(server: CrashServer, name: str, kind: Kind) -> Play:
    """All agents to the end of their turns, with a failure in the middle. Raises what an agent could not survive."""
    meeting = Meeting(AGENTS)
    found = Play(server, [Survivor(server.port, number, name) for number in range(AGENTS)])
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for agent in found.agents:
            group.create_task(agent.run(meeting.before_turn))
        await meeting.met()
        server.order("slow")
        await found.until(lambda: sum(agent.speaking for agent in found.agents) >= AGENTS // 2)
        await kind(found)
    await at_rest(server)
    return found


async def at_rest(server: CrashServer) -> None:
    """Until nothing runs and no socket is open. Raises TimeoutError; AssertionError if something is still pinned then."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = await asyncio.to_thread(counters, server.target)
            busy = {name: value for name, value in found.items() if value and name.startswith(BUSY)}
            if not busy:
                break
            await asyncio.sleep(0.05)
    kept = {name: value for name, value in found.items() if value and name.startswith(KEPT)}
    assert not kept, kept


def answers(found: Play) -> list[list[tuple[str, list[tuple[str, str]]]]]:
    """Status and output of each turn of each agent."""
    return [[(turn.status, turn.output) for turn in agent.answered] for agent in found.agents]


def check(found: Play, calm: Play) -> None:
    """Raises AssertionError with what is not as it was without a failure, or not as it was told."""
    assert answers(found) == answers(calm), "an answer differs from that of the run without failures"
    target = found.server.target
    sessions = {row["last_response"]: row for row in target.get("/v1/sessions?limit=100")["data"]}
    for agent in found.agents:
        told = [turn.response for turn in agent.answered]
        assert len(told) == TURNS
        assert [target.get(f"/v1/responses/{response['id']}") for response in told] == told, "a turn is not stored as told"
        row = sessions[told[-1]["id"]]
        assert row["turns"] == TURNS, f"agent {agent.number}: {row['turns']} turns are stored, {TURNS} were answered"
        assert sorted(row["lineage"]) == sorted(response["id"] for response in told)


def figures(found: Play) -> dict[str, Any]:
    after = [min((t.at for t in agent.answered if t.at > found.healed_at), default=found.healed_at) for agent in found.agents]
    told = Counter(
        f"{code} {text.split(';')[0].split(' after position')[0]}" for agent in found.agents for code, text in agent.told
    )
    return {
        "outage_s": round(found.healed_at - found.broken_at, 2),
        "first_s": round(min(after) - found.healed_at, 2),
        "all_s": round(max(after) - found.healed_at, 2),
        "asked_again": sum(turn.tries > 1 for agent in found.agents for turn in agent.answered),
        "told": dict(told),
        **found.extra,
    }


# ── where kinds are played ───────────────────────────────────────────────────────────────────────────────────────

HERE: dict[str, Kind] = {
    "worker_killed": worker_killed,
    "engine_raises": ordered("raise"),
    "nan_logits": ordered("nan"),
    "upgrade": upgrade,
    "drained": drained,
    "server_killed": server_killed,
}
"""On a server with nothing special; those below have one of their own."""
ELSEWHERE = ("stuck_step", "database", "disk_full")


@contextlib.contextmanager
def started(folder: Path, **more: Any) -> Iterator[CrashServer]:
    server = CrashServer(folder, **{"settings": (f"server.drain_s={DRAIN_S}",), **more})
    try:
        server.start()
        yield server
    finally:
        server.end(signal.SIGTERM)


@contextlib.contextmanager
def with_watchdog(folder: Path, backend: str) -> Iterator[tuple[CrashServer, Kind]]:
    """A server that kills a worker after STUCK_S of silence."""
    with started(folder, backend=backend, settings=("--stuck-s", str(STUCK_S))) as server:
        yield server, ordered("stick")


@contextlib.contextmanager
def with_database(folder: Path, backend: str) -> Iterator[tuple[CrashServer, Kind]]:
    """A server on a PostgreSQL of its own. Raises NotHere."""
    from tests.fakes.databases import PostgresServer

    if shutil.which("initdb") is None and not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        raise NotHere("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory(prefix="agentserve-pg-") as place:
        postgres = PostgresServer(Path(place))
        try:
            settings = (f"store.url={postgres.new_database()}",)
            with started(folder, backend=backend, settings=settings) as server:
                yield server, database(postgres.crash, postgres.start)
        finally:
            postgres.stop()


@contextlib.contextmanager
def with_small_disk(folder: Path, backend: str) -> Iterator[tuple[CrashServer, Kind]]:
    """A server whose state lies on a file system of its own, of DISK_BYTES. Raises NotHere."""
    disk = folder / "state"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        raise NotHere("mounting a small file system needs root")
    try:
        with started(folder, backend=backend) as server:
            yield server, full_disk(disk)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def run(
    kinds: Sequence[str], backend: str = "cpu", show: Callable[[str, Mapping[str, Any]], None] = lambda *_: None
) -> dict[str, Any]:
    """Play the kinds, each checked against a run without failures. Returns figures by kind; a kind that this machine cannot
    play has `skipped`. Raises AssertionError."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="agentserve-crash-") as place:
        folder = Path(place)
        with started(folder / "plain", backend=backend) as server:
            calm = asyncio.run(play(server, "calm", nothing))
            check(calm, calm)
            for name in kinds:
                if name in HERE:
                    found[name] = _checked(server, name, HERE[name], calm, show)
        for name, place in zip(ELSEWHERE, (with_watchdog, with_database, with_small_disk), strict=True):
            if name in kinds:
                try:
                    with place(folder / name, backend) as (server, kind):
                        found[name] = _checked(server, name, kind, calm, show)
                except NotHere as why:
                    found[name] = {"skipped": str(why)}
    return found


def _checked(
    server: CrashServer, name: str, kind: Kind, calm: Play, show: Callable[[str, Mapping[str, Any]], None]
) -> dict[str, Any]:
    played = asyncio.run(play(server, name, kind))
    check(played, calm)
    line = figures(played)
    show(name, line)
    return line


def main(arguments: Sequence[str]) -> None:
    every = (*HERE, *ELSEWHERE)
    parser = argparse.ArgumentParser(prog="benchmarks.load crash", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=every, choices=every)
    parser.add_argument("--backend", choices=("cpu", "exact", "reference"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    found = run(options.kinds, options.backend, lambda name, line: print(f"{name}: {line}", flush=True))
    table = Table(title=f"{AGENTS} agents, {TURNS} turns each; every answer is that of the run without failures")
    for column in ("failure", "outage s", "first answer s", "all answered s", "asked again", "told"):
        table.add_column(column, justify="left" if column in ("failure", "told") else "right")
    for name, line in found.items():
        told = line.get("skipped") or "; ".join(f"{count}× {text}" for text, count in line["told"].items())
        table.add_row(name, *(str(line.get(key, "")) for key in ("outage_s", "first_s", "all_s", "asked_again")), told)
    console = Console(width=160)
    console.print(table)
    survived = sum("told" in line for line in found.values())
    found["goals"] = judge(console, [Goal("kinds of failure survived", survived, len(every), least=True)])
    workload = {"agents": AGENTS, "turns": TURNS, "backend": options.backend, "drain_s": DRAIN_S, "stuck_s": STUCK_S}
    report("load_crash", "demo", workload, found, options.record)
