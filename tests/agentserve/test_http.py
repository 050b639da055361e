"""The same turns over HTTP: JSON, server-sent events, stored responses, sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agentserve.errors import TurnFailure
from tests.fakes.canonical import check
from tests.fakes.server import OTHER_TOKEN, TOKEN, FakeServer, running, wait_for
from tests.fakes.sockets import posted
from tests.fakes.text import call
from tests.fakes.worker import answer, failing


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as one:
        yield one


def sse_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.strip().split("\n\n"):
        head, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        events.append(event)
    return events


def test_json_and_stream_give_the_same_answer(server: FakeServer, client: httpx.Client) -> None:
    server.worker.default = answer((*call("f", '{"x": 1}'),))
    whole = client.post("/v1/responses", json={"input": "hi", "tools": [{"type": "function", "name": "f"}]}).json()
    stream = client.post("/v1/responses", json={"input": "hi", "stream": True, "tools": [{"type": "function", "name": "f"}]})
    assert stream.headers["content-type"].startswith("text/event-stream")
    streamed = check(sse_events(stream.text))
    assert whole["output"][0]["arguments"] == streamed["output"][0]["arguments"] == '{"x": 1}'
    assert whole["usage"] == streamed["usage"]
    assert whole["object"] == "response"


def test_a_stored_response_can_be_read_listed_and_deleted(client: httpx.Client) -> None:
    items = [{"role": "user", "content": "one"}, {"id": "msg_mine", "role": "user", "content": "two"}]
    made = client.post("/v1/responses", json={"input": items}).json()
    path = f"/v1/responses/{made['id']}"
    assert client.get(path).json() == made
    listed = client.get(f"{path}/input_items?order=asc").json()
    assert [i["content"][0]["text"] for i in listed["data"]] == ["one", "two"]
    assert listed["data"][1]["id"] == listed["last_id"] == "msg_mine"
    assert client.get(f"{path}/input_items").json()["data"] == listed["data"][::-1]
    page = client.get(f"{path}/input_items?order=asc&limit=1").json()
    assert (page["data"], page["has_more"]) == (listed["data"][:1], True)
    rest = client.get(f"{path}/input_items?order=asc&after={page['last_id']}").json()
    assert (rest["data"], rest["has_more"]) == (listed["data"][1:], False)
    for limit in ("0", "101", "0001001", "x", "\u00b2", "9" * 400):
        error = client.get(f"{path}/input_items?limit={limit}").json()["error"]
        assert error["param"] == "limit"
        assert error["message"].startswith("limit: got ")
    assert client.delete(path).json() == {"id": made["id"], "object": "response", "deleted": True}
    assert client.get(path).status_code == client.delete(path).status_code == 404


def test_input_items_that_share_an_id_are_all_listed_by_pages(client: httpx.Client) -> None:
    """By their own ids a page behind the first would be the same one for ever."""
    items = [{"id": one, "role": "user", "content": f"{i}"} for i, one in enumerate(["msg_a", "msg_a", "", "msg_a"])]
    path = f"/v1/responses/{client.post('/v1/responses', json={'input': items}).json()['id']}/input_items?order=asc&limit=1"
    seen, after = [], ""
    for _ in items:
        page = client.get(path + after).json()
        seen.append(page["data"][0]["content"][0]["text"])
        after = f"&after={page['last_id']}"
    assert (seen, page["has_more"]) == (["0", "1", "2", "3"], False)


def test_sessions_behind_an_unknown_one_are_refused_as_items_are(client: httpx.Client) -> None:
    client.post("/v1/responses", json={"input": "x"})
    last = client.get("/v1/sessions").json()["last_id"]
    assert client.get(f"/v1/sessions?after={last}").json()["data"] == []
    unknown = client.get("/v1/sessions?after=ses_0")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "after")


def test_store_false_is_not_kept(server: FakeServer, client: httpx.Client) -> None:
    made = client.post("/v1/responses", json={"input": "x", "store": False}).json()
    assert made["store"] is False
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


@pytest.mark.parametrize(
    ("code", "status"), [("context_length_exceeded", 400), ("deadline_exceeded", 408), ("server_error", 500)]
)
def test_a_failed_turn_has_an_http_status_unless_streamed(
    server: FakeServer, client: httpx.Client, code: str, status: int
) -> None:
    server.worker.scripts.extend([failing(code, "why"), failing(code, "why")])
    whole = client.post("/v1/responses", json={"input": "x"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
    streamed = check(sse_events(client.post("/v1/responses", json={"input": "x", "stream": True}).text))
    assert streamed["error"]["code"] == code


def test_errors_before_the_first_event_have_their_own_status(client: httpx.Client) -> None:
    answer = client.post("/v1/responses", json={"input": "x", "stream": True, "previous_response_id": "resp_0"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_turn(server: FakeServer, stream: bool) -> None:
    server.worker.scripts.append(lambda start: [*answer("abc")(start)[:-1], asyncio.Event()])
    with posted(server, "/v1/responses", {"input": "x", "stream": stream}):
        wait_for(lambda: server.worker.starts)
    wait_for(lambda: server.worker.left == [server.worker.starts[0].turn_id])
    wait_for(lambda: not server.services.active)


def test_a_running_response_can_be_seen_and_cancelled(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.append(lambda start: [*answer("abc")(start)[:-1], asyncio.Event()])
    with client.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as reply:
        wait_for(lambda: bool(server.services.active))
        response_id = next(iter(server.services.active))
        with httpx.Client(base_url=server.url, headers={"x-api-key": TOKEN}) as other:
            assert other.get(f"/v1/responses/{response_id}").json()["status"] == "in_progress"
            assert other.post(f"/v1/responses/{response_id}/cancel").status_code == 200
        final = check(sse_events(reply.read().decode()))
    assert final["status"] == "cancelled"
    assert client.get(f"/v1/responses/{response_id}").json()["status"] == "cancelled"


def test_models_and_operation(server: FakeServer, client: httpx.Client) -> None:
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["fake"]
    assert client.get("/v1/models/fake").json()["object"] == "model"
    assert client.get("/v1/models/other").status_code == 404
    assert b"agentserve_turns" in client.get("/metrics").content
    server.worker.ready = False
    assert client.get("/readyz").status_code == 503
    assert client.get("/healthz").json() == {"status": "ok"}
    missing = client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "/v1/responses" in missing.json()["error"]["message"]
    wrong = client.put("/v1/responses")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "accepted: POST" in wrong.json()["error"]["message"]
    assert client.put("/v1/responses").status_code == 405


def test_sessions_show_lineage_and_are_forgotten_everywhere(server: FakeServer, client: httpx.Client) -> None:
    first = client.post("/v1/responses", json={"input": "x", "prompt_cache_key": "k"}).json()
    second = client.post("/v1/responses", json={"input": "y", "previous_response_id": first["id"]}).json()
    (session,) = client.get("/v1/sessions").json()["data"]
    assert [type(session[at]) for at in ("created_at", "updated_at")] == [int, int]
    assert (session["turns"], session["lineage"]) == (2, [first["id"], second["id"]])
    path = f"/v1/sessions/{session['id']}"
    assert client.get(path).json() == session
    assert client.get(f"{path}/checkpoints").json()["data"][0]["kind"] == "user"
    assert client.post(f"{path}/pin").json()["data"][0]["id"] == "c1"
    assert client.post(f"{path}/release", params={"checkpoint": "c1"}).status_code == 200
    assert client.post(f"{path}/pin", params={"checkpoint": "other"}).status_code == 404
    assert client.post("/v1/sessions/unknown/pin").status_code == 404
    assert client.delete(path).json()["deleted"] is True
    assert server.worker.forgotten == [session["id"]]
    assert client.get(path).status_code == 404


def test_what_names_a_session(server: FakeServer, client: httpx.Client) -> None:
    def session_of(body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
        made = client.post("/v1/responses", json={"input": "x", **body}, headers=headers).json()
        return server.store.rows[made["id"]].session

    by_key = session_of({"prompt_cache_key": "a"}, {"session-id": "b"})
    assert by_key == session_of({"prompt_cache_key": "a"})
    assert session_of({}, {"session-id": "b"}) == session_of({"input": "other"}, {"session-id": "b"}) != by_key
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    grown = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    assert session_of({"input": first}) == session_of({"input": grown}) != session_of({"input": grown[1:]})


def test_the_same_key_and_body_replays_and_another_body_conflicts(server: FakeServer, client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.post("/v1/responses", json={"input": "x"}, headers=headers).json()
    again = client.post("/v1/responses", json={"input": "x"}, headers=headers).json()
    streamed = client.post("/v1/responses", json={"input": "x", "stream": True}, headers=headers)
    assert again == first == check(sse_events(streamed.text))
    assert len(server.worker.starts) == 1
    conflict = client.post("/v1/responses", json={"input": "y"}, headers=headers)
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_a_head_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, httpx.Client(base_url=server.url) as kept:
        assert kept.get("/healthz").status_code == 200
        monkeypatch.setattr("agentserve.heads.HEAD_S", 0.2)
        for begun in (b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.settimeout(60)
                raw.sendall(begun)
                assert raw.recv(1) == b""  # times out if the server waits
        monkeypatch.undo()
        assert kept.get("/healthz").status_code == 200, "a connection that rests between requests is left alone"


def test_a_head_without_end_is_hung_up_on(server: FakeServer) -> None:
    """Before any token was seen, so from anybody."""
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(60)
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
        accepted = 0
        with contextlib.suppress(ConnectionError):
            while accepted < 1024:
                raw.sendall(b"a" * 65_536)
                accepted += 1
        assert accepted < 256
    assert httpx.get(f"{server.url}/healthz", headers={"X": "a" * 100_000}).status_code == 200


def test_counting_is_what_a_turn_would_have(server: FakeServer, client: httpx.Client) -> None:
    first = client.post("/v1/responses", json={"input": "one", "instructions": "i"}).json()
    body = {"input": "two", "previous_response_id": first["id"]}
    counted = client.post("/v1/responses/input_tokens", json=body).json()
    assert len(server.worker.starts) == 1
    second = client.post("/v1/responses", json=body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}
    missing = client.post("/v1/responses/input_tokens", json={"input": "x", "previous_response_id": "resp_0"})
    assert missing.json()["error"]["code"] == "previous_response_not_found"
    server.text.fail = TurnFailure("context_length_exceeded", "too long", "input")
    long = client.post("/v1/responses/input_tokens", json={"input": "x"})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_stop_string_ends_the_text_and_is_named(server: FakeServer, client: httpx.Client) -> None:
    server.worker.default = answer("one two three")
    whole = client.post("/v1/responses", json={"input": "x", "stop": " two"}).json()
    assert (whole["output"][0]["content"][0]["text"], whole["status"], whole["stop_sequence"]) == ("one", "completed", " two")
    streamed = check(sse_events(client.post("/v1/responses", json={"input": "x", "stop": " two", "stream": True}).text))
    assert streamed["output"][0]["content"][0]["text"] == "one"


def test_an_empty_text_is_no_input(server: FakeServer, client: httpx.Client) -> None:
    for body in ({"input": ""}, {"input": []}, {}):
        refused = client.post("/v1/responses", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    first = client.post("/v1/responses", json={"input": "x"}).json()
    assert client.post("/v1/responses", json={"input": "", "previous_response_id": first["id"]}).status_code == 200
    assert [type(i).__name__ for i in server.text.renders[-1].items] == ["Message", "Message"]


def test_sessions_of_which_nothing_is_stored_are_known_by_ids_and_sizes(server: FakeServer, client: httpx.Client) -> None:
    """As Codex does: nothing is to be stored, and a resumed conversation is sent whole."""
    user, more = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    stored = client.post("/v1/responses", json={"input": "other"}).json()
    headers = {"session-id": "codex"}
    first = client.post("/v1/responses", json={"input": [user], "store": False}, headers=headers).json()
    grown = [user, {"role": "assistant", "content": "Hello there"}, more]
    second = client.post("/v1/responses", json={"input": grown, "store": False}, headers=headers).json()
    client.post("/v1/responses/compact", json={"input": grown}, headers=headers)
    unstored, kept = client.get("/v1/sessions").json()["data"]
    assert (unstored["turns"], unstored["lineage"], unstored["stored"]) == (2, [first["id"], second["id"]], False)
    assert (kept["last_response"], kept["stored"]) == (stored["id"], True)
    page = client.get("/v1/sessions?limit=1").json()
    assert (page["data"], page["has_more"]) == ([unstored], True)
    assert client.get(f"/v1/sessions?limit=1&after={page['last_id']}").json()["data"] == [kept]
    path = f"/v1/sessions/{unstored['id']}"
    assert client.get(path).json() == unstored
    assert client.get(f"{path}/checkpoints").status_code == 200
    with httpx.Client(base_url=server.url, headers={"x-api-key": OTHER_TOKEN}) as other:
        assert other.get("/v1/sessions").json()["data"] == []
        assert other.get(path).status_code == other.delete(path).status_code == 404
    assert client.delete(path).json()["deleted"] is True
    assert client.get(path).status_code == 404


def test_a_session_is_forked_from_any_of_its_responses(server: FakeServer, client: httpx.Client) -> None:
    first = client.post("/v1/responses", json={"input": "one", "tools": [{"type": "function", "name": "f"}]}).json()
    second = client.post("/v1/responses", json={"input": "two", "previous_response_id": first["id"]}).json()
    (session,) = client.get("/v1/sessions").json()["data"]
    path = f"/v1/sessions/{session['id']}/fork"
    fork = client.post(path, json={"response_id": second["id"]}).json()
    assert fork["id"] != session["id"]
    client.delete(f"/v1/sessions/{session['id']}")
    branch = client.post("/v1/responses", json={"input": "three", "previous_response_id": fork["last_response"]}).json()
    texts = [getattr(i, "text", "") for i in server.text.renders[-1].items]
    assert texts == ["one", "Hello there", "two", "Hello there", "three"]
    assert [t.name for t in server.text.renders[-1].tools] == ["f"]
    (left,) = client.get("/v1/sessions").json()["data"]
    assert (left["id"], left["lineage"]) == (fork["id"], [fork["last_response"], branch["id"]])
    missing = client.post(f"/v1/sessions/{fork['id']}/fork", json={"response_id": "resp_0"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "response_id")


def test_two_branches_from_one_response_do_not_see_each_other(server: FakeServer, client: httpx.Client) -> None:
    first = client.post("/v1/responses", json={"input": "root"}).json()
    for name in ("left", "right"):
        made = client.post("/v1/responses", json={"input": name, "previous_response_id": first["id"]}).json()
        client.post("/v1/responses", json={"input": "again", "previous_response_id": made["id"]})
        assert [getattr(i, "text", "") for i in server.text.renders[-1].items] == [
            "root",
            "Hello there",
            name,
            "Hello there",
            "again",
        ]


def test_the_servers_own_token_sees_and_moves_the_border_of_device_memory(server: FakeServer, client: httpx.Client) -> None:
    (worker,) = client.get("/v1/memory").json()["workers"]
    assert (worker["model"], worker["worker"], worker["answered"]) == ("fake", 0, True)
    assert (worker["memory"]["slots"], worker["memory"]["experts"]) == (32, 128)
    (worker,) = client.post("/v1/memory/experts", json={"slots": 40}).json()["workers"]
    assert worker["memory"]["slots"] == 40
    refused = client.post("/v1/memory/experts", json={"slots": 65})
    assert refused.status_code == 400
    assert "got 65, accepted: 8 to 64" in refused.json()["error"]["message"]
    bodies: list[dict[str, Any]] = [{}, {"slots": 0}, {"slots": "8"}, {"pages": 1}, {"slots": 8, "model": "another"}]
    for body in bodies:
        assert client.post("/v1/memory/experts", json=body).status_code == 400, body
    other = {"Authorization": f"Bearer {OTHER_TOKEN}"}
    assert client.get("/v1/memory", headers=other).status_code == 403
    assert client.post("/v1/memory/experts", json={"slots": 8}, headers=other).status_code == 403


def test_only_the_servers_own_token_sees_and_changes_what_the_tiers_may_hold(server: FakeServer, client: httpx.Client) -> None:
    answer = client.get("/v1/cache").json()
    assert [(row["tier"], row["budget_bytes"]) for row in answer["tiers"]] == [("ram", 1 << 30)]
    changed = client.post("/v1/cache/quota", json={"ram_bytes": 1 << 20}).json()
    assert changed["tiers"][0]["budget_bytes"] == 1 << 20
    assert set(changed["at_restart"]) == {"ram_bytes", "disk_bytes"}, "it says that it does not last"
    bodies: list[dict[str, Any]] = [{}, {"ram_bytes": -1}, {"ram_bytes": "1"}, {"vram_bytes": 1}, {"disk_bytes": 1}]
    for body in bodies:
        refused = client.post("/v1/cache/quota", json=body)
        assert refused.status_code == 400, body
    other = {"Authorization": f"Bearer {OTHER_TOKEN}"}
    assert client.get("/v1/cache", headers=other).status_code == 403
    assert client.post("/v1/cache/quota", json={"ram_bytes": 0}, headers=other).status_code == 403
    assert client.get("/v1/cache", headers={"Authorization": "Bearer x"}).status_code == 401
