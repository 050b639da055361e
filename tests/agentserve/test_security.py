"""Who gets in: Host, Origin and token are checked before a socket is accepted; other people's ids do not exist."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from agentserve.config import ServerConfig, load
from agentserve.errors import ConfigError, Forbidden
from agentserve.logs import FORMAT, OneLine
from agentserve.security import Guard, Tokens, load_tokens
from tests.fakes.canonical import check
from tests.fakes.server import OTHER_TOKEN, TOKEN, FakeServer, config_for_tests, running
from tests.fakes.sockets import client_frame, raw_socket
from tests.fakes.worker import answer, failing

AUTH = {"Authorization": f"Bearer {TOKEN}"}
OTHER = {"x-api-key": OTHER_TOKEN}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    settings = {"allowed_hosts": ("agentserve",), "allowed_origins": ("http://localhost:3000",)}
    with running(config_for_tests(server=settings)) as one:
        yield one


REFUSED = [
    ({}, 401),
    ({"Authorization": "Bearer wrong"}, 401),
    ({"Authorization": f"Basic {TOKEN}"}, 401),
    ({"Authorization": f"Bearer {TOKEN}x"}, 401),
    ({"x-api-key": ""}, 401),
    ({**AUTH, "Origin": "https://evil.example"}, 403),
    ({**AUTH, "Origin": "null"}, 403),
    ({**AUTH, "Origin": "http://localhost:3001"}, 403),
    ({**AUTH, "Origin": "http://127.0.0.1"}, 403),
    ({**AUTH, "Host": "evil.example"}, 403),
    ({**AUTH, "Host": "127.0.0.1.evil.example"}, 403),
    ({**AUTH, "Host": "agentserve.evil.example:80"}, 403),
    ({"Origin": "https://evil.example"}, 403),
]
ADMITTED = [
    AUTH,
    {"authorization": f"bearer {TOKEN}"},
    {"x-api-key": TOKEN},
    {**AUTH, "Origin": "http://localhost:3000"},
    {**AUTH, "Host": "agentserve:8741"},
    {**AUTH, "Host": "AGENTSERVE"},
    {**AUTH, "Host": "localhost:1"},
    {**AUTH, "Host": "[::1]:1"},
]


@pytest.mark.parametrize(("headers", "status"), REFUSED)
def test_refused_before_accept(server: FakeServer, headers: dict[str, str], status: int) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status
    assert handshake_status(server, headers) == status
    assert server.services.metrics.render().count(b"agentserve_connections_refused_total{") > 0


def test_a_refused_socket_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running() as one, pytest.raises(InvalidStatus):
        connect(one.ws_url, proxy=None)
    loud = [r for r in caplog.records if r.levelno >= logging.WARNING or r.name == "agentserve.security"]
    assert [r.getMessage() for r in loud] == ["request refused status=401 reason=token kind=websocket"]


@pytest.mark.parametrize("headers", ADMITTED)
def test_admitted(server: FakeServer, headers: dict[str, str]) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    assert handshake_status(server, headers) == 101


def handshake_status(server: FakeServer, headers: dict[str, str]) -> int:
    """Status of an upgrade request, by hand: client libraries do not let one set Host."""
    lines = {"Host": f"127.0.0.1:{server.port}", **headers}
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(
            b"GET /v1/responses HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n" + head.encode() + b"\r\n"
        )
        with sock.makefile("rb") as answer:
            return int(answer.readline().split()[1])


def test_a_token_in_the_query_is_no_token(server: FakeServer) -> None:
    assert httpx.get(f"{server.url}/v1/models?token={TOKEN}&api_key={TOKEN}").status_code == 401


def test_health_needs_no_token_but_a_good_host(server: FakeServer) -> None:
    assert httpx.get(f"{server.url}/healthz").status_code == 200
    assert httpx.get(f"{server.url}/readyz").json()["status"] == "ready"
    assert httpx.get(f"{server.url}/healthz", headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(f"{server.url}/metrics").status_code == 401


def test_the_address_that_is_listened_on_is_a_good_host_but_a_wildcard_is_none() -> None:
    for host, name, good in (
        ("192.168.7.7", "192.168.7.7:80", True),
        ("0.0.0.0", "0.0.0.0:80", False),
        ("::", "[fe80::1]", False),
    ):
        guard = Guard(nobody, ServerConfig(host=host), None)
        scope = {"type": "http", "path": "/", "headers": [(b"host", name.encode())]}
        if good:
            assert guard._admit(scope).id == "default"
        else:
            with pytest.raises(Forbidden):
                guard._admit(scope)


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("not reached")


def test_two_host_headers_are_refused(server: FakeServer) -> None:
    assert handshake_status(server, {**AUTH, "host": "evil.example"}) in (400, 403)


def test_upgrades_are_answered_with_426_when_websocket_is_off() -> None:
    with running(config_for_tests(server={"websocket": False})) as off:
        assert handshake_status(off, AUTH) == 426
        assert httpx.post(f"{off.url}/v1/responses", json={"input": "x"}, headers=AUTH).status_code == 200


def test_too_many_connections_are_refused_with_429() -> None:
    with (
        running(config_for_tests(limits={"connections_per_principal": 1})) as small,
        connect(small.ws_url, additional_headers=AUTH),
    ):
        with pytest.raises(InvalidStatus) as refused:
            connect(small.ws_url, additional_headers=AUTH)
        assert refused.value.response.status_code == 429
        with connect(small.ws_url, additional_headers=OTHER):
            pass


def test_another_principals_ids_look_unknown_by_every_route(server: FakeServer) -> None:
    mine = httpx.post(f"{server.url}/v1/responses", json={"input": "x"}, headers=AUTH).json()
    session = server.store.rows[mine["id"]].session
    routes = [
        ("GET", f"/v1/responses/{mine['id']}"),
        ("DELETE", f"/v1/responses/{mine['id']}"),
        ("POST", f"/v1/responses/{mine['id']}/cancel"),
        ("GET", f"/v1/responses/{mine['id']}/input_items"),
        ("GET", f"/v1/responses/{mine['id']}?stream=true"),
        ("POST", f"/v1/sessions/{session}/fork"),
        ("POST", f"/v1/sessions/{session}/pin"),
        ("POST", f"/v1/sessions/{session}/release"),
        ("GET", f"/v1/sessions/{session}"),
        ("DELETE", f"/v1/sessions/{session}"),
        ("GET", f"/v1/sessions/{session}/checkpoints"),
    ]
    for method, path in routes:
        theirs = httpx.request(method, server.url + path, headers=OTHER)
        unknown = httpx.request(
            method, server.url + path.replace(mine["id"], "resp_0").replace(session, "ses_0"), headers=OTHER
        )
        assert theirs.status_code == unknown.status_code == 404
        assert theirs.text.replace(mine["id"], "resp_0").replace(session, "ses_0") == unknown.text
    with connect(server.ws_url, additional_headers=OTHER) as other:
        other.send(json.dumps({"type": "response.create", "input": "y", "previous_response_id": mine["id"]}))
        assert json.loads(other.recv(timeout=60))["error"]["code"] == "previous_response_not_found"
    assert httpx.get(f"{server.url}/v1/sessions", headers=OTHER).json()["data"] == []
    assert httpx.get(f"{server.url}/v1/responses/{mine['id']}", headers=AUTH).json() == mine


def test_principals_have_different_salts_that_do_not_change(server: FakeServer) -> None:
    for headers in (AUTH, OTHER, AUTH):
        httpx.post(f"{server.url}/v1/responses", json={"input": "salt"}, headers=headers)
    first, second, third = (start.salt for start in server.worker.starts[-3:])
    assert first == third != second


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    config = ServerConfig(token_file=str(tmp_path / "state" / "token"))
    tokens, fresh = load_tokens(config)
    assert tokens is not None
    assert fresh is not None
    assert len(fresh) >= 40
    assert stat.S_IMODE((tmp_path / "state" / "token").stat().st_mode) == 0o600
    again, shown = load_tokens(config)
    assert shown is None
    assert again is not None
    assert again.owner(fresh) == tokens.owner(fresh)


@pytest.mark.parametrize("links", [True, False])
def test_of_servers_that_begin_with_one_token_file_one_makes_it(links: bool, tmp_path: Path, monkeypatch) -> None:
    path, both = tmp_path / "token", threading.Barrier(2)
    exists, seen = Path.exists, threading.local()

    def absent_at_first(self: Path) -> bool:
        if self == path and not getattr(seen, "once", False):
            seen.once = True
            both.wait(60)
            return False
        return exists(self)

    def no_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "exists", absent_at_first)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
        both = threading.Barrier(1)  # without links the second one has to come after the first
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load_tokens, ServerConfig(token_file=str(path)))]
        if not links:
            loads[0].result(60)
        loads.append(pool.submit(load_tokens, ServerConfig(token_file=str(path))))
        (first, shown), (second, also_shown) = (load.result(60) for load in loads)
    (fresh,) = [token for token in (shown, also_shown) if token is not None]
    assert first is not None
    assert second is not None
    assert first.owner(fresh) == second.owner(fresh) is not None
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_an_empty_token_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load_tokens(ServerConfig(token_file=str(tmp_path / "token")))


def test_tokens_name_their_owner() -> None:
    tokens = Tokens([("a", "one"), ("b", "two")])
    assert [getattr(tokens.owner(t), "id", None) for t in ("one", "two", "three", "")] == ["a", "b", None, None]


def test_without_a_token_only_loopback_is_listened_on() -> None:
    with pytest.raises(ConfigError, match="must be loopback"):
        load(environ={}, flags={"server.auth": "none", "server.host": "0.0.0.0"})


# ── what must not be logged ──────────────────────────────────────────────────────────────────────────────────────

SECRETS = ["SECRET-PROMPT", "SECRET-TOOL-OUTPUT", "SECRET-INSTRUCTION", "SECRET-ANSWER", "SECRET-FIELD", TOKEN, "SECRET-TOKEN"]


def test_no_prompt_output_or_key_reaches_log_or_metrics(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.worker.scripts.extend([answer("SECRET-ANSWER"), failing("server_error", "worker stopped")])
    body = {
        "input": [
            {"role": "user", "content": "SECRET-PROMPT"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "SECRET-FIELD"}'},
            {"type": "function_call_output", "call_id": "c", "output": "SECRET-TOOL-OUTPUT"},
        ],
        "instructions": "SECRET-INSTRUCTION",
    }
    with connect(server.ws_url, additional_headers=AUTH) as socket:
        for frame in (body, body, {"input": [{"role": "SECRET-FIELD"}]}, {"model": "SECRET-FIELD", "input": "x"}):
            socket.send(json.dumps({"type": "response.create", **frame}))
            events = []
            while not events or events[-1]["type"] not in ("response.completed", "response.failed", "error"):
                events.append(json.loads(socket.recv(timeout=60)))
        server.text.fail = ValueError("SECRET-PROMPT cannot be rendered")
        socket.send(json.dumps({"type": "response.create", **body}))
        events = []
        while not events or events[-1]["type"] != "response.failed":
            events.append(json.loads(socket.recv(timeout=60)))
        assert check(events)["error"]["code"] == "server_error"
        server.text.fail = None
    httpx.post(f"{server.url}/v1/responses?key=SECRET-FIELD", json=body, headers={"Authorization": "Bearer SECRET-TOKEN"})
    ours = [r for r in caplog.records if r.name.startswith("agentserve")]
    assert ours
    lines = [OneLine(FORMAT).format(record) for record in ours]
    text = "\n".join(lines) + server.services.metrics.render().decode()
    assert not [s for s in SECRETS if s in text]
    assert all("\n" not in line for line in lines)


def test_every_public_setting_survives_toml_env_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[server]\nport = 1\nallowed_hosts = ["a", "b"]\n[turn]\nkeepalive_s = 1\n')
    env = {"AGENTSERVE_SERVER_PORT": "2", "AGENTSERVE_ALLOWED_ORIGINS": "http://x, http://y", "AGENTSERVE_STATE_DIR": "/s"}
    assert load(file, environ={}).server.port == 1
    config = load(file, environ=env)
    assert (config.server.port, config.server.allowed_hosts, config.state_dir) == (2, ("a", "b"), "/s")
    assert config.server.allowed_origins == ("http://x", "http://y")
    assert config.server.token_file == "/s/token"
    assert load(file, {"server.port": 3, "server.host": None}, env).server.port == 3
    assert msgspec.to_builtins(config)["turn"]["keepalive_s"] == 1.0


@pytest.mark.parametrize(
    ("text", "hint"),
    [("[server]\nport = -1", "port"), ("[server]\nprot = 1", "prot"), ("[nothing]\n", "nothing"), ("port = ", "cannot read")],
)
def test_a_bad_setting_is_named(tmp_path: Path, text: str, hint: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=hint):
        load(file, environ={})


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4096, reason="needs 4096 open files (ulimit -n)")
def test_a_thousand_idle_sockets_and_a_frame_that_never_ends_hold_nobody_up() -> None:
    """The unfinished frame waits in its own socket; the next turn of anybody is served."""
    with running(config_for_tests(limits={"connections_per_principal": 1024})) as one, contextlib.ExitStack() as open_sockets:
        for _ in range(1000):
            open_sockets.enter_context(raw_socket(one, receive_buffer=4096))
        slow = open_sockets.enter_context(raw_socket(one, receive_buffer=4096))
        slow.sendall(client_frame(json.dumps({"type": "response.create", "input": "x" * 1000}))[:300])
        assert len(one.api.sockets) == 1001
        for headers in (AUTH, OTHER):
            with connect(one.ws_url, additional_headers=headers) as other:
                other.send(json.dumps({"type": "response.create", "input": "y"}))
                events = []
                while not events or events[-1]["type"] != "response.completed":
                    events.append(json.loads(other.recv(timeout=60)))
                check(events)
        assert len(one.worker.starts) == 2
    assert len(one.api.sockets) == 0
