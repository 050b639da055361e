"""HTTP as clients, proxies and bad networks make it: packed, too large, unfinished bodies; HTTP/1.0; upgrades to nowhere."""

from __future__ import annotations

import gzip
import json
import re
import select
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.agentserve.test_http import sse_events
from tests.fakes.canonical import check
from tests.fakes.server import TOKEN, FakeServer, config_for_tests, running

AUTH = {"Authorization": f"Bearer {TOKEN}"}
POST = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


def told(server: FakeServer, request: bytes, until: bytes | None = None) -> bytes:
    """What comes back for raw bytes: up to `until`, else all until the server closes."""
    got = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(request)
        while (until is None or until not in got) and (piece := raw.recv(65536)):
            got += piece
    return got


@pytest.mark.parametrize("framing", ["Content-Length: 100\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_body_that_stops_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, framing: str) -> None:
    monkeypatch.setattr("agentserve.http.BODY_S", 0.2)
    with running() as server:
        head, body = told(server, POST + framing.encode()).split(b"\r\n\r\n")  # times out if the server waits
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert "0.2 s, after 1 bytes" in error["message"]


def test_a_body_that_comes_byte_by_byte_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.http.BODY_WHOLE_S", 0.3)
    with running() as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(POST + b"Content-Length: 5000\r\n\r\n")
        raw.sendall(b" ")
        while not select.select([raw], [], [], 0.02)[0]:
            raw.sendall(b" ")  # it never stops coming
        got = b""
        while not got.endswith(b"}}"):  # head and body may come apart
            piece = raw.recv(65536)
            assert piece, got
            got += piece
    assert got.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in got.lower()
    assert re.search(rb"the body comes too slowly: \d+ bytes of 5000 in [\d.]+ s; 0.3 s and one more for each 4096 bytes", got)


def test_what_has_come_of_a_body_gives_the_rest_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.http.BODY_WHOLE_S", 0.0)
    monkeypatch.setattr("agentserve.http.BODY_RATE", 1.0)
    monkeypatch.setattr("agentserve.http.BODY_S", 60.0)
    body = b'{"input": "x"}' + b" " * 600
    with running() as server:
        answer = told(server, POST + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        assert answer.startswith(b"HTTP/1.1 200 ")
        late = POST + b"Content-Length: 100\r\n\r\n"
        assert b"too slowly: 0 bytes of 100 in" in told(server, late)


def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    with running(config_for_tests(limits={"frame_bytes": 1000})) as server:
        asked = told(server, POST + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n", until=b"}}")
    assert asked.startswith(b"HTTP/1.1 400 "), "no 100 Continue"
    assert b"a body of 1001 bytes, at most 1000 are accepted" in asked


def test_a_packed_body_is_refused_by_the_name_of_its_packing(server: FakeServer) -> None:
    packed = gzip.compress(b'{"input": "x"}')
    answer = httpx.post(f"{server.url}/v1/responses", content=packed, headers=AUTH | {"Content-Encoding": "gzip"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_value", "content-encoding")
    assert "'gzip'" in error["message"]


@pytest.mark.parametrize(("body", "first"), [('\ufeff{"input": "x"}'.encode(), "0xef"), (b" [1]", "0x5b")])
def test_a_body_that_is_no_object_is_told_by_how_it_begins(server: FakeServer, body: bytes, first: str) -> None:
    error = httpx.post(f"{server.url}/v1/responses", content=body, headers=AUTH).json()["error"]
    assert first in error["message"]


def test_a_client_that_knows_no_chunks_gets_events_up_to_the_end_of_its_connection(server: FakeServer) -> None:
    body = b'{"input": "x", "stream": true}'
    request = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body) + body
    head, events = told(server, request).split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head.lower()
    assert check(sse_events(events.decode()))["status"] == "completed"


def test_an_answer_of_known_length_reaches_a_client_of_http_1_0(server: FakeServer) -> None:
    request = f"GET /v1/models HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    head, body = told(server, request).split(b"\r\n\r\n", 1)
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body)["object"] == "list"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/realtime"])
def test_an_upgrade_elsewhere_is_told_where_the_sockets_are(server: FakeServer, path: str) -> None:
    request = POST.replace(b"POST /v1/responses", b"GET " + path.encode()) + (
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    head, body = told(server, request, until=b"}}").split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 404 ")
    assert json.loads(body)["error"]["message"] == f"no WebSocket at {path}; accepted: /v1/responses"
