"""Give a session the tools of any MCP server.

The bridge starts an MCP server over stdio, hands its tool descriptions to the session exactly as the MCP server gives them
(`name`, `description`, `inputSchema`), runs the calls that the model makes, and returns MCP results as they are.

    .venv/bin/python examples/mcp_bridge.py "What is the status of order A-1041?" -- .venv/bin/python examples/mcp_server.py
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from mcp import Client, StdioServerParameters
from openai import AsyncOpenAI, OpenAIError

NO_TOKEN = "set AGENTSERVE_TOKEN to the server's token, which it keeps in ~/.local/state/agentserve/token"


async def run(question: str, command: list[str], base_url: str, token: str) -> str:
    """One question, as many tool calls as the model wants. Returns the final answer."""
    openai = AsyncOpenAI(base_url=base_url, api_key=token)
    model = (await openai.models.list()).data[0].id
    async with (
        Client(StdioServerParameters(command=command[0], args=command[1:])) as mcp,
        openai.responses.connect() as connection,
    ):
        listed = await mcp.list_tools()
        tools = [tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in listed.tools]
        items: list[dict[str, Any]] = [{"role": "user", "content": question}]
        previous: dict[str, str] = {}
        while True:
            await connection.send(
                {
                    "type": "response.create",
                    "model": model,
                    "input": items,
                    "tools": tools,
                    "temperature": 0,
                    **previous,
                }  # pyright: ignore
            )
            response = await _completed(connection)
            previous = {"previous_response_id": response.id}
            items = []
            for call in (item for item in response.output if item.type == "function_call"):
                result = await mcp.call_tool(call.name, json.loads(call.arguments))
                output = result.model_dump(by_alias=True, mode="json", exclude_none=True)
                print(f"[{call.name}({call.arguments}) -> {output['content']}]")
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
            if not items:
                return response.output_text


async def _completed(connection: Any) -> Any:
    async for event in connection:
        if event.type == "response.completed":
            return event.response
        if event.type in ("response.failed", "response.incomplete", "error"):
            raise RuntimeError(f"the turn did not complete: {event}")
    raise RuntimeError("the connection closed before the turn completed")


def main() -> None:
    if "--" not in sys.argv:
        sys.exit(__doc__)
    split = sys.argv.index("--")
    question, command = " ".join(sys.argv[1:split]), sys.argv[split + 1 :]
    url = os.environ.get("AGENTSERVE_URL", "http://127.0.0.1:8741/v1")
    token = os.environ.get("AGENTSERVE_TOKEN") or sys.exit(NO_TOKEN)
    try:
        print(asyncio.run(run(question, command, url, token)))
    except OpenAIError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main()
