"""`agentserve launch`: what a client is told, that its own settings stay, and that nothing happens without being asked."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentserve.cli.main import app
from tests.fakes.server import TOKEN, FakeServer, running

FILES = {
    "codex": ".codex/agentserve.config.toml",
    "claude": ".claude/agentserve.settings.json",
    "opencode": ".config/opencode/opencode.json",
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("AGENTSERVE_", "CODEX_", "CLAUDE_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    state = tmp_path / ".local/state/agentserve"
    state.mkdir(parents=True)
    (state / "token").write_text(TOKEN + "\n")
    return tmp_path


def launch(server: FakeServer, *words: str) -> Any:
    return CliRunner().invoke(app, ["launch", "--url", server.url, *words])


def parsed(text: str, client: str) -> Any:
    return tomllib.loads(text) if client == "codex" else json.loads(text)


@pytest.mark.parametrize("client", FILES)
def test_without_being_asked_it_only_shows(server: FakeServer, home: Path, client: str) -> None:
    before = sorted(home.rglob("*"))
    done = launch(server, client)
    assert done.exit_code == 0, done.output
    shown = parsed(done.stdout, client)
    assert server.url in json.dumps(shown)
    assert "fake" in json.dumps(shown)
    assert TOKEN not in done.output
    assert FILES[client] in done.stderr
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("client", FILES)
def test_writing_keeps_what_is_there(server: FakeServer, home: Path, client: str) -> None:
    path = home / FILES[client]
    path.parent.mkdir(parents=True)
    toml, plain = '# mine\nmodel = "other"  # the old one\n[tui]\ntheme = "x"\n', '{"theme": "x", "env": {"A": "1"}}'
    mine = toml if client == "codex" else plain
    path.write_text(mine)
    path.chmod(0o640)
    done = launch(server, client, "--write")
    assert done.exit_code == 0, done.output
    now = parsed(path.read_text(), client)
    assert (now["tui"] if client == "codex" else now)["theme"] == "x"
    if client == "codex":
        assert path.read_text().startswith("# mine\n")
        assert "# the old one" in path.read_text()
        assert now["model_providers"]["agentserve"]["base_url"] == server.url + "/v1"
        assert now["model_providers"]["agentserve"]["env_key"] == "AGENTSERVE_TOKEN"
    else:
        assert now["env"]["A"] == "1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.with_name(path.name + ".before-agentserve").read_text() == mine
    assert TOKEN not in path.read_text()
    again = launch(server, client, "--write")
    assert "has it already" in again.output
    assert parsed(path.read_text(), client) == now


@pytest.mark.parametrize(
    ("client", "text"), [("codex", "a = = 1"), ("claude", "{// c\n}"), ("claude", '{"env": 5}'), ("opencode", "[]")]
)
def test_a_file_that_cannot_be_merged_is_left_as_it_is(server: FakeServer, home: Path, client: str, text: str) -> None:
    path = home / FILES[client]
    path.parent.mkdir(parents=True)
    path.write_text(text)
    done = launch(server, client, "--write")
    assert done.exit_code == 1
    assert "left as it is" in done.output.replace("\n", " ")
    assert path.read_text() == text
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("client", FILES)
def test_running_starts_the_installed_client_and_writes_nothing(
    server: FakeServer, home: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *told: started.append(told))
    monkeypatch.setenv("PATH", str(home / "bin"))
    missing = launch(server, client, "--run")
    assert missing.exit_code == 1
    assert "installs nothing" in missing.output.replace("\n", " ")
    (home / "bin").mkdir()
    (home / "bin" / client).touch(mode=0o755)
    before = sorted(home.rglob("*"))
    assert launch(server, client, "--run", "--", "exec", "hi").exit_code == 0
    ((program, command, environ),) = started
    assert (program, command[-2:]) == (str(home / "bin" / client), ["exec", "hi"])
    told = " ".join(command) + json.dumps(environ)
    assert server.url in told
    assert TOKEN not in " ".join(command), "other users see a process's arguments"
    assert TOKEN in environ.values()
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("emacs --url URL", 2, "accepted: codex, claude, opencode"),
        ("codex --url URL -- x", 2, "only with --run"),
        ("codex --url URL --token wrong", 1, "401"),
        ("codex --url http://127.0.0.1:9", 1, "Start one with: agentserve serve"),
    ],
)
def test_what_is_wrong_is_said(server: FakeServer, home: Path, words: str, status: int, said: str) -> None:
    done = CliRunner().invoke(app, ["launch", *words.replace("URL", server.url).split()])
    assert done.exit_code == status, done.output
    assert said in done.output.replace("\n", " ")
