"""What clients carry sealed: thinking and compactions come back as they were given, or the item is named."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.client import connect

from agentserve.errors import ConfigError
from agentserve.protocol.items import Message, Reasoning
from agentserve.sealing import Seal
from tests.agentserve.test_http import sse_events
from tests.agentserve.test_websocket import AUTH, send, until_terminal
from tests.fakes.canonical import check
from tests.fakes.server import OTHER_TOKEN, FakeServer, running
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer

SEAL = Seal(b"k" * 32)
WANTED = {"include": ["reasoning.encrypted_content"]}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        one.worker.default = answer((*think("SECRET thought"), *ids_of("Sure")))
        yield one


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTH) as one:
        yield one


@given(text=st.text(), place=st.integers(0, 10_000), letter=st.sampled_from("ABab01-_.= \n"))
def test_a_seal_opens_only_as_it_was_made(text: str, place: int, letter: str) -> None:
    sealed = SEAL.seal("alice", "reasoning", text)
    assert SEAL.open("alice", "reasoning", sealed) == text
    place %= len(sealed)
    changed = sealed[:place] + letter + sealed[place + 1 :]
    assert changed == sealed or SEAL.open("alice", "reasoning", changed) is None
    assert SEAL.open("alice", "reasoning", sealed[:place]) is None
    assert SEAL.open("bob", "reasoning", sealed) is None
    assert SEAL.open("alice", "compaction", sealed) is None
    assert Seal(b"o" * 32).open("alice", "reasoning", sealed) is None
    assert not text or len(text) < 4 or text not in sealed


def test_the_key_is_made_once_and_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "seal.key"
    sealed = Seal.load(path).seal("a", "reasoning", "x")
    assert Seal.load(path).open("a", "reasoning", sealed) == "x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        Seal.load(path)


def test_thinking_comes_sealed_to_a_client_that_asked_and_back_to_the_model(server: FakeServer, client: httpx.Client) -> None:
    plain = client.post("/v1/responses", json={"input": "x"}).json()
    assert plain["output"][0]["encrypted_content"] is None
    live = sse_events(client.post("/v1/responses", json={"input": "x", "stream": True, **WANTED}).text)
    thought, said = check(live)["output"]
    assert "SECRET" not in thought["encrypted_content"]
    response_id = live[-1]["response"]["id"]
    assert sse_events(client.get(f"/v1/responses/{response_id}?stream=true").text) == live
    # As Codex sends it back: without the text.
    back = {"type": "reasoning", "id": thought["id"], "summary": [], "encrypted_content": thought["encrypted_content"]}
    items = [{"role": "user", "content": "x"}, back, said, {"role": "user", "content": "more"}]
    assert client.post("/v1/responses", json={"input": items, "store": False}).status_code == 200
    (reasoning,) = [i for i in server.text.renders[-1].items if isinstance(i, Reasoning)]
    assert reasoning.text == "SECRET thought"


@pytest.mark.parametrize("kind", ["reasoning", "compaction"])
def test_a_seal_that_does_not_hold_names_its_item(server: FakeServer, client: httpx.Client, kind: str) -> None:
    sealed = server.services.seal.seal("default", kind, "thought")
    good: dict[str, Any] = {"type": kind, "encrypted_content": sealed}
    bad = {**good, "encrypted_content": sealed[:-2] + ("AA" if sealed[-2:] != "AA" else "BB")}
    items = [{"role": "user", "content": "x"}, good, bad]
    refused = client.post("/v1/responses", json={"input": items})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[2].encrypted_content")
    assert "thought" not in refused.text
    with connect(server.ws_url, additional_headers=AUTH) as socket:
        send(socket, input=items)
        assert until_terminal(socket)[-1]["error"]["param"] == "input[2].encrypted_content"
    theirs = httpx.post(f"{server.url}/v1/responses", json={"input": items[:2]}, headers={"x-api-key": OTHER_TOKEN})
    assert theirs.json()["error"]["param"] == "input[1].encrypted_content"
    assert client.post("/v1/responses", json={"input": items[:2]}).status_code == 200


def test_a_conversation_is_compacted_and_goes_on(server: FakeServer, client: httpx.Client) -> None:
    tools = [{"type": "function", "name": "f"}]
    server.worker.scripts.append(answer(call("f", "{}")))
    first = client.post("/v1/responses", json={"input": "Fix the bug", "tools": tools}).json()
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "long"}
    server.worker.scripts.append(answer((*think("hm"), *ids_of("The bug is in SECRET.py"))))
    body = {"previous_response_id": first["id"], "input": [result], "model": "fake"}
    made = client.post("/v1/responses/compact", json=body).json()
    assert made["object"] == "response.compaction"
    assert made["usage"]["output_tokens"] > 0
    kept, compaction = made["output"]
    assert (kept["role"], kept["content"][0]["text"]) == ("user", "Fix the bug")
    assert compaction["type"] == "compaction"
    assert "SECRET" not in json.dumps(made)
    asked = server.text.renders[-1]
    assert [type(i).__name__ for i in asked.items] == ["Message", "FunctionCall", "FunctionCallOutput", "Message"]
    client.post("/v1/responses", json={"input": [*made["output"], {"role": "user", "content": "Go on"}], "tools": tools})
    texts = [i.text for i in server.text.renders[-1].items if isinstance(i, Message)]
    assert texts[0] == "Fix the bug"
    assert texts[1].endswith("The bug is in SECRET.py")
    assert texts[2] == "Go on"
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404, "it is no turn of the session"


def test_what_cannot_be_compacted_is_refused(server: FakeServer, client: httpx.Client) -> None:
    empty = client.post("/v1/responses/compact", json={"instructions": "x"})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "input")
    unknown = client.post("/v1/responses/compact", json={"input": "x", "previous_response_id": "resp_0"})
    assert unknown.json()["error"]["code"] == "previous_response_not_found"
    server.worker.scripts.append(answer(think("only thinking")))
    silent = client.post("/v1/responses/compact", json={"input": "x"})
    assert (silent.status_code, silent.json()["error"]["code"]) == (500, "server_error")
    server.worker.scripts.append(answer(think("thinking on and on"), reason="length"))
    short = client.post("/v1/responses/compact", json={"input": "x", "max_output_tokens": 3})
    assert (short.status_code, short.json()["error"]["param"]) == (400, "max_output_tokens")
