"""Turns whose answer must have a form or must be a call: every API, random sampling, and nothing of the reuse lost."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from agentserve.cli.private_server import PrivateServer

PARAMETERS: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}},
            "required": ["lat"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "unit", "where"],
    "additionalProperties": False,
}
FORECAST = {"type": "function", "name": "forecast", "description": "Weather to come", "parameters": PARAMETERS}
NOTE = {"type": "function", "name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
FREE = {"type": "custom", "name": "shell"}
VALID = Draft202012Validator(PARAMETERS).is_valid


@pytest.fixture(scope="module", params=["hermes", "qwen3_xml"])
def client(request: Any, server: PrivateServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On the shared server, and on one that is told that its model speaks the other dialect."""
    headers = {"authorization": f"Bearer {server.target.token}"}
    if request.param == "hermes":
        with httpx.Client(base_url=server.target.url, headers=headers, timeout=120) as one:
            yield one
        return
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "settings.toml").write_text(f'[model]\ndialect = "{request.param}"\n')
    flags = ("--config", str(directory / "settings.toml"), "--threads", "1", "--cache-mb", "128")
    own = PrivateServer(directory / "state", flags=flags)
    own.start()
    with httpx.Client(base_url=own.target.url, headers=headers, timeout=120) as one:
        yield one
    own.stop()


def create(client: httpx.Client, **fields: Any) -> Any:
    body = {"input": "What will the weather be?", "temperature": 1.0, "seed": 1, "max_output_tokens": 400, **fields}
    return client.post("/v1/responses", json=body).json()


def calls(body: Any) -> list[Any]:
    return [item for item in body["output"] if item["type"].endswith("_call")]


@pytest.mark.parametrize("seed", range(4))
def test_a_required_strict_call_fits_its_schema(client: httpx.Client, seed: int) -> None:
    body = create(client, tools=[{**FORECAST, "strict": True}], tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert body["status"] == "completed"
    (call,) = calls(body)
    assert call["name"] == "forecast"
    assert VALID(json.loads(call["arguments"]))
    assert not [item for item in body["output"] if item["type"] == "message"]


def test_a_named_tool_is_the_one_that_is_called(client: httpx.Client) -> None:
    named = {"type": "function", "name": "note"}
    body = create(client, tools=[FORECAST, NOTE, FREE], tool_choice=named, parallel_tool_calls=False)
    assert [call["name"] for call in calls(body)] == ["note"]
    assert body["tool_choice"] == named
    body = create(client, tools=[FORECAST, FREE], tool_choice={"type": "custom", "name": "shell"}, parallel_tool_calls=False)
    (call,) = calls(body)
    assert (call["type"], call["name"]) == ("custom_tool_call", "shell")


def test_thinking_comes_before_what_is_required(client: httpx.Client) -> None:
    body = create(client, tools=[FORECAST], tool_choice="required", parallel_tool_calls=False, temperature=0.0)
    kinds = [item["type"] for item in body["output"]]
    assert kinds in (["reasoning", "function_call"], ["function_call"])
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "strict": True}
    body = create(client, text={"format": form}, temperature=0.0)
    assert [item["type"] for item in body["output"]][-1] == "message"
    assert json.loads(body["output"][-1]["content"][0]["text"]) in range(10)
    assert body["text"]["format"] == form


@pytest.mark.parametrize("seed", range(3))
def test_text_has_the_form_that_was_asked_for(client: httpx.Client, seed: int) -> None:
    quick = {"reasoning": {"effort": "none"}, "seed": seed}

    def text_of(form: dict[str, Any]) -> str:
        body = create(client, text={"format": form}, **quick)
        assert body["status"] == "completed", body
        return "".join(item["content"][0]["text"] for item in body["output"])

    assert re.fullmatch(r"\s[a-f]{3,5}/\d\s", text_of({"type": "regex", "pattern": "^ [a-f]{3,5}/[0-9]\\n$"}))
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: ("ab" | NUM){1,40} "."\nNUM: /[0-9]/'}
    assert re.fullmatch(r"(ab|\d){1,40}\.", text_of(lark))  # bounded: whatever the weights, it ends


def test_an_answer_that_is_cut_is_incomplete(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 200}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = create(client, text={"format": form}, max_output_tokens=12, reasoning={"effort": "none"})
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    tool = {**NOTE, "parameters": schema, "strict": True}
    body = create(client, tools=[tool], tool_choice="required", max_output_tokens=24, reasoning={"effort": "none"})
    assert (body["status"], calls(body)[0]["status"]) == ("incomplete", "incomplete")


def test_tools_that_may_not_be_called_cost_no_reuse(client: httpx.Client) -> None:
    question = "What is the weather in Oslo?"
    asked: dict[str, Any] = {"tools": [FORECAST], "temperature": 0.0, "agentserve": {"retain": "all"}}
    first = create(client, input=question, **asked)
    more = {**asked, "previous_response_id": first["id"], "input": "Just say it."}
    second = create(client, **more, tool_choice="none")
    assert calls(second) == []
    used = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert used >= first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 2
    third = create(client, **{**more, "previous_response_id": second["id"]})
    whole = second["usage"]["input_tokens"] + second["usage"]["output_tokens"]
    assert third["usage"]["input_tokens_details"]["cached_tokens"] >= whole - 2


def test_many_rules_at_once_keep_to_themselves(client: httpx.Client) -> None:
    async def ask(letter: str, seed: int) -> str:
        form = {"type": "regex", "pattern": f"{letter}{{5,9}}"}
        body = {"input": "x", "text": {"format": form}, "reasoning": {"effort": "none"}, "seed": seed, "temperature": 1.0}
        reply = await shared.post("/v1/responses", json=body)
        return reply.json()["output"][0]["content"][0]["text"]

    async def all_of_them() -> list[str]:
        nonlocal shared
        async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=120) as shared:
            return await asyncio.gather(*(ask(letter, i) for i, letter in enumerate("abcdef")))

    shared: Any = None
    for letter, text in zip("abcdef", asyncio.run(all_of_them()), strict=True):
        assert re.fullmatch(f"{letter}{{5,9}}", text)


def test_a_client_that_leaves_stops_a_constrained_answer(client: httpx.Client) -> None:
    form = {"type": "regex", "pattern": "(ab)*c{100000}"}
    endless = {
        "input": "x",
        "text": {"format": form},
        "reasoning": {"effort": "none"},
        "max_output_tokens": 30_000,
        "stream": True,
    }
    with client.stream("POST", "/v1/responses", json={**endless, "max_output_tokens": 30_000}) as reply:
        deltas = (line for line in reply.iter_lines() if "output_text.delta" in line)
        assert next(deltas)
    one = create(client, text={"format": {"type": "regex", "pattern": "ok"}}, reasoning={"effort": "none"})
    assert one["output"][0]["content"][0]["text"] == "ok"


def test_chat_completions(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS, "strict": True}}
    ask = {"messages": [{"role": "user", "content": "Weather?"}], "temperature": 1.0, "seed": 3, "max_tokens": 400}
    named = {"type": "function", "function": {"name": "forecast"}}
    body = {**ask, "tools": [tool], "tool_choice": named, "parallel_tool_calls": False}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert VALID(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]))
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"enum": ["a", "b"]}}}
    body = {**ask, "response_format": form, "chat_template_kwargs": {"enable_thinking": False}}
    said = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert json.loads(said) in ("a", "b")
    form["json_schema"] = {"name": "n", "strict": True, "schema": {"properties": {"a": {"not": {}}}}}
    error = client.post("/v1/chat/completions", json={**ask, "response_format": form}).json()["error"]
    assert error["param"] == "response_format.json_schema.schema.properties.a.not"


def test_messages(client: httpx.Client) -> None:
    tool = {"name": "forecast", "input_schema": PARAMETERS, "strict": True}
    ask = {"messages": [{"role": "user", "content": "Weather?"}], "temperature": 1.0, "max_tokens": 400}
    for choice in ({"type": "any"}, {"type": "tool", "name": "forecast"}):
        body = {**ask, "tools": [tool], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        answer = client.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] == "tool_use"
        assert VALID(answer["content"][-1]["input"])
    form = {"type": "json_schema", "schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}}
    said = client.post("/v1/messages", json={**ask, "output_config": {"format": form}}).json()["content"][-1]["text"]
    assert all(isinstance(value, bool) for value in json.loads(said))
