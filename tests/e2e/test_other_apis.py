"""Chat Completions and Messages against a running server, by unmodified SDKs; what was said comes back and is reused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.cli.private_server import PrivateServer

pytestmark = pytest.mark.clients

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIPTION = "Get the current weather of a city"
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": DESCRIPTION, "parameters": SCHEMA}}
RESULT = json.dumps({"condition": "cloudy", "temperature_c": 17})
GREEDY = {"temperature": 0}
"""The anthropic package has no keyword for it any more; the field is still part of the API."""
QUESTION = "What is the weather in {}?"


def session_that_ends_with(server: PrivateServer, response_id: str) -> Any:
    (found,) = [s for s in server.target.get("/v1/sessions?limit=100")["data"] if s["last_response"] == response_id]
    return found


def suffix_starts_at(server: PrivateServer, before: str, after: str) -> None:
    """What was restored for `after` is the whole context of `before`, its answer included but for its last token or two."""
    first = server.target.get(f"/v1/responses/{before}")["usage"]
    second = server.target.get(f"/v1/responses/{after}")["usage"]
    whole = first["input_tokens"] + first["output_tokens"]
    assert whole - 2 <= second["input_tokens_details"]["cached_tokens"] <= whole


@pytest.fixture
def openai_client(server: PrivateServer) -> Any:
    from openai import OpenAI

    with OpenAI(base_url=server.target.url + "/v1", api_key=server.target.token, max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(server: PrivateServer) -> Any:
    from anthropic import Anthropic

    with Anthropic(base_url=server.target.url, api_key=server.target.token, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
def test_the_openai_chat_client_runs_a_tool_loop(server: PrivateServer, openai_client: Any, streamed: bool) -> None:
    city = "Madrid" if streamed else "Oslo"
    messages: list[Any] = [{"role": "user", "content": QUESTION.format(city)}]
    made: list[Any] = []
    for _ in range(2):
        asked: dict[str, Any] = {"model": "demo", "messages": messages, "tools": [WEATHER], "temperature": 0}
        asked["extra_headers"] = {"session-id": f"chat-{city}"}  # others ask the server the same questions
        if streamed:
            with openai_client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                kinds = {event.type for event in stream}
                completion = stream.get_final_completion()
            assert "chunk" in kinds
        else:
            completion = openai_client.chat.completions.create(**asked)
        made.append(completion)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": RESULT} for c in message.tool_calls or ()]
    first, second = made
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(first.choices[0].message.tool_calls[0].function.arguments) == {"city": city}
    assert second.choices[0].finish_reason == "stop"
    assert "17" in second.choices[0].message.content
    ids = [c.id.replace("chatcmpl-", "resp_") for c in made]
    suffix_starts_at(server, *ids)
    session = session_that_ends_with(server, ids[1])
    assert (session["turns"], session["lineage"]) == (2, ids)


@pytest.mark.parametrize("thinking", [False, True])
def test_the_anthropic_client_streams_a_tool_loop(server: PrivateServer, anthropic_client: Any, thinking: bool) -> None:
    city = "Lisbon" if thinking else "Berlin"
    tool = {"name": "get_weather", "description": DESCRIPTION, "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 2048, "tools": [tool], "extra_body": GREEDY}
    asked["extra_headers"] = {"x-claude-code-session-id": f"messages-{city}"}
    if thinking:
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    messages: list[Any] = [{"role": "user", "content": QUESTION.format(city)}]
    made: list[Any] = []
    for _ in range(2):
        counted = anthropic_client.messages.count_tokens(
            **{k: v for k, v in asked.items() if k in ("model", "tools", "thinking")}, messages=messages
        )
        with anthropic_client.messages.stream(**asked, messages=messages) as stream:
            for _event in stream:
                pass
            message = stream.get_final_message()
        made.append(message)
        assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": RESULT, "cache_control": {"type": "ephemeral"}}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
    first, second = made
    assert [b.type for b in first.content][-1] == first.stop_reason == "tool_use"
    assert first.content[-1].input == {"city": city}
    assert ("thinking" in {b.type for b in first.content}) == thinking
    assert second.stop_reason == "end_turn"
    assert "17" in next(b.text for b in second.content if b.type == "text")
    ids = [m.id.replace("msg_", "resp_") for m in made]
    suffix_starts_at(server, *ids)
    session = session_that_ends_with(server, ids[1])
    assert (session["turns"], session["lineage"]) == (2, ids)


def test_a_stop_sequence_ends_the_answer(anthropic_client: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    whole = anthropic_client.messages.create(model="demo", max_tokens=256, messages=messages, extra_body=GREEDY).content[0].text
    stop = whole[3:6]
    cut = anthropic_client.messages.create(
        model="demo", max_tokens=256, messages=messages, extra_body=GREEDY, stop_sequences=[stop]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole[: whole.index(stop)]


def test_the_sdks_raise_their_own_errors(server: PrivateServer, openai_client: Any, anthropic_client: Any) -> None:
    import anthropic
    import openai

    image: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        openai_client.chat.completions.create(model="demo", messages=[{"role": "user", "content": image}])
    block: Any = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        anthropic_client.messages.create(model="demo", max_tokens=8, messages=[{"role": "user", "content": block}])
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="other", max_tokens=8, messages=[{"role": "user", "content": "x"}])
    long = [{"role": "user", "content": "word " * 200_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        anthropic_client.messages.create(model="demo", max_tokens=8, messages=long)
    stranger = anthropic.Anthropic(base_url=server.target.url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="demo", max_tokens=8, messages=[{"role": "user", "content": "x"}])
