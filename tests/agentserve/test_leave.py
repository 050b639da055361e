"""A client that leaves at any moment: at every turn of the event loop, over every transport. Nothing stays behind.

The server's inside runs in this test's loop, so that a client can leave after exactly n of its turns; n goes from 0 to where
the answer is complete.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from agentserve.served import Served
from agentserve.server import create_app
from agentserve.services import Services
from tests.fakes.server import config_for_tests
from tests.fakes.store import FakeStore
from tests.fakes.text import FakeText
from tests.fakes.worker import FakeWorker, Step, answer

MOST = 400
"""Turns of the loop that an answer may take at most here."""


class Inline(Executor):
    """Runs what it is given at once, so that the number of turns of the loop is always the same."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Inside:
    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.store: Any = FakeStore()
        self.worker.default = answer("four", chunk=1)
        config = config_for_tests(server={"auth": "none"})
        self.services = Services(config, (Served(config.model.name, FakeText(), self.worker),), self.store, Inline())
        self.app, self.api = create_app(self.services, None)

    def idle(self) -> None:
        services = self.services
        assert not services.active
        assert not self.worker._stop, "the worker's turn goes on"
        assert not services.quotas._turns
        assert len(self.api.sockets) == 0
        left = [t for t in asyncio.all_tasks() if t.get_name().startswith(("turn-", "http-", "socket-", "sse-", "background-"))]
        assert left == []


class Client:
    """One ASGI exchange. It leaves when `leave` is called."""

    def __init__(self, scope: dict[str, Any], messages: list[dict[str, Any]], goodbye: dict[str, Any]) -> None:
        self.scope = {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "", "query_string": b""}
        self.scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), **scope}
        self._messages = messages
        self._goodbye = goodbye
        self._left = asyncio.Event()
        self.got: list[MutableMapping[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self._left.wait()
        return self._goodbye

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.got.append(message)
        await asyncio.sleep(0)

    def leave(self) -> None:
        self._left.set()

    @property
    def text(self) -> str:
        return "".join(str(m.get("text") or m.get("body") or "") for m in self.got)


HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]


def http(path: str, body: dict[str, Any]) -> Client:
    raw = json.dumps(body).encode()
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": HEADERS}
    return Client(scope, [{"type": "http.request", "body": raw, "more_body": False}], {"type": "http.disconnect"})


def socket(body: dict[str, Any]) -> Client:
    scope = {"type": "websocket", "path": "/v1/responses", "raw_path": b"/v1/responses", "headers": HEADERS, "subprotocols": []}
    text = json.dumps({"type": "response.create", **body})
    messages = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": text}]
    return Client(scope, messages, {"type": "websocket.disconnect", "code": 1001})


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TRANSPORTS: dict[str, tuple[Callable[[], Client], str]] = {
    "socket": (lambda: socket({"input": "hi"}), "response.completed"),
    "two lanes": (lambda: socket({"input": "hi", "stream_id": "a"}), "response.completed"),
    "json": (lambda: http("/v1/responses", {"input": "hi"}), '"completed"'),
    "events": (lambda: http("/v1/responses", {"input": "hi", "stream": True}), "response.completed"),
    "chat": (lambda: http("/v1/chat/completions", CHAT), '"finish_reason"'),
    "chat events": (lambda: http("/v1/chat/completions", {**CHAT, "stream": True}), "[DONE]"),
    "messages": (lambda: http("/v1/messages", {**CHAT, "max_tokens": 9}), '"end_turn"'),
    "messages events": (lambda: http("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}), "message_stop"),
}


async def visit(inside: Inside, client: Client, turns: int) -> bool:
    """Leave after so many turns of the loop. Returns whether the exchange was over before."""
    task = asyncio.ensure_future(inside.app(client.scope, client.receive, client.send))
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    early = not task.done()
    client.leave()
    for _ in range(MOST):
        if task.done():
            break
        await asyncio.sleep(0)
    assert task.done(), "it goes on without its client"
    task.result()
    for _ in range(5):  # callbacks of what was cancelled last
        await asyncio.sleep(0)
    return not early


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_client_that_leaves_at_any_turn_of_the_loop_leaves_nothing(name: str) -> None:
    make, whole = TRANSPORTS[name]
    inside = Inside()
    completed = turns = 0
    for turns in range(MOST):
        begun = len(inside.worker.starts)
        client = make()
        over = await visit(inside, client, turns)
        inside.idle()
        assert len(inside.worker.starts) - begun <= 1
        completed += whole in client.text
        if over or (whole in client.text and turns > 60):
            break
    assert completed, "at last somebody stayed to the end"
    assert turns > 8, "there were moments to leave at"
    stays = make()
    await visit(inside, stays, MOST)
    assert whole in stays.text, "the next turn is right"


@pytest.mark.parametrize(
    "path",
    ["/v1/responses", "/v1/responses/compact", "/v1/chat/completions", "/v1/messages", "/v1/conversations", "/v1/cache/quota"],
)
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault(path: str) -> None:
    """What an endpoint raises here would be an error in the log for each."""
    inside, client = Inside(), http(path, {"input": "hi"})
    client._messages = [{"type": "http.request", "body": b'{"input": "h', "more_body": True}]
    assert not await visit(inside, client, 20), "it waits for the rest"
    inside.idle()
    assert inside.worker.starts == []


@pytest.mark.parametrize("name", ["json", "events", "socket", "chat"])
async def test_a_turn_that_waits_in_the_worker_stops_when_its_client_leaves(name: str) -> None:
    """No token, no event: the only sign is that the client is gone."""
    make, _ = TRANSPORTS[name]
    inside = Inside()
    never = asyncio.Event()
    waits: list[Step] = [never]
    inside.worker.default = lambda start: waits
    await visit(inside, make(), 60)
    inside.idle()
    assert [start.turn_id for start in inside.worker.starts] == inside.worker.left
    assert inside.store.committed == []
