"""Following a response that somebody else started or that was lost: running, ended, failed; and keys that are in use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from agentserve.audience import Audience, Nowhere
from agentserve.errors import LostEvents, ServerError
from agentserve.events import ResponseEvents
from agentserve.protocol.responses import ResponseBody
from agentserve.protocol.server_events import Event
from agentserve.replay import Endings
from tests.agentserve.test_http import sse_events
from tests.agentserve.test_websocket import AUTH, send, until_terminal
from tests.fakes.canonical import check
from tests.fakes.server import OTHER_TOKEN, FakeServer, config_for_tests, running, wait_for
from tests.fakes.sockets import client_frame, raw_socket
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer, failing

SCRIPT = answer((*think("hm"), *ids_of("Sure. "), *call("f", "{}")))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTH) as one:
        yield one


@pytest.fixture
def socket(server: FakeServer) -> Iterator[ClientConnection]:
    with connect(server.ws_url, additional_headers=AUTH, max_size=None) as one:
        yield one


def held(server: FakeServer, frames: int, script: Any = SCRIPT) -> asyncio.Event:
    """The next turn stops after so many frames of the worker until the event is set."""
    gate = asyncio.Event()
    server.worker.scripts.append(lambda start: [*script(start)[:frames], gate, *script(start)[frames:]])
    return gate


def followed(client: httpx.Client, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    path = f"/v1/responses/{response_id}?stream=true" + ("" if after is None else f"&starting_after={after}")
    return sse_events(client.get(path).text)


def test_an_ended_response_is_told_again_as_it_was(client: httpx.Client, server: FakeServer) -> None:
    server.worker.scripts.append(SCRIPT)
    body = {"input": "x", "stream": True, "agentserve": {"events": True}, "tools": [{"type": "function", "name": "f"}]}
    live = sse_events(client.post("/v1/responses", json=body).text)
    response_id = check(live)["id"]
    assert followed(client, response_id) == live
    for after in (0, 3, len(live) - 2):
        assert followed(client, response_id, after) == live[after + 1 :]
    assert client.get(f"/v1/responses/{response_id}?stream=true&starting_after={len(live) - 1}").text == ""
    for number in ("x", str(len(live))):
        wrong = client.get(f"/v1/responses/{response_id}?stream=true&starting_after={number}")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")
    assert client.get("/v1/responses/resp_0?stream=true").status_code == 404


def test_a_running_response_is_followed_to_its_end_over_http_and_on_a_lane(
    server: FakeServer, client: httpx.Client, socket: ClientConnection
) -> None:
    gate = held(server, 5)
    send(socket, input="x", stream_id="mine", tools=[{"type": "function", "name": "f"}])
    wait_for(lambda: any(len(t.events.cuts) > 3 for t in tuple(server.services.active.values())))
    (response_id,) = server.services.active
    with connect(server.ws_url, additional_headers=AUTH) as other, ThreadPoolExecutor() as threads:
        other.send(json.dumps({"type": "agentserve.follow", "response_id": response_id, "stream_id": "b", "starting_after": 1}))
        over_http = threads.submit(followed, client, response_id)
        wait_for(lambda: len(server.services.active[response_id].sink._listeners) == 3)
        server.call(gate.set)
        mine, theirs = until_terminal(socket), until_terminal(other)
        check(mine, "mine")
        assert {e["stream_id"] for e in theirs} == {"b"}
        bare = [{k: v for k, v in e.items() if k != "stream_id"} for e in mine]
        assert [{k: v for k, v in e.items() if k != "stream_id"} for e in theirs] == bare[2:]
        assert over_http.result(60) == bare
    assert len(server.worker.starts) == 1


def test_a_detached_turn_is_picked_up_where_it_was_lost(server: FakeServer, client: httpx.Client) -> None:
    gate = held(server, 4)
    with connect(server.ws_url, additional_headers=AUTH) as one:
        send(one, input="a", agentserve={"detach": True}, tools=[{"type": "function", "name": "f"}])
        seen = [json.loads(one.recv(timeout=60)) for _ in range(4)]
    wait_for(lambda: len(server.api.sockets) == 0)
    server.call(gate.set)
    response_id = seen[0]["response"]["id"]
    check(seen + followed(client, response_id, seen[-1]["sequence_number"]))


def test_a_failed_response_can_still_be_looked_at(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.append(failing("deadline_exceeded", "too late"))
    live = sse_events(client.post("/v1/responses", json={"input": "x", "stream": True}).text)
    response_id = check(live)["id"]
    assert client.get(f"/v1/responses/{response_id}").json()["error"]["code"] == "deadline_exceeded"
    assert followed(client, response_id) == live
    with httpx.Client(base_url=server.url, headers={"x-api-key": OTHER_TOKEN}) as other:
        assert other.get(f"/v1/responses/{response_id}").status_code == 404
        assert other.get(f"/v1/responses/{response_id}?stream=true").status_code == 404


def test_a_failed_response_is_forgotten_when_it_is_deleted(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.append(failing("deadline_exceeded", "too late"))
    path = "/v1/responses/" + check(sse_events(client.post("/v1/responses", json={"input": "x", "stream": True}).text))["id"]
    with httpx.Client(base_url=server.url, headers={"x-api-key": OTHER_TOKEN}) as other:
        assert other.delete(path).status_code == 404
    assert client.get(path).status_code == 200
    assert client.delete(path).json()["deleted"] is True
    assert (
        client.get(path).status_code == client.get(f"{path}?stream=true").status_code == client.delete(path).status_code == 404
    )


def test_what_cannot_be_done_with_a_response_yet_or_ever_is_told_by_its_state(server: FakeServer, client: httpx.Client) -> None:
    """Its client sees it by its id, so that "not found" would be no help."""
    go_on = held(server, 1)
    running_id = client.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
    for refusal in (client.delete(f"/v1/responses/{running_id}"), client.get(f"/v1/responses/{running_id}/input_items")):
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (409, "response_running")
    assert "is still running" in followed_up(client, running_id)
    with httpx.Client(base_url=server.url, headers={"x-api-key": OTHER_TOKEN}) as other:
        assert other.delete(f"/v1/responses/{running_id}").status_code == 404
        assert "not found" in followed_up(other, running_id)
    server.call(go_on.set)
    wait_for(lambda: client.delete(f"/v1/responses/{running_id}").status_code == 200)
    server.worker.scripts.append(failing("server_error", "why"))
    failed = check(sse_events(client.post("/v1/responses", json={"input": "x", "stream": True}).text))
    assert "failed" in followed_up(client, failed["id"])


def followed_up(client: httpx.Client, response_id: str) -> str:
    """Why a response cannot be the previous one."""
    error = client.post("/v1/responses", json={"input": "y", "previous_response_id": response_id}).json()["error"]
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    return error["message"]


def test_another_principal_cannot_follow_a_running_response(server: FakeServer, socket: ClientConnection) -> None:
    gate = held(server, 2)
    send(socket, input="x")
    wait_for(lambda: bool(server.services.active))
    (response_id,) = server.services.active
    with connect(server.ws_url, additional_headers={"x-api-key": OTHER_TOKEN}) as other:
        other.send(json.dumps({"type": "agentserve.follow", "response_id": response_id}))
        assert json.loads(other.recv(timeout=60))["error"]["code"] == "not_found"
    server.call(gate.set)
    check(until_terminal(socket))


def test_a_slow_follower_holds_nobody_back_and_misses_nothing() -> None:
    with running(config_for_tests(limits={"buffer_bytes": 1 << 16})) as server:
        # 10 MB of events: more than the most that the kernel takes for a socket that nobody reads.
        gate = held(server, 2, answer("x" * 60_000, chunk=1_000))
        with connect(server.ws_url, additional_headers=AUTH) as fast, raw_socket(server, receive_buffer=4096) as raw:
            send(fast, input="a")
            wait_for(lambda: bool(server.services.active))
            (response_id,) = server.services.active
            raw.sendall(client_frame(json.dumps({"type": "agentserve.follow", "response_id": response_id})))
            turn = server.services.active[response_id]
            wait_for(lambda: len(turn.sink._listeners) == 2)
            server.call(gate.set)
            quick = until_terminal(fast)
            check(quick)
            with raw.makefile("rb") as stream:
                slow = [json.loads(text) for text in _texts(stream)]
            assert slow == quick


async def test_a_follower_is_not_kept_for_ever_where_the_history_lacks_an_event() -> None:
    sent: list[Event] = []

    async def run() -> ResponseBody:
        return await asyncio.get_running_loop().create_future()

    audience = Audience(history=lambda number: sent[number:-1], task=lambda: asyncio.ensure_future(run()), detached=False)
    body = ResponseBody(id="resp_1", created_at=1, status="in_progress", model="m")
    events = ResponseEvents(body, lambda event: (sent.append(event), audience.put(event)))
    first = asyncio.ensure_future(audience.attend(Nowhere()))
    await asyncio.sleep(0)
    events.created()
    events.in_progress()
    with pytest.raises(LostEvents, match="ends at event 1, but 2 were sent"):
        await audience.attend(Nowhere())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


def _texts(stream: Any) -> Iterator[bytes]:
    while True:
        head = stream.read(2)
        size = head[1]
        if size >= 126:
            size = int.from_bytes(stream.read(2 if size == 126 else 8), "big")
        text = stream.read(size)
        if head[0] & 0x0F != 1:
            continue  # a ping
        yield text
        if text.startswith(b'{"type":"response.completed"'):
            return


# ── keys in use ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_in_use_leads_to_the_turn_that_runs(server: FakeServer, client: httpx.Client) -> None:
    gate = held(server, 3)
    body = {"input": "x", "metadata": {"idempotency_key": "k"}, "tools": [{"type": "function", "name": "f"}]}
    with ThreadPoolExecutor() as threads:
        first = threads.submit(client.post, "/v1/responses", json=body)
        second = threads.submit(client.post, "/v1/responses", json={**body, "stream": True})
        wait_for(lambda: sum(len(t.sink._listeners) for t in tuple(server.services.active.values())) == 2)
        other = client.post("/v1/responses", json={**body, "input": "y"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")
        server.call(gate.set)
        assert check(sse_events(second.result(60).text)) == first.result(60).json()
    assert len(server.worker.starts) == 1
    assert client.post("/v1/responses", json=body).json()["id"] == server.worker.starts[0].turn_id


def test_the_turn_of_a_key_goes_on_while_one_of_its_clients_is_there(server: FakeServer, client: httpx.Client) -> None:
    gate = held(server, 3)
    frame = {"input": "x", "metadata": {"idempotency_key": "k"}, "tools": [{"type": "function", "name": "f"}]}
    with connect(server.ws_url, additional_headers=AUTH) as stays:
        with connect(server.ws_url, additional_headers=AUTH) as leaves:
            send(leaves, **frame)
            wait_for(lambda: len(server.worker.starts) == 1)
            send(stays, **frame)
            (turn,) = server.services.active.values()
            wait_for(lambda: len(turn.sink._listeners) == 2)
        wait_for(lambda: len(turn.sink._listeners) == 1)
        server.call(gate.set)
        check(until_terminal(stays))
    assert len(server.store.committed) == 1


def test_a_key_is_free_again_when_its_turn_failed_or_was_left(server: FakeServer, client: httpx.Client) -> None:
    body = {"input": "x", "metadata": {"idempotency_key": "k"}}
    server.worker.scripts.append(failing("server_error", "x"))
    assert client.post("/v1/responses", json=body).status_code == 500
    held(server, 2)
    with connect(server.ws_url, additional_headers=AUTH) as one:
        send(one, **body)
        wait_for(lambda: len(server.worker.starts) == 2)
    wait_for(lambda: not server.services.active)
    assert client.post("/v1/responses", json=body).json()["status"] == "completed"
    assert (
        client.post(
            "/v1/responses", json={"input": "x", "previous_response_id": "resp_0"} | {"metadata": {"idempotency_key": "z"}}
        ).status_code
        == 400
    )
    assert client.post("/v1/responses", json={"input": "x"} | {"metadata": {"idempotency_key": "z"}}).status_code == 200


# ── background ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_background_response_is_answered_at_once_and_looked_up_later(server: FakeServer, client: httpx.Client) -> None:
    gate = held(server, 3)
    begun = client.post("/v1/responses", json={"input": "x", "background": True}).json()
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    path = f"/v1/responses/{begun['id']}"
    assert client.get(path).json()["status"] == "in_progress"
    server.call(gate.set)
    assert check(followed(client, begun["id"]))["status"] == "completed"
    assert client.get(path).json()["status"] == "completed"
    held(server, 3)
    second = client.post("/v1/responses", json={"input": "x", "background": True}).json()
    wait_for(lambda: len(server.worker.starts) == 2)
    assert client.post(f"/v1/responses/{second['id']}/cancel").json()["status"] == "cancelled"
    assert client.get(f"/v1/responses/{second['id']}").json()["status"] == "cancelled"
    refused = client.post("/v1/responses", json={"input": "x", "background": True, "store": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    missing = client.post("/v1/responses", json={"input": "x", "background": True, "previous_response_id": "resp_0"})
    assert missing.json()["error"]["code"] == "previous_response_not_found"
    assert not server.store.background, "those that are stored are known as such"


def test_a_background_response_is_known_before_it_runs_and_when_it_was_lost(server: FakeServer, client: httpx.Client) -> None:
    server.store.background_fails = ServerError("the session database cannot be used now; retry")
    refused = client.post("/v1/responses", json={"input": "x", "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "server_error")
    assert not server.worker.starts
    server.store.background_fails = None
    server.worker.scripts.append(failing("server_error", "broke"))
    begun = client.post("/v1/responses", json={"input": "x", "background": True}).json()
    wait_for(lambda: server.store.background[begun["id"]][1].status == "failed")
    server.services.endings = Endings()  # as after a restart
    path = f"/v1/responses/{begun['id']}"
    assert client.get(path).json()["error"]["message"] == "broke"
    assert client.post(path + "/cancel").json()["status"] == "failed"
    assert check(followed(client, begun["id"]))["status"] == "failed"
    (last,) = followed(client, begun["id"], 40)
    assert (last["type"], last["sequence_number"]) == ("response.failed", 41)
    assert httpx.get(server.url + path, headers={"Authorization": f"Bearer {OTHER_TOKEN}"}).status_code == 404
