"""Input for a response that runs: it is taken at the next item boundary, or comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.agentserve.test_websocket import AUTH, send
from tests.fakes.canonical import check
from tests.fakes.server import FakeServer, running, wait_for
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


@pytest.fixture
def socket(server: FakeServer) -> Iterator[ClientConnection]:
    with connect(server.ws_url, additional_headers=AUTH, max_size=None) as one:
        yield one


class Reader:
    """Sorts a socket's events: those of responses in order, and those about steering."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.steers: list[dict[str, Any]] = []

    def response(self, first: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        events = first or []
        while not events or events[-1]["type"] not in TERMINAL:
            event = self.next()
            if event["type"].startswith("response.steer."):
                self.steers.append(event)
            else:
                events.append(event)
        return events

    def next(self) -> dict[str, Any]:
        return json.loads(self.socket.recv(timeout=60))


def begun(server: FakeServer, socket: ClientConnection, ids: Any, frames: int, **body: Any) -> tuple[str, asyncio.Event]:
    """A turn that has sent `frames` frames of its worker and waits; its id, and what lets it go on."""
    gate = asyncio.Event()
    count = len(server.worker.starts)
    script = answer(ids)
    server.worker.scripts.append(lambda start: [*script(start)[:frames], gate, *script(start)[frames:]])
    send(socket, input="x", tools=[{"type": "function", "name": "f"}], **body)
    wait_for(lambda: len(server.worker.starts) > count)
    turn_id = server.worker.starts[-1].turn_id
    taken = max(0, frames - 2)
    wait_for(lambda: (s := server.services.active[turn_id]._stream) is not None and len(s.generated) == taken)
    return turn_id, gate


def steer(socket: ClientConnection, target: str, given: Any = "stop that") -> None:
    socket.send(json.dumps({"type": "response.steer", "previous_response_id": target, "input": given}))


def test_thinking_ends_and_a_successor_goes_on_with_the_input(server: FakeServer, socket: ClientConnection) -> None:
    target, gate = begun(server, socket, (*think("hm"), *ids_of("No more of this")), 4, stream_id="a", instructions="Be brief")
    send(socket, input="waits", stream_id="a")
    steer(socket, target)
    reader = Reader(socket)
    wait_for(lambda: server.services.active[target]._steered)
    server.call(gate.set)
    first, second, third = (check(reader.response(), "a") for _ in range(3))
    (accepted,) = reader.steers
    assert accepted["type"] == "response.steer.accepted"
    assert (accepted["steer"]["previous_response_id"], accepted["stream_id"]) == (target, "a")
    assert (first["status"], first["incomplete_details"]) == ("incomplete", {"reason": "steered"})
    assert [(i["type"], i["status"]) for i in first["output"]] == [("reasoning", "completed")]
    assert (second["previous_response_id"], second["instructions"], second["status"]) == (target, "Be brief", "completed")
    assert [i.text for i in server.text.renders[1].items] == ["x", "hm", "stop that"]
    assert [t.name for t in server.text.renders[1].tools] == ["f"]
    assert third["previous_response_id"] is None, "what waited in the lane comes after the successor"


def test_a_turn_without_output_is_steered_at_once(server: FakeServer, socket: ClientConnection) -> None:
    target, _ = begun(server, socket, "never", 2)
    steer(socket, target, [{"role": "user", "content": "one"}])
    reader = Reader(socket)
    first, second = check(reader.response()), check(reader.response())
    assert (first["output"], first["incomplete_details"]) == ([], {"reason": "steered"})
    assert second["previous_response_id"] == target


def test_text_is_written_to_its_end_and_a_successor_follows(server: FakeServer, socket: ClientConnection) -> None:
    target, gate = begun(server, socket, "a long text", 5)
    for given in ("one", "two"):
        steer(socket, target, given)
    wait_for(lambda: len(server.services.active[target].request.id) > 0 and server.services.active[target]._steered)
    reader = Reader(socket)
    steered = [reader.next() for _ in range(7)]
    while sum(e["type"] == "response.steer.accepted" for e in steered) < 2:
        steered.append(reader.next())
    server.call(gate.set)
    first = check(reader.response([e for e in steered if not e["type"].startswith("response.steer.")]))
    assert (first["status"], first["output"][0]["content"][0]["text"]) == ("completed", "a long text")
    check(reader.response())
    assert [i.text for i in server.text.renders[-1].items] == ["x", "a long text", "one", "two"]


def test_after_calls_the_input_waits_for_their_results(server: FakeServer, socket: ClientConnection) -> None:
    target, gate = begun(server, socket, call("f", "{}"), 6)
    steer(socket, target)
    wait_for(lambda: server.services.active[target]._steered)
    server.call(gate.set)
    reader = Reader(socket)
    first = check(reader.response())
    assert first["status"] == "completed"
    pending = reader.next()
    assert (pending["type"], pending["reason"]) == ("response.steer.pending", "waiting_for_required_input")
    (stub,) = pending["required_input"]
    assert stub == {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "name": "f"}
    send(socket, previous_response_id=target, input=[{**stub, "output": "done"}])
    check(reader.response())
    assert [getattr(i, "text", "") for i in server.text.renders[-1].items] == ["x", "", "stop that", "done"]


def test_what_cannot_be_taken_comes_back(server: FakeServer, socket: ClientConnection) -> None:
    reader = Reader(socket)

    def refused(target: str, given: Any) -> str:
        steer(socket, target, given)
        event = reader.next()
        while event["type"] != "response.steer.failed":
            event = reader.next()
        assert event["steer"]["previous_response_id"] == target
        assert event["steer"].get("input") == given
        return event["error"]["code"]

    assert refused("resp_0", "x") == "response_not_found"
    target, gate = begun(server, socket, "text", 4)
    for wrong in (
        "",
        [],
        5,
        [{"role": "system", "content": "x"}],
        [{"type": "function_call_output", "call_id": "c", "output": ""}],
    ):
        assert refused(target, wrong) == "invalid_input"
    with connect(server.ws_url, additional_headers=AUTH) as other:
        steer(other, target)
        assert json.loads(other.recv(timeout=60))["error"]["code"] == "response_not_found"
    for _ in range(16):
        steer(socket, target)
    assert refused(target, "one more") == "too_many_pending_steers"
    socket.send(json.dumps({"type": "response.cancel"}))
    events = [reader.next()]
    while sum(e["type"] == "response.steer.failed" for e in events) < 16:
        events.append(reader.next())
    failed = [e for e in events if e["type"] == "response.steer.failed"]
    assert {e["error"]["code"] for e in failed} == {"response_not_active"}
    assert len({e["steer"]["id"] for e in failed}) == 16
    assert refused(target, "x") == "response_already_completed"
    assert not server.services.active
    server.call(gate.set)


def test_a_successor_that_cannot_be_made_gives_the_input_back(server: FakeServer, socket: ClientConnection) -> None:
    target, gate = begun(server, socket, "text", 4)
    steer(socket, target)
    wait_for(lambda: server.services.active[target]._steered)

    async def gone(*_: Any) -> None:
        return None

    server.store.chain = gone
    server.call(gate.set)
    reader = Reader(socket)
    check(reader.response())
    events = [reader.next(), reader.next()]
    assert [e["error"]["code"] for e in events] == ["previous_response_not_found", "successor_creation_failed"]
