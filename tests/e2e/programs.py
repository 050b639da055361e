"""Coding agents from npm as a user runs them: with a home of their own, set up by `agentserve launch`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentserve.cli.connect import Target

ROOT = Path(__file__).parents[2]
GREEDY = '[model]\naliases = ["*"]\n[turn]\ntemperature = 0.0\n'
"""Settings under which an agent, which sends no temperature and asks for models of its own, gets the same answers each time."""


def npm_program(name: str, package: str, directory: Path) -> str:
    """Path of a program: from PATH, else installed into `directory`. Skips the test where neither can be."""
    found = shutil.which(name)
    if found:
        return found
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"needs {package}, or npm to install it")
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(directory), package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs {package}; npm could not install it")
    return str(directory / "node_modules" / ".bin" / name)


class Codex:
    """One home of Codex that knows a server. overrides: what its provider is told beside what `agentserve launch` writes.

    within: a command that runs another one, put before Codex.
    """

    def __init__(self, program: str, home: Path, target: Target, *, within: Sequence[str] = (), **overrides: int | str) -> None:
        home.mkdir(exist_ok=True)
        self.home = home
        self.program = program
        self._within = list(within)
        self._target = target
        self._told = [f"-cmodel_providers.agentserve.{name}={value}" for name, value in overrides.items()]

    def set_up(self) -> None:
        """Write its profile; asks the server what it serves."""
        self.finish(self.start(self.launch("--write")))

    def launch(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "agentserve.cli.main", "launch", "codex", "--url", self._target.url, *arguments]

    def exec(self, *arguments: str) -> list[str]:
        task = ["--profile", "agentserve", "exec", "--skip-git-repo-check", *self._told]
        return [*self._within, self.program, *task, *arguments]

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        environ = {
            "PATH": f"{Path(self.program).parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "AGENTSERVE_TOKEN": str(self._target.token),
        }
        return subprocess.Popen(
            command,
            cwd=self.home,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, running: subprocess.Popen[str], limit_s: float = 200.0) -> str:
        """Its last words. Fails with all that it wrote if it did not succeed."""
        try:
            output, errors = running.communicate(timeout=limit_s)
        finally:
            running.kill()
        assert running.returncode == 0, output + errors
        return output.strip()

    def run(self, *arguments: str) -> str:
        """`codex exec` with these arguments → its answer."""
        return self.finish(self.start(self.exec(*arguments)))
