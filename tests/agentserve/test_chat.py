"""Chat Completions over the wire (the worker is scripted): what a turn is asked, and how its answer is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.server import TOKEN, FakeServer, config_for_tests, running, stream_until, wait_for
from tests.fakes.sockets import posted
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer, failing, progress

PATH = "/v1/chat/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(config_for_tests(turn={"keepalive_s": 0.1})) as one:
        yield one


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as one:
        yield one


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as streams of this API do."""
    blocks = [b for b in text.strip().split("\n\n") if not b.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(b.removeprefix("data: ")) for b in blocks[:-1]]


def test_every_field_reaches_the_turn(server: FakeServer, client: httpx.Client) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
            {"role": "system", "content": "late"},
            {"role": "assistant", "content": "so"},
            {"role": "user", "content": "more"},
        ],
        "tools": [TOOL],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "presence_penalty": 0.5,
        "unknown": {"x": 1},
        "reasoning_effort": "none",
    }
    assert client.post(PATH, json=body).status_code == 200
    (render,) = server.text.renders
    kinds = [(getattr(i, "role", None) or type(i).__name__, getattr(i, "text", None)) for i in render.items]
    assert kinds == [
        ("developer", "be brief"),
        ("user", "ab"),
        ("Reasoning", "hm"),
        ("FunctionCall", None),
        ("FunctionCallOutput", "42"),
        ("system", "late"),
        ("assistant", "so"),
        ("user", "more"),
    ]
    assert (render.instructions, render.thinking, [t.name for t in render.tools]) == (None, False, ["f"])
    sampling = server.worker.starts[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.9, 3)
    assert sampling.presence_penalty == 0.5


def test_json_and_stream_give_the_same_answer(server: FakeServer, client: httpx.Client) -> None:
    ids = (*think("why"), *ids_of("text"), *call("f", '{"x": 1}'), *call("g", "{}"))
    server.worker.default = answer(ids, reused=5)
    whole = client.post(PATH, json={**HI, "tools": [TOOL]}).json()
    asked = {**HI, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    parts = chunks(client.post(PATH, json=asked).text)
    said = whole["choices"][0]["message"]
    assert (said["content"], said["reasoning_content"], whole["choices"][0]["finish_reason"]) == ("text", "why", "tool_calls")
    assert [c["function"] for c in said["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    deltas = [p["choices"][0]["delta"] for p in parts[:-1]]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(d.get("content") or "" for d in deltas) == "text"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "why"
    calls = [c for d in deltas for c in d.get("tool_calls", ())]
    opened = [c for c in calls if "id" in c]
    assert [(c["index"], c["function"]["name"]) for c in opened] == [(0, "f"), (1, "g")]
    assert len({c["id"] for c in opened}) == 2
    for index, arguments in enumerate(('{"x": 1}', "{}")):
        assert "".join(c["function"]["arguments"] for c in calls if c["index"] == index) == arguments
    assert [p["choices"][0]["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 2) + ["tool_calls"]
    assert {p["id"] for p in parts} == {parts[0]["id"]}
    assert all(p["usage"] is None for p in parts[:-1])
    assert (parts[-1]["choices"], parts[-1]["usage"]) == ([], whole["usage"])


def test_without_include_usage_no_chunk_speaks_of_it(client: httpx.Client) -> None:
    parts = chunks(client.post(PATH, json={**HI, "stream": True}).text)
    assert all("usage" not in p for p in parts)


def test_why_an_answer_ended(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.extend([answer("ab", reason="length"), answer("one two three")])
    assert client.post(PATH, json=HI).json()["choices"][0]["finish_reason"] == "length"
    stopped = client.post(PATH, json={**HI, "stop": [" two", "never"]}).json()
    assert (stopped["choices"][0]["message"]["content"], stopped["choices"][0]["finish_reason"]) == ("one", "stop")
    assert len(server.worker.cancelled) == 1
    assert len(server.text.learned) == 1, "what was cut off must not come back as if the client had seen it"


def test_a_stop_string_in_thinking_or_arguments_stops_nothing(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.append(answer((*think("a\nb"), *call("f", '{"x":\n1}'))))
    said = client.post(PATH, json={**HI, "tools": [TOOL], "stop": "\n"}).json()["choices"][0]["message"]
    assert (said["reasoning_content"], said["tool_calls"][0]["function"]["arguments"]) == ("a\nb", '{"x":\n1}')


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_text(server: FakeServer, client: httpx.Client, stream: bool) -> None:
    server.worker.scripts.append(answer("ab", logprobs=True))
    reply = client.post(PATH, json={**HI, "logprobs": True, "top_logprobs": 1, "stream": stream})
    assert server.worker.starts[0].sampling.logprobs == 1
    choices = [p["choices"][0] for p in chunks(reply.text)] if stream else reply.json()["choices"]
    marks = [m for c in choices if c["logprobs"] for m in c["logprobs"]["content"]]
    assert [(m["token"], m["logprob"], m["top_logprobs"][0]["token"]) for m in marks] == [("a", -0.5, "a"), ("b", -0.5, "b")]


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": None}, "invalid_value", "messages"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "invalid_value",
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "invalid_value", "messages[0].tool_calls[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "unsupported_value",
            "messages[0].content[0]",
        ),
        ({"n": 2}, "unsupported_value", "n"),
        ({"logit_bias": {"1": 2}}, "unsupported_value", "logit_bias"),
        ({"functions": [{"name": "f"}]}, "unsupported_value", "functions"),
        ({"modalities": ["audio"]}, "unsupported_value", "modalities"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"stop": ["a"] * 65}, "invalid_value", "stop"),
        ({"tools": [{"type": "function", "function": {}}]}, "invalid_value", "tools[0].function"),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
def test_a_refusal_names_the_field(client: httpx.Client, change: dict[str, Any], code: str, param: str) -> None:
    error = client.post(PATH, json={**HI, **change}).json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_a_custom_tool_keeps_its_shape(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.append(answer(call("patch", "free text")))
    tool = {"type": "custom", "custom": {"name": "patch"}}
    reply = client.post(PATH, json={**HI, "tools": [tool]}).json()
    (made,) = reply["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": "free text"})
    history = [
        *HI["messages"],
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": "ok"},
    ]
    assert client.post(PATH, json={"messages": history, "tools": [tool]}).status_code == 200
    assert server.text.renders[1].items[1].input == "free text"  # type: ignore[union-attr]


def test_a_failed_turn(server: FakeServer, client: httpx.Client) -> None:
    server.worker.scripts.extend([failing("context_length_exceeded", "why")] * 2)
    whole = client.post(PATH, json=HI)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert chunks(client.post(PATH, json={**HI, "stream": True}).text)[-1]["error"]["code"] == "context_length_exceeded"


def test_a_waiting_stream_is_kept_alive(server: FakeServer, client: httpx.Client) -> None:
    gate = asyncio.Event()
    server.worker.scripts.append(lambda start: [progress(start, queued=1), gate, *answer("ok")(start)])
    with client.stream("POST", PATH, json={**HI, "stream": True}) as reply:
        text = stream_until(reply, ": waiting\n\n", 3, lambda: server.call(gate.set))
    assert "".join(p["choices"][0]["delta"].get("content") or "" for p in chunks(text)) == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_turn(server: FakeServer, stream: bool) -> None:
    server.worker.scripts.append(lambda start: [*answer("abc")(start)[:-1], asyncio.Event()])
    with posted(server, PATH, {**HI, "stream": stream}):
        wait_for(lambda: server.worker.starts)
    wait_for(lambda: server.worker.left == [server.worker.starts[0].turn_id])
    wait_for(lambda: not server.services.active)


def test_a_conversation_is_one_session_and_its_answers_can_be_read(server: FakeServer, client: httpx.Client) -> None:
    first = client.post(PATH, json=HI).json()
    history = [*HI["messages"], first["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = client.post(PATH, json={"messages": history}).json()
    (session,) = client.get("/v1/sessions").json()["data"]
    ids = [one["id"].replace("chatcmpl-", "resp_") for one in (first, second)]
    assert (session["turns"], session["last_response"]) == (2, ids[1])
    assert client.get(f"/v1/responses/{ids[0]}").json()["output"][0]["content"][0]["text"] == "Hello there"
    client.post(PATH, json=HI, headers={"session-id": "other"})
    client.post(PATH, json={**HI, "store": False}, headers={"session-id": "third"})
    listed = {one["id"]: one["stored"] for one in client.get("/v1/sessions").json()["data"]}
    assert (len(listed), sorted(listed.values())) == (3, [False, True, True])


def test_the_guard_is_the_same(server: FakeServer, client: httpx.Client) -> None:
    assert httpx.post(server.url + PATH, json=HI).json()["error"]["code"] == "invalid_api_key"
    assert client.post(PATH, json=HI, headers={"Origin": "http://evil"}).status_code == 403
    assert client.post(PATH, json=HI, headers={"Host": "evil"}).status_code == 403
