"""Sockets that say whose turn comes next, before it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
from websockets.sync.client import ClientConnection, connect

from agentserve.expectation import Expectation
from agentserve.interfaces import Principal, StoredResponse
from tests.agentserve.test_websocket import AUTH, send, until_terminal
from tests.fakes.server import FakeServer, running, wait_for
from tests.fakes.store import FakeStore


@contextmanager
def joined(server: FakeServer, headers: dict[str, str]) -> Iterator[ClientConnection]:
    with connect(server.ws_url, additional_headers={**AUTH, **headers}, max_size=None) as socket:
        yield cast(ClientConnection, socket)


@pytest.mark.parametrize("how", ["by header", "by response"])
def test_a_socket_that_names_what_it_goes_on_from_is_expected_until_it_closes(how: str) -> None:
    with running() as server:
        with joined(server, {"session-id": "morning"}) as socket:
            send(socket, input="a question with some words")
            first = until_terminal(socket)[-1]["response"]
        assert not server.worker.expected, "nothing was saved when it connected"
        ids = server.worker.starts[-1].ids
        headers = {"session-id": "morning"} if how == "by header" else {}
        with joined(server, headers) as socket:
            if how == "by response":
                send(socket, input="more", previous_response_id=first["id"])
                until_terminal(socket)
            wait_for(lambda: server.worker.expected)
            ((told, salt),) = server.worker.expected.values()
            assert told.startswith(ids)
            assert len(np.frombuffer(told, "<u4")) > len(ids) // 4, "with what was generated"
            assert salt == server.worker.starts[0].salt
        wait_for(lambda: not server.worker.expected)


@pytest.mark.parametrize("name", ["evening", ""])
def test_a_session_that_is_not_known_is_not_expected(name: str) -> None:
    with running() as server:
        with joined(server, {"session-id": "morning"}) as socket:
            send(socket, input="hi")
            until_terminal(socket)
        with joined(server, {"session-id": name} if name else {}) as socket:
            send(socket, input="hello")
            until_terminal(socket)
            assert not server.worker.expected


async def test_a_socket_that_closes_at_once_leaves_nothing_begun() -> None:
    """What was to be looked up must not lie about as a coroutine that nobody awaits: each would be a warning in the log."""
    store: Any = FakeStore()
    asked: list[str] = []
    find = store.get

    def get(principal: str, response_id: str) -> Awaitable[StoredResponse | None]:
        asked.append(response_id)
        return find(principal, response_id)

    store.get = get
    expectation = Expectation(store, (), Principal("p", b""))
    expectation.goes_on("resp_1")
    expectation.close()
    await asyncio.sleep(0)
    assert asked == []
