"""`agentserve doctor` beside a server that runs: its own is asked how it is, another one is named as what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentserve.cli.main import app
from tests.fakes.server import OTHER_TOKEN, TOKEN, FakeServer, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


def doctor(server: FakeServer, state: Path, token: str | None, *flags: str) -> tuple[int, str]:
    if token is not None:
        (state / "token").write_text(token)
    line = ["doctor", "--port", str(server.port), "--state-dir", str(state), *flags]
    environment = {"AGENTSERVE_MODEL_NAME": "fake", "COLUMNS": "200", "TERM": "dumb", "AGENTSERVE_TOKEN": None}
    shown = CliRunner().invoke(app, line, env=environment)
    return shown.exit_code, shown.output


def test_doctor_checks_its_own_running_server(server: FakeServer, tmp_path: Path) -> None:
    status, shown = doctor(server, tmp_path, TOKEN)
    assert status == 0, shown
    assert f"ok  address: 127.0.0.1:{server.port} is taken by this server, which runs" in shown
    assert "ok  server: ready (fake, up to 100000 tokens)" in shown
    assert "ok  served models: fake" in shown
    assert "saved states: ram 4 KiB of 1 GiB" in shown
    assert " memory: " not in shown, "its weights are in memory already"


def test_doctor_says_what_its_own_server_lacks(server: FakeServer, tmp_path: Path) -> None:
    server.worker.ready = False
    status, shown = doctor(server, tmp_path, TOKEN, "--model", "/nowhere/else", "--brief")
    assert "warn  server: starting" in shown
    assert "address" not in shown
    server.worker.failure = "the weights are torn"  # pyright: ignore[reportAttributeAccessIssue]
    status, shown = doctor(server, tmp_path, TOKEN, "--brief")
    assert (status, "fail  server: failed: the weights are torn" in shown) == (1, True), shown


def test_a_server_of_other_models_is_to_be_restarted(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[[models]]\nname = "fake"\ndir = ""\n[[models]]\nname = "more"\ndir = ""\n')
    _, shown = doctor(server, tmp_path, TOKEN, "--config", str(tmp_path / "settings.toml"))
    assert "warn  served models: it serves fake, the settings name more" in shown


@pytest.mark.parametrize(("token", "own"), [(None, False), ("wrong", False), (OTHER_TOKEN, True)])
def test_another_server_at_the_address_is_told_from_its_own(
    server: FakeServer, tmp_path: Path, token: str | None, own: bool
) -> None:
    status, shown = doctor(server, tmp_path, token)
    if own:  # a token of another principal is the server's too; the tiers are shown to its owner only
        assert (status, "warn  saved states: " in shown) == (0, True), shown
        return
    assert status == 1
    assert f"fail  address: 127.0.0.1:{server.port} cannot be taken" in shown
    assert "another server, which does not take the token of these settings" in shown
