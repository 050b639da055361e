"""Turns over a real WebSocket against a scripted worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.fakes.canonical import check
from tests.fakes.server import TOKEN, FakeServer, running
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer

AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


@pytest.fixture
def socket(server: FakeServer) -> Iterator[ClientConnection]:
    with connect(server.ws_url, additional_headers=AUTH, max_size=None) as one:
        yield one


def send(socket: ClientConnection, **frame: Any) -> None:
    socket.send(json.dumps({"type": "response.create", **frame}))


def until_terminal(socket: ClientConnection) -> list[dict[str, Any]]:
    events = []
    while True:
        events.append(json.loads(socket.recv(timeout=10)))
        if events[-1]["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
            return events


def test_a_turn_thinks_calls_and_answers_in_canonical_order(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(answer((*think("hm"), *ids_of("Sure. "), *call("f", '{"a":1}'), *call("f", "{}"))))
    send(socket, input="hi", tools=[{"type": "function", "name": "f", "parameters": {}}])
    events = until_terminal(socket)
    final = check(events)
    assert events[-1]["type"] == "response.completed"
    assert [i["type"] for i in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert final["output"][2]["arguments"] == '{"a":1}'
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert server.store.committed == [final["id"]]
