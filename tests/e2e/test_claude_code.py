"""Claude Code, unmodified, against a running server: it calls a tool, goes on in a second run, and its context is reused.

It gets a home of its own, no other settings, a short
system prompt and one tool, since the embedded model's context is too small for the usual ones.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentserve.cli.private_server import PrivateServer, private_server
from tests.e2e.conftest import FLAGS
from tests.e2e.programs import GREEDY

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def ask(claude: str, server: PrivateServer, place: Path, *arguments: str) -> dict[str, Any]:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "ANTHROPIC_BASE_URL": server.target.url,
        "ANTHROPIC_API_KEY": str(server.target.token),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [
        claude,
        *arguments,
        "--output-format",
        "json",
        "--tools",
        "Read",
        "--system-prompt",
        "You are a helpful assistant.",
    ]
    done = subprocess.run(
        command, cwd=place, env=environ, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_claude_code_runs_and_goes_on(claude_program: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(GREEDY)
    home = tmp_path / "home"
    home.mkdir()
    with private_server(tmp_path / "state", flags=("--config", str(tmp_path / "settings.toml"), *FLAGS)) as server:
        server.start()
        first = ask(claude_program, server, home, "-p", "Hello")
        second = ask(claude_program, server, home, "-c", "-p", "What is 2 + 3?")
        assert [run["is_error"] for run in (first, second)] == [False, False]
        assert second["result"]
        (session,) = server.target.get("/v1/sessions")["data"]
        assert session["turns"] >= 2
        assert len(session["lineage"]) >= 2
        # The model may have called the tool first. Then thinking stands in front of the call, and of all that comes after it.
        begun = server.target.get(f"/v1/responses/{session['lineage'][0]}")["usage"]["input_tokens"]
        assert second["usage"]["cache_read_input_tokens"] >= begun, "the template drops the thinking behind it, no more"
        if len(session["lineage"]) == 2:
            assert second["usage"]["input_tokens"] < 100
        items = server.target.get(f"/v1/responses/{session['last_response']}/input_items?order=asc&limit=100")["data"]
        said = [i for i in items if i["type"] == "message" and i["role"] == "user"]
        assert said[-1]["content"][0]["text"] == "What is 2 + 3?"
        assert any(i["type"] == "reasoning" for i in items), "what the model thought came back"
