"""Codex, unmodified, set up by `agentserve launch`: it answers, calls a tool, resumes, and only what is new is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentserve.cli.private_server import private_server
from tests.e2e.conftest import FLAGS
from tests.e2e.programs import GREEDY, Codex
from tests.e2e.relay import Frame, relay

pytestmark = [pytest.mark.clients, pytest.mark.slow]


def cached(usage: Frame) -> int:
    return usage["input_tokens_details"]["cached_tokens"]


def test_codex_runs_and_resumes(codex_program: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(GREEDY)
    with private_server(tmp_path / "state", flags=("--config", str(tmp_path / "settings.toml"), *FLAGS)) as server:
        server.start()
        with relay(server.target) as between:
            codex = Codex(codex_program, tmp_path / "home", between.target)
            codex.set_up()
            assert codex.run("Hello")
            (begun,) = server.target.get("/v1/sessions")["data"]
            assert codex.run("resume", "--last", "Run the command `ls`")
            (session,) = server.target.get("/v1/sessions")["data"]
            hello, called, told = between.usages
            creates = between.sent
        assert session["id"] == begun["id"]
        assert session["lineage"][: len(begun["lineage"])] == begun["lineage"]
        assert len(session["lineage"]) == 3
        # Resumed without an id: all that was asked is found by content; the template drops the thinking behind it.
        assert creates[-2].get("previous_response_id") is None
        assert cached(called) >= hello["input_tokens"]
        assert called["input_tokens"] - cached(called) < 100
        # The result of the tool goes behind what is there.
        assert creates[-1]["previous_response_id"] == session["lineage"][-2]
        assert [item["type"] for item in creates[-1]["input"]] == ["function_call_output"]
        assert cached(told) >= called["total_tokens"] - 2
        run = codex.launch("--run", "--", "exec", "--skip-git-repo-check", "Hi")
        run[run.index("--url") + 1] = server.target.url
        assert codex.finish(codex.start(run))
