"""Unmodified clients complete a tool session against a running server: the OpenAI SDK, the Agents SDK, a real MCP server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentserve.cli.private_server import PrivateServer

pytestmark = pytest.mark.clients
ROOT = Path(__file__).parents[2]


def run_example(server: PrivateServer, *command: str) -> str:
    """The example's output; the test fails with it if the example does."""
    environ = {**os.environ, "AGENTSERVE_URL": server.target.url + "/v1", "AGENTSERVE_TOKEN": str(server.target.token)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_openai_sdk_runs_a_tool_loop_over_a_websocket(server: PrivateServer) -> None:
    output = run_example(server, "examples/openai_tool_loop.py", "What is 17 * 23?")
    assert "-> 391]" in output
    assert "391" in output.splitlines()[-2]
    assert "0 from a checkpoint" not in output.splitlines()[-1], "the second turn reused nothing"


def test_the_agents_sdk_streams_over_a_websocket(server: PrivateServer) -> None:
    output = run_example(server, "examples/openai_agents_agent.py", "What is the weather in Lisbon?")
    assert "[tool_called]" in output
    assert "[tool_output]" in output
    assert "24" in output.splitlines()[-1], "the answer names the temperature that the tool gave"


def test_an_mcp_servers_tools_reach_the_session(server: PrivateServer) -> None:
    question = "What is the status of order A-1041?"
    output = run_example(server, "examples/mcp_bridge.py", question, "--", sys.executable, "examples/mcp_server.py")
    assert 'get_order({"order_id": "A-1041"}' in output
    assert "shipped" in output.splitlines()[-1]


def test_an_openai_client_parses_every_event_and_usage(server: PrivateServer) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=server.target.url + "/v1", api_key=server.target.token)
    with client.responses.stream(model="demo", input="Hello", temperature=0) as stream:
        kinds = [event.type for event in stream]
        response: Any = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert response.output_text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    again = client.responses.retrieve(response.id)
    assert again.output_text == response.output_text
