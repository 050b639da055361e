"""An agent of the OpenAI Agents SDK on this server, over WebSocket.

.venv/bin/python examples/openai_agents_agent.py "What is the weather in Lisbon?"
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import Agent, ModelSettings, RunConfig, Runner, function_tool, set_tracing_disabled
from agents.models.openai_provider import OpenAIProvider
from openai import AsyncOpenAI, OpenAIError

NO_TOKEN = "set AGENTSERVE_TOKEN to the server's token, which it keeps in ~/.local/state/agentserve/token"


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: name of the city
    """
    return f'{{"city": "{city}", "condition": "sunny", "temperature_c": {18 + len(city) % 9}}}'


async def main(question: str, base_url: str, token: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=token)
    provider = OpenAIProvider(openai_client=client, use_responses=True, use_responses_websocket=True)
    agent = Agent(
        name="Assistant",
        instructions="You are a helpful assistant.",
        model=(await client.models.list()).data[0].id,
        tools=[get_weather],
        model_settings=ModelSettings(temperature=0.0),
    )
    result = Runner.run_streamed(agent, question, run_config=RunConfig(model_provider=provider), auto_previous_response_id=True)
    async for event in result.stream_events():
        if event.type == "run_item_stream_event":
            print(f"[{event.name}]")
    print(result.final_output)


if __name__ == "__main__":
    url = os.environ.get("AGENTSERVE_URL", "http://127.0.0.1:8741/v1")
    asked = " ".join(sys.argv[1:]) or "What is the weather in Lisbon?"
    try:
        asyncio.run(main(asked, url, os.environ.get("AGENTSERVE_TOKEN") or sys.exit(NO_TOKEN)))
    except OpenAIError as error:
        sys.exit(f"{url}: {error}")
