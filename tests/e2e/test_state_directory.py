"""Two servers on one state directory, one that goes away under its server, and databases that cannot be used."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentserve.cli.connect import AgentSocket
from agentserve.cli.private_server import PrivateServer
from tests.e2e.conftest import FLAGS
from tests.e2e.test_restart import cached
from tests.e2e.test_survival import body, last, wait_until

WORDS = "the lamp in the old house by the river is green " * 20


def serve(state: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    command = [sys.executable, "-m", "agentserve.cli.main", "serve", "--port", "0", "--state-dir", str(state)]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=False)


def test_a_second_server_on_a_state_directory_is_refused_and_the_first_goes_on(server: PrivateServer) -> None:
    """That a server which is killed leaves its directory to the next one: test_survival.py and test_restart.py."""
    with AgentSocket(server.target) as agent:
        first = last(list(agent.turn(body("hello"))))
        second = serve(server.state_dir)
        assert second.returncode == 2
        holder = f"process {server.pid} on {server.target.url};"
        assert f"the state directory {server.state_dir} is used by another server: {holder}" in second.stderr
        assert last(list(agent.turn(body("go on", first["id"]))))["status"] in ("completed", "incomplete")


@pytest.mark.slow
def test_what_is_deleted_or_locked_under_a_server_costs_what_it_held_and_no_more(tmp_path: Path) -> None:
    server = PrivateServer(tmp_path / "state", flags=FLAGS)
    server.log = tmp_path / "server.log"

    def turn(text: str, previous: str | None = None, **more: Any) -> dict[str, Any]:
        with AgentSocket(server.target) as agent:
            return last(list(agent.turn(body(f"{text} {WORDS}", previous, temperature=0, **more))))

    def said(text: str) -> int:
        return server.log.read_text().count(text)

    def segments() -> int:
        return len(list(server.state_dir.glob("checkpoints/*/??/*.safetensors")))

    try:
        server.start()
        first = turn("first")
        wait_until(lambda: segments() > 0)
        for path in (server.state_dir / "checkpoints").iterdir():
            path.rename(tmp_path / path.name)  # at once: what is still being written would hold up a removal file by file
        second = turn("second", first["id"])
        assert cached(second) >= first["usage"]["input_tokens"] - 1
        wait_until(lambda: said("the directory of saved states is made again checkpoints_lost=0") == 1)
        wait_until(lambda: segments() > 0)

        other = sqlite3.connect(server.state_dir / "sessions.db", isolation_level=None)
        other.execute("begin immediate")
        held = turn("held", second["id"])
        assert "database is locked" in held["error"]["message"]
        other.execute("rollback")
        other.close()
        third = turn("third", second["id"])
        assert third["status"] in ("completed", "incomplete")

        away = tmp_path / "away"
        server.state_dir.rename(away)
        lost = turn("lost", third["id"])
        assert "its file was deleted or replaced; put it back, or restart" in lost["error"]["message"]
        assert turn("not kept", store=False)["status"] in ("completed", "incomplete")
        wait_until(lambda: said("saved states stay in memory only") == 2)
        assert not server.state_dir.exists(), "nothing stands where it is to be put back"
        away.rename(server.state_dir)
        fourth = turn("fourth", third["id"])
        assert fourth["status"] in ("completed", "incomplete")
        wait_until(lambda: said("saved states are written to disk again") == 2)
        assert "Traceback" not in server.tail(1000)
        assert server.stop() == 0
        server.start()
        assert cached(turn("fifth", fourth["id"])) >= fourth["usage"]["input_tokens"] - 1
    finally:
        server.stop()
