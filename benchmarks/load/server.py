"""A server process of the lab: the one that serves, with the demo model or with the fake engine behind it.

python -m benchmarks.load.server --port N --state-dir DIR --engine demo|laptop|H200|small|instant [section.field=value …]

With --orders the demo model's worker is one that can be told to fail (faults.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from agentserve import logs
from agentserve.app import compose
from agentserve.cli.connect import Target
from agentserve.cli.private_server import ReservedPort
from agentserve.config import load
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.supervisor import STUCK_S, Process, spawn_worker
from benchmarks.load.machines import MACHINES

ENGINES = ("demo", *MACHINES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state-dir", required=True)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--config", default=None, help="settings file")
    parser.add_argument("--orders", default=None, help="folder of orders to fail")
    parser.add_argument("--stuck-s", type=float, default=STUCK_S, help="silence after which a worker is killed")
    parser.add_argument("settings", nargs="*", metavar="section.field=value")
    options = parser.parse_args()
    flags: dict[str, Any] = {
        "server.port": options.port,
        "server.auth": "none",
        "state_dir": options.state_dir,
        "log.level": "WARNING",
        "limits.connections": 8192,
        "limits.connections_per_principal": 8192,
        "limits.turns_per_principal": 4096,
    }
    flags |= dict(setting.split("=", 1) for setting in options.settings)
    config = load(options.config, flags=flags, environ={"HOME": "/nonexistent"})
    logs.setup(config.log.level)

    async def spawn(settings: WorkerSettings, sock: socket.socket) -> Process:
        demo = options.engine == "demo"
        command = [sys.executable, "-m", "benchmarks.load.faults" if demo else "benchmarks.load.worker"]
        command += ["--fd", str(sock.fileno()), "--settings", settings.to_json()]
        command += ["--orders", options.orders] if demo else ["--machine", options.engine]
        return await asyncio.create_subprocess_exec(*command, pass_fds=(sock.fileno(),))

    plain = options.engine == "demo" and options.orders is None
    application = compose(config, spawn_worker if plain else spawn, stuck_s=options.stuck_s)
    with application.runner() as runner:
        runner.run(application.serve())


class LabServer:
    """One server process under test. target: where it listens."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port
        self.target = Target(f"http://127.0.0.1:{port}", None)

    @property
    def pids(self) -> dict[str, int]:
        """server and worker."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {"server": pid, **({"worker": int(children[0])} if children else {})}

    def rss_mib(self) -> dict[str, float]:
        return {name: rss_mib(pid) for name, pid in self.pids.items()}

    def descriptors(self) -> dict[str, int]:
        """Open files of each process, without those of databases: a pool keeps up to three for each connection."""
        return {name: sum(not _of_database(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()) for name, pid in self.pids.items()}

    def counters(self) -> dict[str, float]:
        return counters(self.target)


def _of_database(descriptor: Path) -> bool:
    try:
        return ".db" in os.readlink(descriptor).rsplit("/", 1)[-1]
    except FileNotFoundError:
        return False


def counters(target: Target) -> dict[str, float]:
    """Series of /metrics that belong to no bucket."""
    import urllib.request

    with urllib.request.urlopen(target.url + "/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "_bucket{" not in line)
    return {name: float(value) for name, value in found}


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextlib.contextmanager
def lab_server(
    state_dir: Path,
    engine: str,
    settings: Sequence[str] = (),
    *,
    cpu: int | None = None,
    ready_s: float = 180.0,
    log: IO[bytes] | None = None,
) -> Iterator[LabServer]:
    """A ready server, stopped at the end. cpu: the core that its process is bound to; its worker is not.

    log: gets what both processes write to standard error; ours does without it.
    """
    reserved = ReservedPort()
    port = reserved.number
    command = [sys.executable, "-m", "benchmarks.load.server", "--port", str(port), "--state-dir", str(state_dir)]
    process = subprocess.Popen([*command, "--engine", engine, *settings], stderr=log)
    server = LabServer(process, port)
    try:
        until = time.monotonic() + ready_s
        while (state := server.target.readiness())["status"] != "ready":
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not become ready: {state}")
            time.sleep(0.05)
        if cpu is not None:
            os.sched_setaffinity(server.pids["server"], {cpu})
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
