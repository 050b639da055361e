"""A running server whose disk for saved states fills up, turns read-only and gets better: turns go on, and it says so once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentserve.cli.connect import AgentSocket
from agentserve.cli.private_server import PrivateServer
from tests.e2e.conftest import FLAGS
from tests.e2e.test_faults import fill
from tests.e2e.test_restart import cached
from tests.e2e.test_survival import assert_idle, body, last, wait_until

WORDS = "the lamp in the old house by the river is green " * 20
IN_MEMORY = "saved states stay in memory only"
ON_DISK = "saved states are written to disk again"
FULL = "the disk is full"
ROOM = "the disk has room for saved states again"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB where a server keeps its saved states, and nothing else."""
    folder = tmp_path / "state" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A second mount over the first, since a file that is open for writing keeps that one from becoming read-only."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_turns_go_on_and_the_disk_is_used_again_without_a_restart(disk: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[model]\ndisk_reserve_bytes = 0\n")
    server = PrivateServer(tmp_path / "state", flags=(*FLAGS, "--disk-cache-mb", "64", "--config", str(settings)))

    def said(text: str) -> int:
        return server.log.read_text().count(text)

    def turns(name: str, count: int) -> None:
        """Each goes on from the one before, which memory has at least."""
        with AgentSocket(server.target) as agent:
            response = last(list(agent.turn(body(f"{name}: {WORDS}", temperature=0))))
            for _ in range(count - 1):
                known = response["usage"]["input_tokens"]
                response = last(list(agent.turn(body("go on", response["id"], temperature=0))))
                assert cached(response) >= known - 1
            assert response["status"] in ("completed", "incomplete")

    try:
        server.start(ready_s=240.0)
        turns("before", 2)
        wait_until(lambda: bool(list(disk.glob("*/??/*.safetensors"))))

        fill(disk / "ballast")
        turns("full", 4)
        wait_until(lambda: said(FULL) == 1)
        turns("still full", 4)
        (disk / "ballast").unlink()
        turns("room again", 2)
        wait_until(lambda: said(ROOM) == 1)
        assert said(FULL) == 1, "one warning, however many turns"
        lacked_room = said(IN_MEMORY)
        assert said(ON_DISK) == lacked_room <= 1

        with read_only(disk):
            turns("read-only", 4)
            wait_until(lambda: said(IN_MEMORY) == lacked_room + 1)
            turns("still read-only", 4)
        turns("writable again", 2)
        wait_until(lambda: said(ON_DISK) == lacked_room + 1)
        assert said(IN_MEMORY) == lacked_room + 1

        assert_idle(server.target)
        assert "Traceback" not in server.tail(1000)
        assert server.stop() == 0
        server.start(ready_s=240.0)
        with AgentSocket(server.target) as agent:
            after = last(list(agent.turn(body(f"writable again: {WORDS}", temperature=0))))
        assert cached(after) > 200, "what was saved since then is on the disk"
    finally:
        server.stop()
