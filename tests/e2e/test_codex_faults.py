"""Codex, unmodified, while things go wrong between it and the server: its user gets the answer and sees none of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentserve.cli.connect import Target
from agentserve.cli.private_server import PrivateServer
from tests.e2e.conftest import FLAGS
from tests.e2e.programs import GREEDY, Codex
from tests.e2e.relay import Frame, relay
from tests.e2e.test_codex import cached
from tests.e2e.test_survival import counter, wait_until, worker_pid

pytestmark = [pytest.mark.clients, pytest.mark.slow]

Serve = Callable[..., PrivateServer]
CALLS = "Run the command `ls`"
"""What the embedded model calls a tool of Codex for, so that there is a second request with the id of the first."""
IDLE_MS = 3_000
KEEPALIVES = 7
"""Frames that a server sends in 10 s of prefill, one each 1.5 s."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """serve(settings, *flags) → a started server with these settings (TOML) beside greedy sampling."""
    servers: list[PrivateServer] = []

    def start(settings: str = "", *flags: str) -> PrivateServer:
        (tmp_path / "settings.toml").write_text(GREEDY + settings)
        server = PrivateServer(tmp_path / "state", flags=("--config", str(tmp_path / "settings.toml"), *FLAGS, *flags))
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


def one_session(target: Target) -> Frame:
    (session,) = target.get("/v1/sessions")["data"]
    return session


@pytest.mark.parametrize("end", [PrivateServer.kill, PrivateServer.stop], ids=["killed", "drained"])
def test_a_server_that_is_started_again_under_it(
    codex_program: str, serve: Serve, tmp_path: Path, end: Callable[[PrivateServer], object]
) -> None:
    server = serve()
    codex = Codex(codex_program, tmp_path / "home", server.target)
    codex.set_up()
    running = codex.start(codex.exec(CALLS))
    wait_until(lambda: counter(server.target, "agentserve_active_responses") >= 1)
    end(server)
    server.start()
    assert codex.finish(running)
    session = one_session(server.target)
    assert session["lineage"]
    assert codex.run("resume", "--last", "Hello")
    after = one_session(server.target)
    assert after["id"] == session["id"]
    assert after["reused_tokens"] - session["reused_tokens"] > session["context_tokens"] * 0.9


def test_a_server_without_websockets_gets_its_requests_over_http(codex_program: str, serve: Serve, tmp_path: Path) -> None:
    server = serve("[server]\nwebsocket = false\n")
    codex = Codex(codex_program, tmp_path / "home", server.target)
    codex.set_up()
    assert codex.run(CALLS)
    begun = one_session(server.target)
    assert len(begun["lineage"]) == 2
    assert codex.run("resume", "--last", "Hello")
    session = one_session(server.target)
    assert session["lineage"][:2] == begun["lineage"]
    assert session["reused_tokens"] - begun["reused_tokens"] > begun["context_tokens"] * 0.9


def test_a_response_that_the_server_lost_is_told_again(codex_program: str, serve: Serve, tmp_path: Path) -> None:
    server = serve()
    lost: list[str] = []

    def forget(frame: Frame) -> bool:
        """Codex has its responses kept for as long as its socket lives: with a new one, the first call is behind nothing."""
        calls = frame["type"] == "response.completed" and any(i["type"] == "function_call" for i in frame["response"]["output"])
        if calls and not lost:
            lost.append(frame["response"]["id"])
            return True
        return False

    with relay(server.target, forget) as between:
        codex = Codex(codex_program, tmp_path / "home", between.target)
        codex.set_up()
        assert codex.run(CALLS)
        (refused,) = [frame for frame in between.received if frame["type"] == "error"]
        creates = [frame for frame in between.sent if frame.get("generate") is not False]
        called, told = between.usages
    assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
    assert [frame.get("previous_response_id") for frame in creates] == [None, *lost, None]
    assert cached(told) >= called["total_tokens"] - 2, "what was told again is found by content"
    assert len(one_session(server.target)["lineage"]) == 2


def test_a_prefill_longer_than_its_patience_with_silence(codex_program: str, serve: Serve, tmp_path: Path) -> None:
    server = serve()
    with relay(server.target) as between:
        codex = Codex(codex_program, tmp_path / "home", between.target, stream_idle_timeout_ms=IDLE_MS)
        codex.set_up()
        worker = worker_pid(server)
        os.kill(worker, signal.SIGSTOP)  # the longest prefill: nothing comes of it, as long as this test likes
        try:
            running = codex.start(codex.exec("Hello"))

            def waited() -> bool:
                alive = [frame for link in between.links for frame in link.received if frame["type"] == "response.in_progress"]
                return len(alive) > 2 * KEEPALIVES and turns(between.sent) == 1

            between.wait_for(waited)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert codex.finish(running)
        assert turns(between.sent) == 1, "it gave up and asked again"
    assert len(one_session(server.target)["lineage"]) == 1


def turns(sent: list[Frame]) -> int:
    return sum(frame.get("generate") is not False for frame in sent)


@pytest.fixture
def name_space(tmp_path: Path) -> Callable[[str], list[str]]:
    """name_space(host) → a command that runs another one where this name is that of the loopback address."""

    def command(host: str) -> list[str]:
        hosts = tmp_path / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {host}\n")
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(hosts)]

    if os.getuid() != 0 or subprocess.run([*command("x"), "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a host name of its own needs root")
    return command


def test_a_server_in_the_container_beside_it(
    codex_program: str, serve: Serve, tmp_path: Path, name_space: Callable[[str], list[str]]
) -> None:
    """The server listens on all addresses and answers to a configured name; the agent has the token by its environment."""
    server = serve("", "--host", "0.0.0.0", "--allowed-host", "agentserve")
    beside = Target(f"http://agentserve:{server.port}", server.target.token)
    codex = Codex(codex_program, tmp_path / "home", beside, within=name_space("agentserve"))
    codex.finish(codex.start([*name_space("agentserve"), *codex.launch("--write")]))
    assert codex.run("Hello")
    begun = one_session(server.target)
    assert codex.run("resume", "--last", "Hello again")
    assert one_session(server.target)["reused_tokens"] > begun["context_tokens"]
    stranger = Codex(codex_program, tmp_path / "home", Target(beside.url, "wrong"), within=name_space("agentserve"))
    refused = stranger.start(stranger.exec("Hello"))
    output, errors = refused.communicate(timeout=200)
    assert refused.returncode != 0
    assert "401" in output + errors
