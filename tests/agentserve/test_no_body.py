"""A request without a body says as much as an empty object, on every route that reads one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentserve.config import StoreConfig
from agentserve.session.store import SqlStore
from tests.agentserve.test_websocket import AUTH
from tests.fakes.server import FakeServer, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    store = SqlStore(StoreConfig(url=f"sqlite:///{tmp_path}/s.db"))
    asyncio.run(store.open())
    with running(store=store) as one:
        yield one
    asyncio.run(store.close())


WITHOUT_A_BODY: list[tuple[str, str | None]] = [
    ("/v1/conversations", None),
    ("/v1/responses", "input"),
    ("/v1/responses/input_tokens", "input"),
    ("/v1/responses/compact", "input"),
    ("/v1/chat/completions", "messages"),
    ("/v1/messages", "messages"),
    ("/v1/cache/quota", "ram_bytes"),
    ("/v1/memory/experts", "slots"),
]


@pytest.mark.parametrize("body", [b"", b"  \n"])
@pytest.mark.parametrize(("path", "missing"), WITHOUT_A_BODY)
def test_no_body_is_an_empty_object(server: FakeServer, path: str, missing: str | None, body: bytes) -> None:
    """So what needs no field needs no body, and what does names the field."""
    answer = httpx.post(server.url + path, content=body, headers=AUTH)
    same = httpx.post(server.url + path, json={}, headers=AUTH)
    assert answer.status_code == same.status_code == (200 if missing is None else 400), answer.text
    if missing is not None:
        assert answer.json() == same.json()
        assert missing in answer.text


def test_a_session_forks_and_a_conversation_is_named_without_a_body(server: FakeServer) -> None:
    first = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "prompt_cache_key": "forked"}, headers=AUTH).json()
    session = next(
        s for s in httpx.get(f"{server.url}/v1/sessions", headers=AUTH).json()["data"] if s["last_response"] == first["id"]
    )
    made = httpx.post(f"{server.url}/v1/sessions/{session['id']}/fork", headers=AUTH)
    assert (made.status_code, made.json()["id"] != session["id"]) == (200, True), made.text
    named = httpx.post(f"{server.url}/v1/conversations", headers=AUTH).json()
    for path, missing in ((named["id"], "metadata"), (f"{named['id']}/items", "items")):
        refused = httpx.post(f"{server.url}/v1/conversations/{path}", headers=AUTH)
        assert (refused.status_code, missing in refused.json()["error"]["message"]) == (400, True), refused.text
