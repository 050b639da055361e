"""Codex, unmodified, set up by `agentserve launch`: it answers, resumes, and only what is new is computed.

Taken from PATH, else installed by npm into a directory of the test run. It gets a home of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentserve.cli.private_server import PrivateServer, private_server
from tests.e2e.conftest import FLAGS

pytestmark = [pytest.mark.clients, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = shutil.which("codex")
    if found:
        return found
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs Codex, or npm to install it")
    directory = tmp_path_factory.mktemp("npm")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(directory), "@openai/codex"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode != 0:
        pytest.skip("needs Codex; npm could not install it")
    return str(directory / "node_modules" / ".bin" / "codex")


def run(command: list[str], server: PrivateServer, codex: str, home: Path) -> str:
    environ = {
        "PATH": f"{Path(codex).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "AGENTSERVE_TOKEN": str(server.target.token),
    }
    done = subprocess.run(
        command, cwd=home, env=environ, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_codex_runs_and_resumes(codex: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with private_server(tmp_path / "state", flags=FLAGS) as server:
        server.start()
        launch = [sys.executable, "-m", "agentserve.cli.main", "launch", "codex", "--url", server.target.url]
        run([*launch, "--write"], server, codex, home)
        task = ["--profile", "agentserve", "exec", "--skip-git-repo-check"]
        assert run([codex, *task, "Hello"], server, codex, home)
        (begun,) = server.target.get("/v1/sessions")["data"]
        assert run([codex, *task, "resume", "--last", "What is 2 + 3?"], server, codex, home)
        (session,) = server.target.get("/v1/sessions")["data"]
        assert session["id"] == begun["id"]
        assert session["lineage"][: len(begun["lineage"])] == begun["lineage"]
        assert len(session["lineage"]) > len(begun["lineage"])
        assert session["reused_tokens"] - begun["reused_tokens"] > begun["context_tokens"] - 100, "all but the suffix"
        assert run([*launch, "--run", "--", "exec", "--skip-git-repo-check", "Hi"], server, codex, home)
