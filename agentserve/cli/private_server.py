"""A server process of one's own, on a free loopback port and in a given state directory; for `demo` and for tests.

The process is a real `agentserve serve`. It is stopped at the end of the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentserve.cli.connect import Target, Unreachable

TOKEN = "private-server-token"  # of a server that only this process knows of, on loopback, for minutes


class PrivateServer:
    """One server that can be killed and started again on the same port and state.

    flags: further flags of `agentserve serve`. log: file that gets its output.
    """

    def __init__(self, state_dir: Path, *, flags: Sequence[str] = (), token: str = TOKEN) -> None:
        self.state_dir = state_dir
        self.log = state_dir / "server.log"
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self.target = Target(f"http://127.0.0.1:{self.port}", token)
        self._flags = list(flags)
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, ready_s: float = 120.0, waiting: Callable[[str], None] = lambda what: None) -> None:
        """Start and wait until a model is ready. waiting(what) is told what is being waited for.

        Raises Unreachable with the end of its log if it ends, fails, or takes longer than `ready_s`.
        """
        self.state_dir.mkdir(parents=True, exist_ok=True)
        token_file = self.state_dir / "token"
        if not token_file.exists():
            token_file.touch(mode=0o600)
            token_file.write_text(self._token)
        command = [sys.executable, "-m", "agentserve.cli.main", "serve", "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--state-dir", str(self.state_dir), *self._flags]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + ready_s
        while True:
            state = self.target.readiness()
            if state["status"] == "ready":
                return
            if self._process.poll() is not None or state["status"] == "failed" or time.monotonic() > until:
                why = state.get("reason") or state["status"]
                if (status := self.stop()) is not None and state["status"] == "unreachable":
                    why = f"it ended with status {status}"
                raise Unreachable(f"the server did not become ready: {why}\n{self.tail()}")
            loading = state.get("loading") or {}
            begun = "its process" if state["status"] == "unreachable" else str(state["status"])
            waiting(f"{loading['what']} ({loading['fraction']:.0%})" if loading else begun)
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self, wait_s: float = 60.0) -> int | None:
        """SIGTERM, then SIGKILL if it takes longer than `wait_s`. Returns its exit status, None if it was not running."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def tail(self, lines: int = 15) -> str:
        """The end of its output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


@contextlib.contextmanager
def private_server(state_dir: Path, *, flags: Sequence[str] = (), token: str = TOKEN) -> Iterator[PrivateServer]:
    """A server that is stopped at the end; not started yet."""
    server = PrivateServer(state_dir, flags=flags, token=token)
    try:
        yield server
    finally:
        server.stop()


class ReservedPort:
    """A loopback port that the system gives to nobody, as long as this lives: bound here, and listened on by nobody.

    A server that is told its number can take it, again and again: both allow it (SO_REUSEADDR). A port that was only seen to be
    free may be another's until a server has started.
    """

    def __init__(self) -> None:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        self.number: int = bound.getsockname()[1]
        weakref.finalize(self, os.close, bound.detach())
