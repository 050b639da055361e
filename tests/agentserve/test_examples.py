"""Where an example cannot reach its server, it says so in a line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.fakes.server import TOKEN, FakeServer, running
from tests.fakes.text import call
from tests.fakes.worker import answer

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = [
    ["openai_tool_loop.py", "hello"],
    ["openai_agents_agent.py", "hello"],
    ["mcp_bridge.py", "hello", "--", sys.executable, str(EXAMPLES / "mcp_server.py")],
]


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "got an unknown token"}}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def shown(command: list[str], url: str) -> str:
    environment = os.environ | {"AGENTSERVE_URL": url, "AGENTSERVE_TOKEN": "x"}
    line = [sys.executable, str(EXAMPLES / command[0]), *command[1:]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_refused_token_is_told_in_a_line(command: list[str], refusing: str) -> None:
    error = shown(command, refusing)
    assert refusing in error
    assert "unknown token" in error


BREAKING = """
import os
from mcp.server.mcpserver import MCPServer
server = MCPServer("breaking")

@server.tool()
def leave() -> str:
    os._exit(3)

@server.tool()
def flood() -> str:
    return "x" * 200_000

server.run("stdio")
"""


def bridged(server: FakeServer, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"AGENTSERVE_URL": f"{server.url}/v1", "AGENTSERVE_TOKEN": TOKEN}
    line = [sys.executable, str(EXAMPLES / "mcp_bridge.py"), "hello", "--", *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.parametrize("command", [["/nonexistent/server"], [sys.executable, "-c", ""]], ids=["absent", "ends"])
def test_an_mcp_server_that_cannot_be_used_is_told_in_a_line(command: list[str]) -> None:
    with running() as server:
        done = bridged(server, *command)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith(f"the MCP server {command[0]} cannot be used: ")


@pytest.mark.parametrize(("tool", "why"), [("leave", "Connection closed"), ("flood", "characters, at most 100000")])
def test_a_call_that_an_mcp_server_does_not_survive_is_told_to_the_model(tmp_path: Path, tool: str, why: str) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING)
    with running() as server:
        server.worker.scripts.extend([answer((*call(tool, "{}"),)), answer("Sorry.")])
        done = bridged(server, sys.executable, str(tmp_path / "breaking.py"))
    assert done.returncode == 0, done.stderr
    assert why in done.stdout
    assert done.stdout.endswith("Sorry.\n")


def test_a_server_that_is_not_there_is_told_in_a_line() -> None:
    assert "http://127.0.0.1:9/v1: " in shown(COMMANDS[0], "http://127.0.0.1:9/v1")
