"""Two servers on one state directory, one that goes away under its server, and databases that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agentserve.cli.connect import AgentSocket
from agentserve.cli.private_server import PrivateServer, free_port
from tests.e2e.test_survival import body, last


def serve(state: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    command = [sys.executable, "-m", "agentserve.cli.main", "serve", "--port", str(free_port()), "--state-dir", str(state)]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=False)


def test_a_second_server_on_a_state_directory_is_refused_and_the_first_goes_on(own_server: PrivateServer) -> None:
    with AgentSocket(own_server.target) as agent:
        first = last(list(agent.turn(body("hello"))))
        second = serve(own_server.state_dir)
        assert second.returncode == 2
        holder = f"process {own_server.pid} on {own_server.target.url};"
        assert f"the state directory {own_server.state_dir} is used by another server: {holder}" in second.stderr
        assert last(list(agent.turn(body("go on", first["id"]))))["status"] in ("completed", "incomplete")
    own_server.kill()
    own_server.start()
