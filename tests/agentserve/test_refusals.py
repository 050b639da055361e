"""What no model here can take is refused by every API with the field's name, and nothing of the request is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.agentserve.test_websocket import AUTH
from tests.fakes.server import FakeServer, running

URL = "data:image/png;base64,AA=="
MEDIA: list[dict[str, Any]] = [
    {"type": "input_image", "image_url": URL},
    {"type": "input_file", "file_id": "file_1"},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "file", "file": {"file_id": "file_1"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
]
USER, BEGUN = {"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


def items_with(part: dict[str, Any]) -> list[tuple[list[Any], str]]:
    """(items, place of the part) for everywhere that a Responses item has parts."""
    text = {"type": "input_text", "text": "look"}
    return [
        ([{"role": "user", "content": [text, part]}], "[0].content[1]"),
        ([{"role": "developer", "content": [part]}], "[0].content[0]"),
        ([{"role": "assistant", "content": [part]}], "[0].content[0]"),
        ([CALL, {"type": "function_call_output", "call_id": "c", "output": [text, part]}], "[1].output[1]"),
        ([CALL, {"type": "function_call_output", "call_id": "c", "output": {"content": [part]}}], "[1].output.content[0]"),
        ([{"type": "custom_tool_call_output", "call_id": "c", "output": [part]}], "[0].output[0]"),
    ]


def refused(answer: httpx.Response, field: str, kind: str) -> None:
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith(field), message
    assert kind in message
    assert "accepted:" in message


@pytest.mark.parametrize("part", MEDIA, ids=[part["type"] for part in MEDIA])
def test_media_is_refused_wherever_an_item_may_hold_it(server: FakeServer, part: dict[str, Any]) -> None:
    begun, kept = len(server.worker.starts), len(server.store.committed)
    for items, place in items_with(part):
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
            refused(httpx.post(server.url + path, json={"input": items}, headers=AUTH), f"input{place}", part["type"])
        refused(
            httpx.post(f"{server.url}/v1/conversations", json={"items": items}, headers=AUTH), f"items{place}", part["type"]
        )
        with connect(server.ws_url, additional_headers=AUTH) as socket:
            socket.send(json.dumps({"type": "response.create", "input": items}))
            error = json.loads(socket.recv(timeout=60))["error"]
            assert error["param"].startswith(f"input{place}"), error
            socket.send(json.dumps({"type": "response.steer", "previous_response_id": "resp_1", "input": items}))
            failed = json.loads(socket.recv(timeout=60))
            assert failed["type"] == "response.steer.failed"
            assert failed["error"]["message"].startswith(f"input{place}"), failed
    assert (len(server.worker.starts), len(server.store.committed)) == (begun, kept)


@pytest.mark.parametrize("part", MEDIA, ids=[part["type"] for part in MEDIA])
def test_media_is_refused_wherever_a_message_may_hold_it(server: FakeServer, part: dict[str, Any]) -> None:
    begun = len(server.worker.starts)
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [part]}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for body, field in (
            ({"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0]"),
            ({"messages": [{"role": "user", "content": "x"}, use, result]}, "messages[2].content[0].content[0]"),
            (
                {"messages": [{"role": "assistant", "content": [part]}, {"role": "user", "content": "x"}]},
                "messages[0].content[0]",
            ),
            ({"messages": [{"role": "user", "content": "x"}], "system": [part]}, "system[0]"),
        ):
            refused(httpx.post(server.url + path, json={"max_tokens": 9, **body}, headers=AUTH), field, part["type"])
    for role in ("system", "user", "assistant", "tool"):
        message = {"role": role, "tool_call_id": "c", "content": [{"type": "text", "text": "x"}, part]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [message]}, headers=AUTH)
        refused(answer, "messages[0].content[1]", part["type"])
    assert len(server.worker.starts) == begun


def test_speech_that_was_said_before_is_refused(server: FakeServer) -> None:
    said = {"role": "assistant", "audio": {"id": "audio_1"}}
    refused(
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [said]}, headers=AUTH), "messages[0].audio", "audio"
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages", {"max_tokens": 9, "messages": [USER, BEGUN]}, "messages[1].role"),
        ("/v1/messages/count_tokens", {"messages": [USER, BEGUN]}, "messages[1].role"),
        ("/v1/chat/completions", {"messages": [USER, {**BEGUN, "prefix": True}]}, "messages[1].prefix"),
        ("/v1/chat/completions", {"messages": [USER, BEGUN], "continue_final_message": True}, "continue_final_message"),
        ("/v1/chat/completions", {"messages": [USER, BEGUN], "add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_an_answer_that_the_client_begins_is_refused(server: FakeServer, path: str, body: dict[str, Any], field: str) -> None:
    refused(httpx.post(server.url + path, json=body, headers=AUTH), field, "begun by the client")


@pytest.mark.parametrize(("path", "name"), [("/v1/responses", "input"), ("/v1/chat/completions", "messages")])
def test_what_the_model_said_last_is_no_beginning_where_the_api_says_so(server: FakeServer, path: str, name: str) -> None:
    answer = httpx.post(server.url + path, json={name: [USER, BEGUN]}, headers=AUTH)
    assert answer.status_code == 200, answer.text
