"""Storage that fails under a running server, and clients that vanish: clear errors, nothing lost, everything comes back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentserve.cli.connect import AgentSocket, Event, Target
from agentserve.cli.private_server import PrivateServer
from tests.e2e.conftest import FLAGS
from tests.e2e.test_survival import assert_idle, body, last
from tests.fakes.databases import PostgresServer

Start = Callable[..., PrivateServer]


def turn(server: PrivateServer, text: str = "hello", previous: str | None = None, **more: Any) -> Event:
    """The last event of one turn on a socket of its own."""
    with AgentSocket(server.target) as agent:
        return list(agent.turn(body(text, previous, **more)))[-1]


def status(target: Target, path: str, method: str = "GET") -> int:
    request = urllib.request.Request(target.url + path, headers=target.headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.postgres
def test_a_dead_postgresql_fails_turns_clearly_and_takes_them_when_it_is_back(
    start_server: Start, postgres: PostgresServer
) -> None:
    server = start_server("--database-url", postgres.new_database())
    first = last([turn(server)])["id"]
    for path in ("/v1/responses/%00", "/v1/sessions/a%00b", "/v1/sessions/%00/checkpoints"):
        assert status(server.target, path) == 404
    assert status(server.target, "/v1/sessions?after=%00") == 400
    assert turn(server, previous="a\0")["error"]["code"] == "previous_response_not_found"
    postgres.stop()
    try:
        # The parent is remembered, so the turn runs and its commit fails; an unknown one cannot even be looked for.
        failed = last([turn(server, "go on", first)])
        assert failed["status"] == "failed"
        assert "session database" in failed["error"]["message"]
        unknown = turn(server, "go on", "resp_of_another_server")
        assert unknown["error"]["code"] == "server_error"
        assert last([turn(server, "not kept", store=False)])["status"] in ("completed", "incomplete")
    finally:
        postgres.start()
    again = last([turn(server, "go on", first)])
    assert again["status"] in ("completed", "incomplete")
    assert status(server.target, f"/v1/responses/{again['id']}") == 200
    # Whoever asks for the one that failed is told how it ended; nothing follows it.
    request = urllib.request.Request(f"{server.target.url}/v1/responses/{failed['id']}", headers=server.target.headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        told = json.load(reply)
    assert (told["status"], told["error"]["message"]) == ("failed", failed["error"]["message"])
    assert turn(server, "go on", failed["id"])["error"]["code"] == "previous_response_not_found"
    assert "Traceback" not in server.tail(1000)
    assert_idle(server.target)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (4096, 1):
        try:
            while True:
                os.write(handle, b"x" * size)
        except OSError:
            pass
    os.close(handle)


@pytest.mark.slow
def test_a_full_disk_fails_turns_by_its_name_and_loses_none(small_disk: Path, tmp_path: Path) -> None:
    server = PrivateServer(small_disk / "state", flags=(*FLAGS, "--disk-cache-mb", "64"))
    server.log = tmp_path / "server.log"
    try:
        server.start()
        first = last([turn(server)])["id"]
        fill(small_disk / "ballast")
        failed = last([turn(server, "go on " * 100, first)])
        assert failed["status"] == "failed"
        assert "disk is full" in failed["error"]["message"]
        assert last([turn(server, "not kept", store=False)])["status"] in ("completed", "incomplete")
        assert status(server.target, f"/v1/responses/{first}") == 200
        (small_disk / "ballast").unlink()
        second = last([turn(server, "go on", first)])
        assert second["status"] in ("completed", "incomplete")
        assert_idle(server.target)
        server.kill()
        server.start()
        third = last([turn(server, "go on", second["id"])])
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
        assert "Traceback" not in server.tail(1000)
    finally:
        server.stop()


@pytest.mark.slow
def test_two_hundred_clients_that_vanish_leave_nothing(server: PrivateServer) -> None:
    def vanish(number: int) -> None:
        if number % 2:
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgr"[: number * 7 % 60])
            return
        agent = AgentSocket(server.target)
        if number % 4:
            agent._socket.send('{"type":"response.create","input":"hello there","max_output_tokens":200}')
        agent._socket.socket.close()

    def many(start: int) -> None:
        for number in range(start, 200, 10):
            vanish(number)

    threads = [threading.Thread(target=many, args=(start,)) for start in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert last([turn(server)])["status"] in ("completed", "incomplete")
    assert_idle(server.target)
