"""Whatever a client sends wrongly is answered with a message that names the field, and the socket stays usable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from agentserve.protocol.pieces import MAX_MEMBERS
from tests.budget import examples
from tests.fakes.canonical import check
from tests.fakes.server import TOKEN, FakeServer, config_for_tests, running

AUTH = {"Authorization": f"Bearer {TOKEN}"}
DEEP = json.loads("[" * 200 + "]" * 200)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running(config_for_tests(limits={"items": 50, "frame_bytes": 1 << 20})) as one:
        yield one


@pytest.fixture
def socket(server: FakeServer) -> Iterator[ClientConnection]:
    with connect(server.ws_url, additional_headers=AUTH) as one:
        yield one


def still_usable(socket: ClientConnection) -> None:
    socket.send(json.dumps({"type": "response.create", "input": "hi"}))
    events = []
    while not events or events[-1]["type"] != "response.completed":
        events.append(json.loads(socket.recv(timeout=60)))
    check(events)


BAD_BODIES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": 7}, "invalid_value", "input"),
    ({"input": {}}, "invalid_value", "input"),
    ({"input": []}, "invalid_value", "input"),
    ({}, "invalid_value", "input"),
    ({"input": [7]}, "invalid_value", "input[0]"),
    ({"input": ["x"]}, "invalid_value", "input[0]"),
    ({"input": [{}]}, "invalid_value", "input[0].type"),
    ({"input": [{"role": "user"}]}, "invalid_value", "input[0]"),
    ({"input": [{"role": "king", "content": "x"}]}, "invalid_value", "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "invalid_value", "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "invalid_value", "input[0].content[0]"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
        "invalid_value",
        "input[0].content[0].text",
    ),
    ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "invalid_value", "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, "invalid_value", "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": {}}]}]}, "invalid_value", "input[0].content[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "unsupported_value",
        "input[0].content[0]",
    ),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "unsupported_value", "input[0].type"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "invalid_value", "input[0]"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "invalid_value", "input[0].output"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]},
        "invalid_value",
        "input[0].arguments",
    ),
    ({"input": [{"role": "user", "content": "x"}] * 51}, "invalid_value", "input"),
    ({"input": "x", "model": "gpt-9"}, "model_not_found", "model"),
    ({"input": "x", "model": 5}, "invalid_value", "model"),
    ({"input": "x", "temperature": "hot"}, "invalid_value", "temperature"),
    ({"input": "x", "temperature": 3}, "invalid_value", "temperature"),
    ({"input": "x", "top_p": 0}, "invalid_value", "top_p"),
    ({"input": "x", "max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"input": "x", "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"input": "x", "metadata": {"a": 1}}, "invalid_value", "metadata[...]"),
    (
        {"input": "x", "metadata": {"agentserve.ttft_deadline_ms": "soon"}},
        "invalid_value",
        "metadata.agentserve.ttft_deadline_ms",
    ),
    ({"input": "x", "agentserve": {"on_miss": "explode"}}, "invalid_value", "agentserve.on_miss"),
    ({"input": "x", "agentserve": {"events": True, "ttft_deadline": 5}}, "invalid_value", "agentserve.ttft_deadline"),
    ({"input": "x", "metadata": {"agentserve.deadline": "5"}}, "invalid_value", "metadata.agentserve.deadline"),
    ({"input": "x", "tools": {}}, "invalid_value", "tools"),
    ({"input": "x", "tools": [5]}, "invalid_value", "tools[0]"),
    ({"input": "x", "tools": [{}]}, "invalid_value", "tools[0].type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "invalid_value", "tools[0]"),
    ({"input": "x", "tools": [{"type": "function", "name": ""}]}, "invalid_value", "tools[0].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": []}]}, "invalid_value", "tools[0].parameters"),
    (
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": DEEP}}]},
        "invalid_value",
        "tools[0].parameters",
    ),
    ({"input": "x", "tools": [{"type": "custom", "name": "f"}] * 2}, "invalid_value", "tools[1].name"),
    ({"input": "x", "tools": [{"name": "f", "inputSchema": 5}]}, "invalid_value", "tools[0].inputSchema"),
    ({"input": "x", "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"input": "x", "tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "invalid_value", "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "web_search"}}, "unsupported_value", "tool_choice.type"),
    ({"input": "x", "tool_choice": {"type": "allowed_tools", "tools": []}}, "invalid_value", "tool_choice.tools"),
    ({"input": "x", "tool_choice": 5}, "invalid_value", "tool_choice"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "unsupported_value", "text.format.type"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "invalid_value", "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "regex", "pattern": "a(?=b)"}}}, "invalid_value", "text.format.pattern"),
    ({"input": "x", "text": {"format": {"type": "grammar", "syntax": "lark"}}}, "invalid_value", "text.format.definition"),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "strict": True, "schema": {"items": {"not": {}}}}}},
        "unsupported_value",
        "text.format.schema.items.not",
    ),
    (
        {
            "input": "x",
            "tools": [
                {"type": "function", "name": "f", "strict": True, "parameters": {"properties": {"a": {"pattern": "(?!x)"}}}}
            ],
        },
        "unsupported_value",
        "tools.f.parameters.properties.a",
    ),
    ({"input": "x", "background": True, "store": False}, "invalid_value", "background"),
    ({"input": "x", "truncation": "some"}, "invalid_value", "truncation"),
    ({"input": "x", "conversation": "conv_1", "previous_response_id": "r"}, "invalid_value", "previous_response_id"),
    ({"input": "x", "conversation": {"id": "conv_1"}, "store": False}, "invalid_value", "store"),
    ({"input": "x", "conversation": 5}, "invalid_value", "conversation"),
    ({"input": "x", "metadata": {"k": "v" * 20_000}}, "invalid_value", "metadata.k"),
    ({"input": "x", "stop": [""]}, "invalid_value", "stop"),
    ({"input": "x", "stop": ["a"] * 65}, "invalid_value", "stop"),
    ({"input": "x", "stop": "a" * 4097}, "invalid_value", "stop"),
    ({"input": "x", "repetition_penalty": 1e-300}, "invalid_value", "repetition_penalty"),
    ({"input": "x", "conversation": "conv_1"}, "not_found", "conversation"),
    ({"input": "x", "previous_response_id": "resp_unknown"}, "previous_response_not_found", "previous_response_id"),
    ({"input": "x", "previous_response_id": 5}, "invalid_value", "previous_response_id"),
]


@pytest.mark.parametrize(("body", "code", "param"), BAD_BODIES)
def test_a_wrong_body_is_refused_by_field_on_both_transports(
    server: FakeServer, socket: ClientConnection, body: dict[str, Any], code: str, param: str | None
) -> None:
    socket.send(json.dumps({"type": "response.create", "stream_id": "lane", **body}))
    event = json.loads(socket.recv(timeout=60))
    assert event["type"] == "error"
    assert event["stream_id"] == "lane"
    assert (event["error"]["code"], event["error"]["param"]) == (code, param)
    answer = httpx.post(f"{server.url}/v1/responses", json=body, headers=AUTH)
    assert answer.status_code == event["status"]
    assert answer.json() == {"error": event["error"]}
    still_usable(socket)


BAD_FRAMES: list[tuple[str | bytes, str]] = [
    ("", "invalid_value"),
    ("{", "invalid_value"),
    ("null", "invalid_value"),
    ("[]", "invalid_value"),
    ('"x"', "invalid_value"),
    ("[" * 100_000, "invalid_value"),
    ('{"type":"response.create","input":"x","extra":' + "[" * 50_000 + "]" * 50_000 + "}", "invalid_value"),
    ("{}", "invalid_value"),
    ('{"type":5}', "invalid_value"),
    ('{"type":"session.update"}', "unknown_event"),
    ('{"type":"response.create","stream_id":"a b"}', "invalid_stream_id"),
    ('{"type":"response.create","stream_id":7}', "invalid_stream_id"),
    ('{"type":"response.cancel"}', "not_found"),
    ('{"type":"response.cancel","response_id":"resp_x"}', "not_found"),
    (b"\x00\x01", "invalid_value"),
    (b'{"type":"response.create"}', "invalid_value"),
]


@pytest.mark.parametrize(("frame", "code"), BAD_FRAMES)
def test_a_wrong_frame_gets_an_error_and_the_socket_stays(socket: ClientConnection, frame: str | bytes, code: str) -> None:
    socket.send(frame)
    event = json.loads(socket.recv(timeout=60))
    assert (event["type"], event["error"]["code"]) == ("error", code)
    still_usable(socket)


@pytest.mark.parametrize("field", ["max_output_tokens", "top_k"])
def test_a_count_beyond_64_bits_means_as_many_as_there_are(server: FakeServer, field: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", field: 10**30}, headers=AUTH)
    assert answer.json()["status"] == "completed"


def test_half_a_surrogate_pair_becomes_a_replacement_character(server: FakeServer) -> None:
    """Agents cut tool output by length, in the middle of an emoji, and send what is left for the rest of the session."""
    raw = r'{"input":"a\ud83d b \\ud83d \ud83d\ude00 \ude00"}'
    answer = httpx.post(f"{server.url}/v1/responses", content=raw, headers=AUTH).json()
    items = httpx.get(f"{server.url}/v1/responses/{answer['id']}/input_items", headers=AUTH).json()["data"]
    assert items[0]["content"][0]["text"] == "a\ufffd b \\ud83d \U0001f600 \ufffd"


def test_a_frame_over_the_limit_closes_with_1009(socket: ClientConnection) -> None:
    socket.send("x" * ((1 << 20) + 1))
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_a_body_over_the_limit_is_refused(server: FakeServer) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", content=b"{" + b" " * (1 << 20) + b"}", headers=AUTH)
    assert answer.json()["error"]["code"] == "message_too_large"


@pytest.mark.parametrize("member", ["input", "tools", "include", "anything"])
def test_too_many_members_are_refused_before_they_are_decoded(member: str) -> None:
    with running(config_for_tests()) as server, connect(server.ws_url, additional_headers=AUTH) as socket:
        frame = f'{{"type":"response.create","{member}":[' + "1," * MAX_MEMBERS + "1,1]}"
        socket.send(frame)
        assert json.loads(socket.recv(timeout=60))["error"]["code"] == "message_too_large"
        answer = httpx.post(f"{server.url}/v1/responses", content=frame, headers=AUTH, timeout=60)
        assert answer.json()["error"]["code"] == "message_too_large"
        still_usable(socket)


def test_a_33rd_lane_is_refused(socket: ClientConnection) -> None:
    for i in range(33):
        socket.send(json.dumps({"type": "response.create", "input": "hi", "stream_id": f"lane-{i}"}))
    events: list[dict[str, Any]] = []
    while sum(e["type"] == "response.completed" for e in events) < 32:
        events.append(json.loads(socket.recv(timeout=60)))
    errors = [e for e in events if e["type"] == "error"]
    assert [(e["error"]["code"], e["stream_id"]) for e in errors] == [("websocket_stream_limit_reached", "lane-32")]


def test_what_clients_send_by_default_is_accepted(socket: ClientConnection) -> None:
    body = {
        "input": "hi",
        "instructions": None,
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
            {"name": "m", "description": "MCP", "inputSchema": {"type": "object"}},
            {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}},
            {"type": "web_search", "external_web_access": True},
            {"type": "namespace", "name": "n", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"a": 1},
        "truncation": "disabled",
        "top_logprobs": None,
        "something_new": {"x": []},
    }
    socket.send(json.dumps({"type": "response.create", **body}))
    events = []
    while not events or events[-1]["type"] != "response.completed":
        events.append(json.loads(socket.recv(timeout=60)))
    final = check(events)
    assert [t.get("type") for t in final["tools"]] == ["function", "function", "custom", "web_search", "namespace"]


SHAPES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "call_id", "output", "name", "arguments", "inputSchema", "x"]),
            inner
            | st.sampled_from(
                ["message", "function_call", "function_call_output", "user", "input_text", "reasoning", "custom"]
            ),
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=examples(50, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.dictionaries(
        st.sampled_from(["input", "tools", "tool_choice", "metadata", "text", "agentserve"]), SHAPES, max_size=3
    )
)
def test_no_body_breaks_the_server(server: FakeServer, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", content=json.dumps(body), headers=AUTH)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("field", ["temperature", "tool_choice", "top_p"])
def test_a_number_that_no_float_holds_is_told_by_its_field(server: FakeServer, field: str) -> None:
    body = f'{{"input": "x", "{field}": 1e999}}'
    error = httpx.post(f"{server.url}/v1/responses", content=body, headers=AUTH).json()["error"]
    assert (error["code"], error["param"], error["message"]) == ("invalid_value", field, f"{field}: Number out of range")
