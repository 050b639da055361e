"""Give a session the tools of any MCP server.

The bridge starts an MCP server over stdio, hands its tool descriptions to the session exactly as the MCP server gives them
(`name`, `description`, `inputSchema`), runs the calls that the model makes, and returns MCP results as they are. A call that
fails, hangs or returns too much is told to the model as a failed one.

    .venv/bin/python examples/mcp_bridge.py "What is the status of order A-1041?" -- .venv/bin/python examples/mcp_server.py
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from openai import AsyncOpenAI, OpenAIError

NO_TOKEN = "set AGENTSERVE_TOKEN to the server's token, which it keeps in ~/.local/state/agentserve/token"

START_S = 30.0
"""For the MCP server to say what it has."""
CALL_S = 60.0
"""For one call."""
MOST = 100_000
"""Characters of a result. More than that fills the context of most models."""


class TurnEnded(Exception):
    """The server gave no answer; says why."""


async def run(question: str, command: list[str], base_url: str, token: str) -> str:
    """One question, as many tool calls as the model wants. Returns the final answer."""
    openai = AsyncOpenAI(base_url=base_url, api_key=token)
    model = (await openai.models.list()).data[0].id
    started = Client(StdioServerParameters(command=command[0], args=command[1:]), read_timeout_seconds=START_S)
    async with started as mcp, openai.responses.connect() as connection:
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
                output = await _called(mcp, call.name, call.arguments)
                print(f"[{call.name}({call.arguments}) -> {output['content']}]")
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
            if not items:
                return response.output_text


async def _called(mcp: Client, name: str, arguments: str) -> dict[str, Any]:
    """An MCP result. What went wrong is one too, so that the model can go on."""
    try:
        result = await mcp.call_tool(name, json.loads(arguments), read_timeout_seconds=CALL_S)
    except (MCPError, ValueError) as error:
        return _failed(str(error))
    output = result.model_dump(by_alias=True, mode="json", exclude_none=True)
    size = len(json.dumps(output))
    return output if size <= MOST else _failed(f"the result has {size} characters, at most {MOST} can be shown")


def _failed(why: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": why}], "isError": True}


async def _completed(connection: Any) -> Any:
    async for event in connection:
        if event.type == "response.completed":
            return event.response
        if event.type in ("response.failed", "response.incomplete", "error"):
            error = getattr(event, "error", None) or event.response.error or event.response.incomplete_details
            raise TurnEnded(f"the turn did not complete: {getattr(error, 'message', None) or error}")
    raise TurnEnded("the connection closed before the turn completed")


def _reasons(error: BaseException) -> str:
    """Of a group, which is how what happens beside an MCP server comes."""
    return "; ".join(map(_reasons, error.exceptions)) if isinstance(error, BaseExceptionGroup) else str(error)


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    if not sys.argv[split + 1 :]:
        sys.exit(__doc__)
    question, command = " ".join(sys.argv[1:split]), sys.argv[split + 1 :]
    url = os.environ.get("AGENTSERVE_URL", "http://127.0.0.1:8741/v1")
    token = os.environ.get("AGENTSERVE_TOKEN") or sys.exit(NO_TOKEN)
    try:
        print(asyncio.run(run(question, command, url, token)))
    except* OpenAIError as errors:
        sys.exit(f"{url}: {_reasons(errors)}")
    except* TurnEnded as errors:
        sys.exit(_reasons(errors))
    except* (MCPError, OSError) as errors:
        sys.exit(f"the MCP server {command[0]} cannot be used: {_reasons(errors)}")


if __name__ == "__main__":
    main()
