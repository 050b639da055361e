"""What stays of a session that an unmodified SDK ran: one line of turns, and each of them computed only what was new in it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from agentserve.cli.private_server import PrivateServer
from tests.e2e.test_other_apis import DESCRIPTION, QUESTION, SCHEMA, session_that_ends_with

pytestmark = pytest.mark.clients

MCP_SERVER = Path(__file__).parents[2] / "examples" / "mcp_server.py"
TOOL: Any = {"type": "function", "name": "get_weather", "description": DESCRIPTION, "parameters": SCHEMA}
RESULT = '{"condition": "cloudy", "temperature_c": 17}'
LANES = 8


def one_line(server: PrivateServer, ids: list[str]) -> None:
    """These responses are a session of their own, and each went on where the one before it had ended."""
    session = session_that_ends_with(server, ids[-1])
    assert (session["turns"], session["lineage"]) == (len(ids), ids)
    usages = [server.target.get(f"/v1/responses/{one}")["usage"] for one in ids]
    for before, after in pairwise(usages):
        assert after["input_tokens_details"]["cached_tokens"] >= before["total_tokens"] - 2, "the answer's last token or two"


@pytest.fixture
async def client(server: PrivateServer) -> AsyncIterator[Any]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=server.target.url + "/v1", api_key=server.target.token, max_retries=0) as one:
        yield one


async def test_eight_lanes_of_one_socket_each_run_a_tool_loop(server: PrivateServer, client: Any) -> None:
    from openai.lib.responses_websocket import (
        AsyncResponsesWebSocketSession,
        ResponsesWebSocketAccumulator,
        ResponsesWebSocketLimits,
    )

    limits = ResponsesWebSocketLimits(
        max_lanes=LANES + 1,
        max_events_per_lane=2048,
        max_events=16_384,
        max_bytes_per_lane=1 << 22,
        max_bytes=1 << 25,
        max_response_bytes=None,
    )
    cities = ("Porto", "Vienna", "Dublin", "Prague", "Athens", "Zurich", "Naples", "Seville")

    async def converse(session: Any, city: str) -> list[Any]:
        lane = session.lane(f"lane.{city}")
        asked: dict[str, Any] = {"input": QUESTION.format(city), "prompt_cache_key": f"lanes-{city}"}
        made: list[Any] = []
        for _ in range(2):
            await lane.send({"type": "response.create", "model": "demo", "tools": [TOOL], "temperature": 0, **asked})
            accumulator = ResponsesWebSocketAccumulator()
            while accumulator.snapshot().terminal_type is None:
                event = await lane.recv()
                assert event.stream_id == f"lane.{city}"
                accumulator.add_event(event)
            response = accumulator.get_final_response()
            outputs = [
                {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
                for item in response.output
                if item.type == "function_call"
            ]
            asked = {"input": outputs, "previous_response_id": response.id}
            made.append(response)
        return made

    async with (
        client.responses.connect(websocket_connection_options={"max_size": None}) as connection,
        AsyncResponsesWebSocketSession(connection, limits=limits) as session,
    ):
        conversations = await asyncio.gather(*(converse(session, city) for city in cities))
    for city, (called, told) in zip(cities, conversations, strict=True):
        (call,) = [item for item in called.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"city": city}
        assert "17" in told.output_text
        one_line(server, [called.id, told.id])


async def test_a_stream_goes_on_from_a_response(server: PrivateServer, client: Any) -> None:
    asked: dict[str, Any] = {"input": QUESTION.format("Turin"), "prompt_cache_key": "sse"}
    ids: list[str] = []
    response: Any = None
    for _ in range(2):
        async with client.responses.stream(model="demo", tools=[TOOL], temperature=0, **asked) as stream:
            async for _event in stream:
                pass
            response = await stream.get_final_response()
        outputs = [i for i in response.output if i.type == "function_call"]
        told = [{"type": "function_call_output", "call_id": i.call_id, "output": RESULT} for i in outputs]
        asked = {"input": told, "previous_response_id": response.id}
        ids.append(response.id)
    assert "17" in response.output_text
    one_line(server, ids)


async def test_parse_gives_an_object_of_the_asked_type(server: PrivateServer, client: Any) -> None:
    from pydantic import BaseModel

    class Reading(BaseModel):
        city: str
        sky: Literal["clear", "cloudy", "rain"]
        degrees: int

    first = await client.responses.parse(
        model="demo", input="Report the weather of Graz.", text_format=Reading, prompt_cache_key="parse"
    )
    second = await client.responses.parse(
        model="demo", input="And of Linz?", text_format=Reading, previous_response_id=first.id
    )
    for response in (first, second):
        assert isinstance(response.output_parsed, Reading)
    session = session_that_ends_with(server, second.id)
    assert session["lineage"] == [first.id, second.id]
    # Thinking is dropped when the user speaks again, so that the asked part is what can be the same.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("websocket", [False, True])
async def test_the_agents_sdk_follows_its_own_responses(
    server: PrivateServer, client: Any, websocket: bool, streamed: bool
) -> None:
    from agents import Agent, ModelSettings, RunConfig, Runner, function_tool, set_tracing_disabled
    from agents.models.openai_provider import OpenAIProvider

    set_tracing_disabled(True)
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the current weather of a city"""
        asked.append(city)
        return RESULT

    city = (("Genoa", "Milan"), ("Basel", "Ghent"))[websocket][streamed]
    provider = OpenAIProvider(openai_client=client, use_responses=True, use_responses_websocket=websocket)
    agent = Agent(name="A", model="demo", tools=[get_weather], model_settings=ModelSettings(temperature=0.0))
    options: Any = {"run_config": RunConfig(model_provider=provider), "auto_previous_response_id": True}
    if streamed:
        running = Runner.run_streamed(agent, QUESTION.format(city), **options)
        kinds = [event.type async for event in running.stream_events()]
        assert "raw_response_event" in kinds
        result: Any = running
    else:
        result = await Runner.run(agent, QUESTION.format(city), **options)
    await provider.aclose()
    assert asked == [city]
    assert "17" in str(result.final_output)
    one_line(server, [response.response_id for response in result.raw_responses])


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
async def test_a_langgraph_agent_calls_a_tool(server: PrivateServer, responses: bool) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
    from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

    @tool
    def get_weather(city: Annotated[str, "name of the city"]) -> str:
        """Get the current weather of a city"""
        return RESULT

    city = "Malmo" if responses else "Bergen"
    async with DefaultAsyncHttpxClient() as http:  # its own is kept for the whole process
        with DefaultHttpxClient() as unused:
            model = ChatOpenAI(
                model="demo",
                base_url=server.target.url + "/v1",
                api_key=server.target.token,  # pyright: ignore[reportArgumentType]
                temperature=0,
                max_retries=0,
                use_responses_api=responses,
                default_headers={"session-id": f"langgraph-{city}"},
                http_async_client=http,
                http_client=unused,
            ).bind_tools([get_weather])

            async def think(state: MessagesState) -> dict[str, Any]:
                return {"messages": [await model.ainvoke(state["messages"])]}

            graph = StateGraph(MessagesState)
            graph.add_node("model", think)
            graph.add_node("tools", ToolNode([get_weather]))
            graph.add_edge(START, "model")
            graph.add_conditional_edges("model", tools_condition)
            graph.add_edge("tools", "model")
            asked: Any = {"messages": [("user", QUESTION.format(city))]}
            told = (await graph.compile().ainvoke(asked))["messages"]
    assert [message.type for message in told] == ["human", "ai", "tool", "ai"]
    assert told[1].tool_calls[0]["args"] == {"city": city}
    assert "17" in told[3].text
    ids = [message.response_metadata["id"].replace("chatcmpl-", "resp_") for message in (told[1], told[3])]
    session = session_that_ends_with(server, ids[1])
    assert session["lineage"] == ids
    first, second = (server.target.get(f"/v1/responses/{i}")["usage"] for i in ids)
    assert second["input_tokens_details"]["cached_tokens"] >= first["input_tokens"], "all that was asked is there already"


@pytest.mark.parametrize("revision", ["legacy", "2026-07-28"], ids=["2025-11-25", "2026-07-28"])
async def test_an_mcp_server_of_either_revision_gives_its_tools(server: PrivateServer, client: Any, revision: str) -> None:
    from mcp import Client, StdioServerParameters

    command = StdioServerParameters(command=sys.executable, args=[str(MCP_SERVER)])
    ids: list[str] = []
    event: Any = None
    response: Any = None
    async with Client(command, mode=revision) as mcp, client.responses.connect() as connection:
        assert mcp.protocol_version == ("2025-11-25" if revision == "legacy" else revision)
        listed = await mcp.list_tools()
        tools = [one.model_dump(by_alias=True, mode="json", exclude_none=True) for one in listed.tools]
        asked: dict[str, Any] = {
            "input": "What is the status of order B-2207?",
            "prompt_cache_key": f"mcp-{revision}",
        }
        for _ in range(2):
            await connection.send({"type": "response.create", "model": "demo", "tools": tools, "temperature": 0, **asked})
            async for event in connection:
                if event.type in ("response.completed", "response.failed", "response.incomplete", "error"):
                    break
            response = event.response
            ids.append(response.id)
            outputs: list[Any] = []
            for call in [item for item in response.output if item.type == "function_call"]:
                result = await mcp.call_tool(call.name, json.loads(call.arguments))
                output = result.model_dump(by_alias=True, mode="json", exclude_none=True)
                outputs.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
            asked = {"input": outputs, "previous_response_id": response.id}
    assert "2026-03-09" in response.output_text
    one_line(server, ids)
