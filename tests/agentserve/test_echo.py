"""What a response repeats of its request: word for word in every event about its life, and made JSON once."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
from msgspec import Raw

from agentserve.config import Config
from agentserve.interfaces import Principal
from agentserve.protocol.responses import ResponseCreate
from agentserve.request import accept
from tests.agentserve.test_http import sse_events
from tests.agentserve.test_websocket import AUTH
from tests.fakes.server import running

ODD = 'a "b" \\ \n\t\x00\x7f é 🙂 </script> \u2028'
ASKED: dict[str, Any] = {
    "input": "hi",
    "instructions": ODD,
    "prompt_cache_key": ODD,
    "safety_identifier": ODD,
    "user": ODD,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "description": ODD}}},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "tools": [{"type": "function", "name": "f", "description": ODD, "parameters": {"type": "object"}, "strict": False}],
}
ECHOED = [name for name in ASKED if name != "input"]


def test_every_event_about_a_response_repeats_what_was_asked() -> None:
    with running() as server, httpx.Client(base_url=server.url, headers=AUTH) as client:
        streamed = [
            e["response"]
            for e in sse_events(client.post("/v1/responses", json={**ASKED, "stream": True}).text)
            if "response" in e
        ]
        assert [r["status"] for r in streamed] == ["in_progress", "in_progress", "completed"]
        told = [*streamed, client.get(f"/v1/responses/{streamed[0]['id']}").json()]
        for response in told:
            assert {name: response[name] for name in ECHOED} == {name: ASKED[name] for name in ECHOED}
        plain = client.post("/v1/responses", json={"input": "hi"}).json()
        assert {name: plain[name] for name in ECHOED} == {
            **dict.fromkeys(("instructions", "prompt_cache_key", "safety_identifier", "user")),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
        }


def test_what_is_repeated_is_json_before_the_turn_begins() -> None:
    """Megabytes are made JSON by the thread that reads them, and not again by the one that serves sockets in each event."""
    create = msgspec.json.decode(json.dumps(ASKED), type=ResponseCreate)
    turn = accept(create, Principal("alice", b""), Config(), {}, websocket=False)
    body = turn.body(Config())
    later = msgspec.structs.replace(body, status="completed")
    for name in ECHOED:
        value = getattr(body, name)
        assert all(type(one) is Raw for one in (value if name == "tools" else (value,))), name
        assert getattr(later, name) is getattr(turn.body(Config()), name)
