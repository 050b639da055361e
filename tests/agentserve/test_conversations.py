"""Contexts that the server keeps: made, edited item by item, extended by turns, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.config import StoreConfig
from agentserve.session.store import SqlStore
from tests.agentserve.test_websocket import AUTH
from tests.fakes.server import OTHER_TOKEN, FakeServer, running, wait_for
from tests.fakes.text import call
from tests.fakes.worker import answer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    store = SqlStore(StoreConfig(url=f"sqlite:///{tmp_path}/s.db"))
    asyncio.run(store.open())
    with running(store=store) as one:
        yield one
    asyncio.run(store.close())


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTH) as one:
        yield one


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def texts(server: FakeServer) -> list[str]:
    return [getattr(item, "text", "") for item in server.text.renders[-1].items]


def listed(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    return client.get(f"{path}/items?order=asc&limit=100").json()["data"]


def test_a_conversation_is_made_changed_and_deleted(client: httpx.Client) -> None:
    made = client.post("/v1/conversations", json={"metadata": {"a": "1"}, "items": [user("one")]}).json()
    assert (made["object"], made["metadata"]) == ("conversation", {"a": "1"})
    path = f"/v1/conversations/{made['id']}"
    assert client.get(path).json() == made
    assert client.post(path, json={"metadata": {"b": "2"}}).json() == {**made, "metadata": {"b": "2"}}
    assert client.delete(path).json() == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for reply in (client.get(path), client.delete(path), client.get(path + "/items"), client.post(path, json={"metadata": {}})):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_items_are_listed_in_pages_and_edited_where_they_stand(client: httpx.Client) -> None:
    made = client.post("/v1/conversations", json={"items": [user("one"), user("two", id="msg_two")]}).json()
    path = f"/v1/conversations/{made['id']}"
    added = client.post(f"{path}/items", json={"items": [user("three")]}).json()
    assert [i["content"][0]["text"] for i in added["data"]] == ["three"]
    everything = listed(client, path)
    assert [i["content"][0]["text"] for i in everything] == ["one", "two", "three"]
    assert client.get(f"{path}/items").json()["data"] == everything[::-1]
    page = client.get(f"{path}/items?order=asc&limit=2").json()
    assert (page["has_more"], page["last_id"]) == (True, "msg_two")
    assert client.get(f"{path}/items?order=asc&after=msg_two").json()["data"] == everything[2:]
    assert client.get(f"{path}/items/msg_two").json() == everything[1]
    changed = client.post(f"{path}/items/msg_two", json={"item": user("zwei")}).json()
    assert (changed["id"], changed["content"][0]["text"]) == ("msg_two", "zwei")
    assert client.delete(f"{path}/items/{everything[0]['id']}").json() == made
    assert [i["content"][0]["text"] for i in listed(client, path)] == ["zwei", "three"]
    for wrong, param in (
        (client.post(f"{path}/items", json={"items": [user("x", id="msg_two")]}), "items[0].id"),
        (client.post(f"{path}/items", json={"items": "text"}), "items"),
        (client.post(f"{path}/items", json={"items": [{"role": "nobody", "content": ""}]}), "items[0].role"),
        (client.get(f"{path}/items?order=up"), "order"),
        (client.get(f"{path}/items?after=nothing"), "after"),
    ):
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
    assert client.get(f"{path}/items/nothing").status_code == client.delete(f"{path}/items/nothing").status_code == 404


def test_turns_extend_a_conversation_and_see_its_edits(server: FakeServer, client: httpx.Client) -> None:
    conversation = client.post("/v1/conversations", json={"items": [user("rules")]}).json()["id"]
    path = f"/v1/conversations/{conversation}"
    server.worker.scripts.append(answer(call("f", "{}")))
    tools = [{"type": "function", "name": "f"}]
    first = client.post("/v1/responses", json={"conversation": conversation, "input": "go", "tools": tools}).json()
    assert first["conversation"] == {"id": conversation}
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "long"}
    second = client.post("/v1/responses", json={"conversation": {"id": conversation}, "input": [result]}).json()
    assert texts(server) == ["rules", "go", "", "long"]
    items = listed(client, path)
    assert [i["type"] for i in items] == ["message", "message", "function_call", "function_call_output", "message"]
    assert items[2]["id"] == first["output"][0]["id"]
    assert items[-1] == second["output"][0]
    client.post(f"{path}/items/{items[3]['id']}", json={"item": {**result, "output": "(cleared)"}})
    third = client.post("/v1/responses", json={"conversation": conversation, "input": "more"}).json()
    assert texts(server) == ["rules", "go", "", "(cleared)", "Hello there", "more"]
    assert [t.name for t in server.text.renders[-1].tools] == ["f"], "tools are still those of the response before"
    fourth = client.post("/v1/responses", json={"conversation": conversation, "input": "last"}).json()
    assert texts(server)[-3:] == ["more", "Hello there", "last"]
    (session,) = client.get("/v1/sessions").json()["data"]
    assert session["lineage"] == [first["id"], second["id"], third["id"], fourth["id"]]
    sizes = [len(client.get(f"/v1/responses/{r['id']}/input_items").json()["data"]) for r in (first, second, third, fourth)]
    assert sizes == [2, 1, 6, 1], "only the turn behind an edit is stored with its whole context"
    client.post("/v1/responses", json={"previous_response_id": fourth["id"], "input": "aside"})
    assert texts(server) == [
        "rules",
        "go",
        "",
        "(cleared)",
        "Hello there",
        "more",
        "Hello there",
        "last",
        "Hello there",
        "aside",
    ]
    assert len(listed(client, path)) == 9, "what follows a response by its id is no part of the conversation"


def test_turns_that_cross_are_both_kept(server: FakeServer, client: httpx.Client) -> None:
    conversation = client.post("/v1/conversations", json={}).json()["id"]
    client.post("/v1/responses", json={"conversation": conversation, "input": "start"})
    gate = asyncio.Event()
    server.worker.scripts.append(lambda start: [gate, *answer("slow")(start)])
    slow = client.post("/v1/responses", json={"conversation": conversation, "input": "a", "background": True}).json()
    wait_for(lambda: len(server.worker.starts) == 2)
    client.post("/v1/responses", json={"conversation": conversation, "input": "b"})
    server.call(gate.set)
    wait_for(lambda: not server.services.active)
    assert client.get(f"/v1/responses/{slow['id']}").json()["status"] == "completed"
    client.post("/v1/responses", json={"conversation": conversation, "input": "end"})
    assert texts(server) == ["start", "Hello there", "b", "Hello there", "a", "slow", "end"]


def test_a_deleted_response_does_not_break_its_conversation(server: FakeServer, client: httpx.Client) -> None:
    conversation = client.post("/v1/conversations", json={}).json()["id"]
    empty = client.post("/v1/responses", json={"conversation": conversation})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "input")
    first = client.post("/v1/responses", json={"conversation": conversation, "input": "one"}).json()
    client.delete(f"/v1/responses/{first['id']}")
    client.post("/v1/responses", json={"conversation": conversation, "input": "two"})
    assert texts(server) == ["one", "Hello there", "two"]


def test_another_principals_conversation_does_not_exist(server: FakeServer, client: httpx.Client) -> None:
    made = client.post("/v1/conversations", json={"items": [user("mine", id="msg_1")]}).json()
    path = f"/v1/conversations/{made['id']}"
    with httpx.Client(base_url=server.url, headers={"x-api-key": OTHER_TOKEN}) as other:
        for method, where, body in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [user("x")]}),
            ("GET", "/items/msg_1", None),
            ("POST", "/items/msg_1", {"item": user("x")}),
            ("DELETE", "/items/msg_1", None),
        ):
            theirs = other.request(method, path + where, json=body)
            unknown = other.request(method, path.replace(made["id"], "conv_0") + where, json=body)
            assert theirs.status_code == unknown.status_code == 404
            assert theirs.text.replace(made["id"], "conv_0") == unknown.text
        turn = other.post("/v1/responses", json={"conversation": made["id"], "input": "x"})
        assert (turn.status_code, turn.json()["error"]["param"]) == (404, "conversation")
    assert [i["content"][0]["text"] for i in listed(client, path)] == ["mine"]
