"""Another principal's ids are answered as ids that do not exist, by every route and every frame, and what they name stays.

Driven over the live tables of routes and frames: one that takes an id and is not known here fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from agentserve.config import StoreConfig
from agentserve.protocol.decode import _FRAMES
from agentserve.session.store import SqlStore
from tests.agentserve.audit_bodies import BODIES, Made
from tests.agentserve.route_table import ROUTES
from tests.fakes.canonical import check
from tests.fakes.server import OTHER_TOKEN, TOKEN, FakeServer, running
from tests.fakes.worker import answer

AUTH, OTHER = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, OTHER_TOKEN))
NOBODYS = Made("resp_0", "ses_0", "conv_0", "msg_0")
WITH_IDS = [(method, path) for method, path in ROUTES if "{" in path and not path.startswith("/v1/models/")]
TURNS = {
    "/v1/responses": ["previous_response_id", "conversation"],
    "/v1/responses/input_tokens": ["previous_response_id", "conversation"],
    "/v1/responses/compact": ["previous_response_id"],
}
"""Members of a body that name something of a session."""
FRAMES: dict[str, list[str]] = {
    "response.create": ["previous_response_id", "conversation"],
    "response.cancel": ["response_id"],
    "response.steer": ["previous_response_id"],
    "agentserve.follow": ["response_id"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    store = SqlStore(StoreConfig(url=f"sqlite:///{tmp_path_factory.mktemp('owned')}/s.db"))
    asyncio.run(store.open())
    with running(store=store) as one:
        yield one
    asyncio.run(store.close())


@pytest.fixture(scope="module")
def made(server: FakeServer) -> Made:
    with httpx.Client(base_url=server.url, headers=AUTH) as client:
        conversation = client.post("/v1/conversations", json={"items": [{"role": "user", "content": "hi"}]}).json()["id"]
        (item,) = client.get(f"/v1/conversations/{conversation}/items").json()["data"]
        response = client.post("/v1/responses", json={"input": "x"}).json()["id"]
        (session,) = client.get("/v1/sessions").json()["data"]
    return Made(response, session["id"], conversation, item["id"])


def named(member: str, ids: Made) -> str:
    return ids.conversation if member == "conversation" else ids.response


def nameless(text: str, made: Made) -> str:
    """With the ids that do not exist in the place of those that do."""
    for name in Made.__dataclass_fields__:
        text = text.replace(getattr(made, name), getattr(NOBODYS, name))
    return text


def owned(server: FakeServer, made: Made) -> list[str]:
    """What their owner sees of all of them."""
    paths = [path for method, path in WITH_IDS if method == "GET"]
    assert len(paths) > 5
    return [httpx.get(server.url + made.path(path), headers=AUTH).text for path in paths]


@pytest.mark.parametrize(("method", "path"), [*WITH_IDS, *(("POST", path) for path in TURNS)])
def test_no_route_knows_them(server: FakeServer, made: Made, method: str, path: str) -> None:
    before = owned(server, made)

    def bodies(ids: Made) -> list[dict[str, Any] | None]:
        if path in TURNS:
            return [{"input": "x", member: named(member, ids)} for member in TURNS[path]]
        return [*BODIES[path](ids)] if method == "POST" else [None]

    for theirs, nobodys in zip(bodies(made), bodies(NOBODYS), strict=True):
        asked = [
            httpx.request(method, server.url + ids.path(path), json=body, headers=OTHER)
            for ids, body in ((made, theirs), (NOBODYS, nobodys))
        ]
        assert asked[0].status_code == asked[1].status_code
        assert 400 <= asked[0].status_code < 500, asked[0].text
        assert nameless(asked[0].text, made) == asked[1].text
    assert owned(server, made) == before


def test_every_kind_of_frame_is_known_here() -> None:
    assert set(FRAMES) == set(_FRAMES)


@pytest.mark.parametrize("kind", FRAMES)
def test_no_frame_knows_them(server: FakeServer, made: Made, kind: str) -> None:
    before = owned(server, made)
    with connect(server.ws_url, additional_headers=OTHER) as socket:
        for member in FRAMES[kind]:
            told: list[str] = []
            for ids in (made, NOBODYS):
                socket.send(json.dumps({"type": kind, member: named(member, ids), "input": "x"}))
                told.append(str(socket.recv(timeout=60)))
            assert '"error"' in told[0]
            assert nameless(told[0], made) == told[1]
    assert owned(server, made) == before


def test_a_running_turn_goes_on_whatever_others_ask(server: FakeServer) -> None:
    gate = asyncio.Event()
    server.worker.scripts.append(lambda start: [*answer("abc")(start)[:-1], gate, answer("abc")(start)[-1]])
    with connect(server.ws_url, additional_headers=AUTH) as socket, connect(server.ws_url, additional_headers=OTHER) as other:
        socket.send(json.dumps({"type": "response.create", "input": "x"}))
        events = [json.loads(socket.recv(timeout=60))]
        running_one = events[0]["response"]["id"]
        for kind in sorted(set(FRAMES) - {"response.create"}):
            other.send(json.dumps({"type": kind, FRAMES[kind][0]: running_one, "input": "y"}))
            assert '"error"' in str(other.recv(timeout=60)), kind
        path = f"{server.url}/v1/responses/{running_one}"
        answers = [
            httpx.post(path + "/cancel", headers=OTHER),
            httpx.delete(path, headers=OTHER),
            httpx.get(path, headers=OTHER),
        ]
        assert [one.status_code for one in answers] == [404] * 3
        server.call(gate.set)
        while events[-1]["type"] != "response.completed":
            events.append(json.loads(socket.recv(timeout=60)))
        check(events)


def test_no_list_has_them(server: FakeServer, made: Made) -> None:
    lists = [path for method, path in ROUTES if method == "GET" and "{" not in path]
    assert "/v1/sessions" in lists
    ids = [getattr(made, name) for name in Made.__dataclass_fields__]
    for path in lists:
        text = httpx.get(server.url + path, headers=OTHER).text
        assert [one for one in ids if one in text] == [], path
