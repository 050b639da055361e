"""Messages over the wire (the worker is scripted): what a turn is asked, and how its answer is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.server import TOKEN, FakeServer, config_for_tests, running, stream_until, wait_for
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer, failing, progress

PATH = "/v1/messages"
HI = {"model": "fake", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(config_for_tests(turn={"keepalive_s": 0.1})) as one:
        yield one


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"x-api-key": TOKEN, "anthropic-version": "2023-06-01"}) as one:
        yield one


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        head, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    return found


def test_what_claude_code_sends_reaches_the_turn(server: FakeServer, client: httpx.Client) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        **HI,
        "system": [{"type": "text", "text": "header"}, {"type": "text", "text": "rules", **mark}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>r</system-reminder>"},
                    {"type": "text", "text": "q", **mark},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "rs_1"},
                    {"type": "redacted_thinking", "data": "xx"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": 1}},
                    {"type": "tool_use", "id": "call_2", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "42"}], **mark},
                    {"type": "tool_result", "tool_use_id": "call_2", "content": "bad", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
            {"role": "system", "content": "late"},
        ],
        "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "temperature": 1,
        "top_k": 5,
    }
    headers = {"anthropic-beta": "a,b", "x-claude-code-session-id": "mine"}
    assert client.post(f"{PATH}?beta=true", json=body, headers=headers).status_code == 200
    (render,) = server.text.renders
    assert (render.instructions, render.thinking, [t.name for t in render.tools]) == ("header\n\nrules", True, ["f"])
    kinds = [(getattr(i, "role", None) or type(i).__name__, getattr(i, "text", None)) for i in render.items]
    assert kinds == [
        ("user", "<system-reminder>r</system-reminder>\nq"),
        ("Reasoning", "hm"),
        ("assistant", "so"),
        ("FunctionCall", None),
        ("FunctionCall", None),
        ("FunctionCallOutput", "42"),
        ("FunctionCallOutput", "bad"),
        ("user", "and?"),
        ("system", "late"),
    ]
    assert render.items[3].arguments == '{"x":1}'  # type: ignore[union-attr]
    assert render.items[6].is_error is True  # type: ignore[union-attr]
    assert server.worker.starts[0].sampling.top_k == 5
    other = {**HI, "system": "changed", "messages": [{"role": "user", "content": "anything"}]}
    client.post(PATH, json=other, headers=headers)
    assert len(client.get("/v1/sessions").json()["data"]) == 1, "the header names the session"
    assert server.text.renders[1].thinking is False, "thinking is off unless asked for"


def test_json_and_stream_give_the_same_answer(server: FakeServer, client: httpx.Client) -> None:
    server.worker.default = answer((*think("why"), *ids_of("text"), *call("f", '{"x": 1}'), *call("f", "{}")), reused=5)
    whole = client.post(PATH, json={**HI, "tools": [TOOL]}).json()
    blocks = whole["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"], blocks[2]["input"], blocks[3]["input"]) == ("why", "text", {"x": 1}, {})
    assert (whole["type"], whole["role"], whole["stop_reason"], whole["stop_sequence"]) == (
        "message",
        "assistant",
        "tool_use",
        None,
    )
    used = whole["usage"]
    assert used["cache_read_input_tokens"] == 5
    assert used["input_tokens"] + 5 == len(server.worker.starts[0].ids) // 4

    got = events(client.post(PATH, json={**HI, "tools": [TOOL], "stream": True}).text)
    assert [e["type"] for e in got[:2]] == ["message_start", "ping"]
    assert got[0]["message"]["content"] == []
    assert [e["type"] for e in got[-2:]] == ["message_delta", "message_stop"]
    assert (got[-2]["delta"], got[-2]["usage"]) == ({"stop_reason": "tool_use", "stop_sequence": None}, used)
    shape = [(e["type"].removeprefix("content_block_"), e["index"]) for e in got if e["type"].startswith("content_block")]
    assert [s for s in dict.fromkeys(shape) if s[0] != "delta"] == [(k, i) for i in range(4) for k in ("start", "stop")]
    deltas = [e["delta"] for e in got if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "why"
    assert "".join(d.get("text", "") for d in deltas) == "text"
    assert "".join(d.get("partial_json", "") for d in deltas) == '{"x": 1}{}'
    assert [d["signature"][:3] for d in deltas if d["type"] == "signature_delta"] == ["rs_"]
    ids = [
        e["content_block"]["id"] for e in got if e["type"] == "content_block_start" and e["content_block"]["type"] == "tool_use"
    ]
    assert len({*ids, *(b["id"] for b in blocks[2:])}) == 4, "no id of a call ever repeats"


def test_why_an_answer_ended(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.extend([answer("ab", reason="length"), answer("one two three"), answer("ab")])
    assert client.post(PATH, json=HI).json()["stop_reason"] == "max_tokens"
    stopped = client.post(PATH, json={**HI, "stop_sequences": ["never", " two"]}).json()
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == ("one", "stop_sequence", " two")
    assert client.post(PATH, json=HI).json()["stop_reason"] == "end_turn"


def test_an_answer_is_from_the_model_that_was_asked() -> None:
    with running(config_for_tests(model={"aliases": ("*",)})) as server:
        asked = {**HI, "model": "claude-x"}
        with httpx.Client(base_url=server.url, headers={"x-api-key": TOKEN}) as client:
            assert client.post(PATH, json=asked).json()["model"] == "claude-x"
            assert events(client.post(PATH, json={**asked, "stream": True}).text)[0]["message"]["model"] == "claude-x"
            del asked["model"]
            assert client.post(PATH, json=asked).json()["model"] == "fake"


def test_how_tools_are_chosen(server: FakeServer, client: httpx.Client) -> None:
    server.worker.default = answer((*call("f", "{}"), *call("f", "{}")))
    one = client.post(PATH, json={**HI, "tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert len(one.json()["content"]) == 1
    client.post(PATH, json={**HI, "tools": [TOOL], "tool_choice": {"type": "none"}})
    none = server.text.renders[1]
    assert [tool.name for tool in none.tools] == ["f"]
    assert none.rule is not None
    assert (none.rule.calls, none.rule.schemas) == ("none", {})
    client.post(PATH, json={**HI, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}})
    named = server.text.renders[2].rule
    assert named is not None
    assert (named.calls, list(named.schemas)) == ("required", ["f"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "robot", "content": "x"}]}, ["messages[0].role", "robot"]),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, ["messages[0].content[0]", "image"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            ["messages[0].content[0]", "document"],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]}
                ]
            },
            ["messages[0].content[0].content[0]", "image"],
        ),
        (
            {"messages": [*HI["messages"], {"role": "assistant", "content": "begun"}]},
            ["messages[1].role", "begun by the client"],
        ),
        ({"system": 3}, ["system"]),
        ({"tools": [{"input_schema": {}}]}, ["tools[0]"]),
        ({"max_tokens": 0}, ["max_tokens"]),
    ],
)
def test_a_refusal_names_the_field(client: httpx.Client, change: dict[str, Any], words: list[str]) -> None:
    reply = client.post(PATH, json={**HI, **change})
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (400, "error", "invalid_request_error")
    for word in words:
        assert word in reply.json()["error"]["message"]


def test_errors_have_this_apis_shape_on_every_way(server: FakeServer, client: httpx.Client) -> None:
    assert httpx.post(server.url + PATH, json=HI).json()["error"]["type"] == "authentication_error"
    assert client.post(PATH, json={**HI, "model": "other"}).json()["error"]["type"] == "not_found_error"
    assert client.post(PATH, json=HI, headers={"Origin": "http://evil"}).json()["error"]["type"] == "permission_error"
    assert client.get(PATH).json()["type"] == "error"
    assert client.post(PATH, content=b"[1]").json()["error"]["type"] == "invalid_request_error"
    server.worker.scripts.extend([failing("context_length_exceeded", "9 tokens")] * 2 + [failing("server_error", "why")])
    whole = client.post(PATH, json=HI)
    assert (whole.status_code, whole.json()["error"]["message"]) == (400, "prompt is too long: 9 tokens")
    last = events(client.post(PATH, json={**HI, "stream": True}).text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
    broken = client.post(PATH, json=HI)
    assert (broken.status_code, broken.json()["error"]["type"]) == (500, "api_error")


def test_a_waiting_stream_begins_at_once_and_pings(server: FakeServer, client: httpx.Client) -> None:
    gate = asyncio.Event()
    server.worker.scripts.append(lambda start: [progress(start, queued=1), gate, *answer("ok")(start)])
    with client.stream("POST", PATH, json={**HI, "stream": True}) as reply:
        got = events(stream_until(reply, "event: ping\n", 3, lambda: server.call(gate.set)))
    first = next(i for i, e in enumerate(got) if e["type"] == "content_block_start")
    assert [e["type"] for e in got[:first]] == ["message_start", *["ping"] * (first - 1)]
    assert first >= 4


def test_a_client_that_goes_away_stops_its_turn(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.append(lambda start: [*answer("abc")(start)[:-1], asyncio.Event()])
    with client.stream("POST", PATH, json={**HI, "stream": True}) as reply:
        next(reply.iter_bytes())
        wait_for(lambda: server.worker.starts)
    wait_for(lambda: server.worker.left == [server.worker.starts[0].turn_id])
    wait_for(lambda: not server.services.active)


def test_counting_is_what_a_turn_would_have(server: FakeServer, client: httpx.Client) -> None:
    body = {k: v for k, v in HI.items() if k != "max_tokens"} | {"system": "s", "tools": [TOOL]}
    counted = client.post(f"{PATH}/count_tokens", json=body).json()
    assert server.worker.starts == []
    used = client.post(PATH, json={**HI, **body}).json()["usage"]
    assert counted == {"input_tokens": used["input_tokens"]}


def test_anybody_may_ask_whether_there_is_somebody(server: FakeServer) -> None:
    assert httpx.head(server.url).status_code == 200
    assert httpx.head(server.url, headers={"Host": "evil"}).status_code == 403
    assert httpx.get(server.url).status_code == 401
