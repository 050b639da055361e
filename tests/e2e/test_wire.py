"""The wire against a real server process and the embedded model: prewarm, deadlines, overlong contexts, drain."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from agentserve.cli.private_server import PrivateServer
from tests.fakes.canonical import check

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def socket_of(server: PrivateServer) -> Any:
    return connect(
        server.target.url.replace("http", "ws", 1) + "/v1/responses",
        additional_headers={"Authorization": f"Bearer {server.target.token}"},
        max_size=None,
    )


def turn(socket: ClientConnection, **body: Any) -> list[dict[str, Any]]:
    socket.send(json.dumps({"type": "response.create", "temperature": 0, **body}))
    events = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(socket.recv(timeout=60)))
    return events


def test_a_prewarmed_prefix_is_reused_by_the_turn_after_it(server: PrivateServer) -> None:
    rules = {"role": "developer", "content": "You are a careful assistant. " * 12}
    with socket_of(server) as socket:
        warm = check(turn(socket, input=[rules], tools=[TOOL], generate=False))
        assert warm["output"] == []
        events = turn(
            socket,
            input=[{"role": "user", "content": "What is the weather in Oslo?"}],
            tools=[TOOL],
            previous_response_id=warm["id"],
            agentserve={"events": True},
        )
    final = check(events)
    used = final["usage"]["input_tokens_details"]["cached_tokens"]
    assert used >= warm["usage"]["input_tokens"] - 8 > 50
    report = next(e for e in events if e["type"] == "agentserve.cache.report")
    assert report["reused_tokens"] == used
    assert report["divergence"] is None


def test_a_deadline_that_cannot_be_met_fails_only_when_asked(server: PrivateServer) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 100
    with socket_of(server) as socket:
        deadline = {"events": True, "ttft_deadline_ms": 1}
        kept = turn(socket, input=long, max_output_tokens=4, agentserve=deadline)
        assert [e["status"] for e in kept if e["type"] == "agentserve.deadline"][-1] == "missed"
        assert check(kept)["status"] in ("completed", "incomplete")
        failed = turn(socket, input=f"Other: {long}", agentserve={**deadline, "on_miss": "fail"})
        assert failed[-1]["type"] == "response.failed"
        assert check(failed)["error"]["code"] == "deadline_exceeded"


def test_a_context_that_is_too_long_fails_with_numbers(server: PrivateServer) -> None:
    with socket_of(server) as socket:
        events = turn(socket, input="word " * 60_000)
        error = check(events)["error"]
        assert error["code"] == "context_length_exceeded"
        assert any(ch.isdigit() for ch in error["message"])
        assert check(turn(socket, input="hello"))["status"] == "completed"


def test_lanes_run_at_the_same_time_and_keep_their_answers(server: PrivateServer) -> None:
    cities = ["Paris", "Rome", "Oslo", "Lima"]
    with socket_of(server) as socket:
        for city in cities:
            body = {"input": f"What is the weather in {city}?", "tools": [TOOL], "stream_id": city, "temperature": 0}
            socket.send(json.dumps({"type": "response.create", **body}))
        lanes: dict[str, list[dict[str, Any]]] = {city: [] for city in cities}
        while not all(events and events[-1]["type"] in ENDS for events in lanes.values()):
            event = json.loads(socket.recv(timeout=60))
            lanes[event["stream_id"]].append(event)
    for city, events in lanes.items():
        calls = [i for i in check(events, city)["output"] if i["type"] == "function_call"]
        assert [json.loads(c["arguments"]) for c in calls] == [{"city": city}]


def test_log_probabilities_belong_to_the_text(server: PrivateServer) -> None:
    with socket_of(server) as socket:
        events = turn(socket, input="hello", include=["message.output_text.logprobs"], top_logprobs=2)
    final = check(events)
    (part,) = final["output"][-1]["content"]
    assert "".join(m["token"] for m in part["logprobs"]).strip() == part["text"].strip()
    assert all(len(m["top_logprobs"]) == 2 for m in part["logprobs"])


def test_sigterm_lets_the_turn_end_and_closes_with_1012(own_server: PrivateServer) -> None:
    with socket_of(own_server) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "Hello", "temperature": 0}))
        events = [json.loads(socket.recv(timeout=60))]
        os.kill(own_server.pid, signal.SIGTERM)
        while events[-1]["type"] not in ENDS:
            events.append(json.loads(socket.recv(timeout=60)))
        assert check(events)["status"] == "completed"
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
    assert own_server.stop() == 0


def test_an_unmatched_origin_is_refused_by_the_process(server: PrivateServer) -> None:
    headers = {"Authorization": f"Bearer {server.target.token}", "Origin": "https://evil.example"}
    assert httpx.get(f"{server.target.url}/v1/models", headers=headers).status_code == 403
