"""Unmodified client libraries against a running server (the model is scripted)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.canonical import check
from tests.fakes.server import TOKEN, FakeServer, running
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer

pytestmark = pytest.mark.clients

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALLING = (*think("look it up"), *call("get_weather", '{"city": "Paris"}'))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


@pytest.fixture
async def client(server: FakeServer) -> Any:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as one:
        yield one


async def test_openai_connection_runs_a_tool_loop(server: FakeServer, client: Any) -> None:
    from openai.lib.responses_websocket import ResponsesWebSocketAccumulator

    server.worker.scripts.extend([answer(CALLING), answer("It is sunny.")])
    async with client.responses.connect() as connection:
        follow: dict[str, Any] = {"input": "Weather in Paris?"}
        for _ in range(2):
            await connection.send({"type": "response.create", "model": "fake", "tools": [TOOL], **follow})
            accumulator, events = ResponsesWebSocketAccumulator(), []
            async for event in connection:
                accumulator.add_event(event)
                events.append(json.loads(event.to_json(exclude_unset=True)))
                if event.type in TERMINAL:
                    break
            check(events)
            response = accumulator.get_final_response()
            assert accumulator.snapshot().terminal_type == "response.completed"
            calls = [item for item in response.output if item.type == "function_call"]
            outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in calls]
            follow = {"previous_response_id": response.id, "input": outputs}
    assert response.output_text == "It is sunny."
    assert response.usage is not None
    assert response.usage.total_tokens > 0


async def test_openai_session_runs_eight_lanes(server: FakeServer, client: Any) -> None:
    from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits

    limits = ResponsesWebSocketLimits(
        max_lanes=9,
        max_events_per_lane=512,
        max_events=4096,
        max_bytes_per_lane=1 << 22,
        max_bytes=1 << 24,
        max_response_bytes=None,
    )
    async with (
        client.responses.connect(websocket_connection_options={"max_size": None}) as connection,
        AsyncResponsesWebSocketSession(connection, limits=limits) as session,
    ):

        async def converse(name: str) -> str:
            lane = session.lane(name)
            for _ in range(3):
                await lane.send({"type": "response.create", "model": "fake", "input": name})
                response = await lane.get_final_response()
            return response.output_text

        answers = await asyncio.gather(*(converse(f"lane-{i}") for i in range(8)))
    assert answers == ["Hello there"] * 8
    assert len(server.worker.starts) == 24


async def test_openai_session_reports_a_refusal_on_its_lane(client: Any) -> None:
    from openai.lib.responses_websocket import (
        AsyncResponsesWebSocketSession,
        ResponsesWebSocketError,
        ResponsesWebSocketLimits,
    )

    limits = ResponsesWebSocketLimits(
        max_lanes=4, max_events_per_lane=64, max_events=256, max_bytes_per_lane=1 << 20, max_bytes=1 << 22
    )
    async with (
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=limits) as session,
    ):
        lane = session.lane("a")
        await lane.send({"type": "response.create", "model": "fake", "previous_response_id": "resp_0", "input": "x"})
        with pytest.raises(ResponsesWebSocketError) as refused:
            await lane.get_final_response()
        assert refused.value.event.error.code == "previous_response_not_found"


async def test_openai_stream_builds_snapshots(server: FakeServer, client: Any) -> None:
    server.worker.scripts.append(answer((*think("hm"), *ids_of("Hello you"))))
    async with client.responses.stream(model="fake", input="hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello you"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


async def test_openai_parse_reads_tool_arguments(server: FakeServer, client: Any) -> None:
    server.worker.scripts.append(answer(CALLING))
    parsed = await client.responses.parse(model="fake", input="Weather in Paris?", tools=[TOOL])
    (only,) = [item for item in parsed.output if item.type == "function_call"]
    assert only.parsed_arguments == {"city": "Paris"}


async def test_openai_reads_lists_and_deletes(client: Any) -> None:
    made = await client.responses.create(model="fake", input="hi")
    assert made.output_text == "Hello there"
    assert (await client.responses.retrieve(made.id)).id == made.id
    items = [item async for item in client.responses.input_items.list(made.id)]
    assert [item.content[0].text for item in items] == ["hi"]
    assert [m.id async for m in client.models.list()] == ["fake"]
    await client.responses.delete(made.id)


async def test_openai_sees_its_own_exception_types(server: FakeServer, client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="gpt-9", input="hi")
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="fake", input="hi", previous_response_id="resp_0")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.create(model="fake", input="hi")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_openai_agents_run_a_tool(server: FakeServer, client: Any, streamed: bool, transport: str) -> None:
    import agents
    from agents.models.openai_responses import OpenAIResponsesModel

    agents.set_tracing_disabled(True)
    seen: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        seen.append(city)
        return "sunny"

    if transport == "websocket":
        model = agents.OpenAIResponsesWSModel(model="fake", openai_client=client)
    else:
        model = OpenAIResponsesModel(model="fake", openai_client=client)
    server.worker.scripts.extend([answer(CALLING), answer("It is sunny.")])
    agent = agents.Agent(name="weather", instructions="Use the tool.", tools=[get_weather], model=model)
    if streamed:
        result: Any = agents.Runner.run_streamed(agent, "Weather in Paris?", auto_previous_response_id=True)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(agent, "Weather in Paris?")
    assert result.final_output == "It is sunny."
    assert seen == ["Paris"]
    sessions = await server.store.sessions("default", 10, None)
    assert len(sessions) == 1
    assert sessions[0].turns == 2
    close = getattr(model, "close", None)
    if close is not None:
        await close()
