"""A command that was called wrongly says so in a line or two that name the thing, and never with a traceback."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentserve.cli.chat import SHOWN_LINES, clipped, show_events
from agentserve.cli.main import app


class Stranger(BaseHTTPRequestHandler):
    """Some other program that listens where a server was expected."""

    def do_GET(self) -> None:
        body = b'{"error": {"message": "got an unknown token"}}' if self.headers.get("authorization") else b"<html>"
        self.send_response(401 if self.headers.get("authorization") else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


WRONG = [
    ("serve --state-dir ''", "Invalid value for '--state-dir': is empty"),
    ("serve --model ''", "Invalid value for '--model' / '-m': is empty"),
    ("doctor --config ''", "Invalid value for '--config' / '-c': is empty"),
    ("chat --tools ''", "Invalid value for '--tools': is empty"),
    ("chat --tools /nowhere", "Invalid value for '--tools': /nowhere: no such directory"),
    ("chat --url localhost:8741 --once x", "--url must begin with http:// or https://, got 'localhost:8741'"),
    ("chat --url http://[::1 --once x", "--url 'http://[::1': Invalid IPv6 URL"),
    ("cache quota --url http://127.0.0.1:no", "--url 'http://127.0.0.1:no': Port could not be cast"),
    ("chat --url http://127.0.0.1:9 --once x", "no server at http://127.0.0.1:9: Connection refused"),
    ("chat --url http://127.0.0.1:9 --once x", "Start one with: agentserve serve"),
    ("memory --url http://127.0.0.1:9", "no server at http://127.0.0.1:9: Connection refused\nIs it running?"),
    ("chat --url STRANGER --once x", "STRANGER does not answer as a server does"),
    ("chat --url STRANGER --token bad --once x", "answered 401: got an unknown token\nThe token is printed"),
    ("chat --temperature 9 --once x", "less than or equal to 2"),
    ("demo --keep /dev/null/x", "cannot use /dev/null/x: Not a directory"),
    ("migrate --database-url mysql://u@h/d", "sqlite and postgresql are"),
    ("migrate --database-url nonsense", "Could not parse"),
    ("cache gc --unused-days -1", "greater than or equal to 0"),
    ("cache verify --state-dir /nowhere", "--state-dir /nowhere: no such directory"),
    ("cache rebuild --state-dir /nowhere", "--state-dir /nowhere: no such directory"),
    ("migrate --state-dir /dev/null/x", "/dev/null/x: Not a directory"),
    ("serve --port 99999", "server.port: Expected `int` <= 65535, got 99999"),
    ("serve --model /nowhere", "/nowhere"),
    ("serve --config /nowhere.toml", "/nowhere.toml"),
    ("serve --host 0.0.0.0 --no-auth", "server.host must be loopback"),
    ("calibrate --model /nowhere", "/nowhere: config.json is missing"),
    (
        "doctor --brief --database-url mysql://u@h/d",
        "database: mysql://u@h/d: 'mysql' is not supported; sqlite and postgresql are",
    ),
    ("doctor --brief --database-url postgresql://u@127.0.0.1:9/d", "u@127.0.0.1:9/d: connection failed"),
    ("memory --slots 3 --percent 3", "give --slots or --percent, not both"),
    ("doctor --device tpu", "No such option"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_wrong_use_is_told_in_a_line(line: str, message: str, stranger: str, tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path), "COLUMNS": "200", "TERM": "dumb", "AGENTSERVE_TOKEN": None}
    result = CliRunner().invoke(app, shlex.split(line.replace("STRANGER", stranger)), env=environment)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    assert message.replace("STRANGER", stranger) in result.output
    assert len(result.output.splitlines()) <= 6


def test_help_names_what_is_to_be_repeated_and_not_its_python_type() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert shown.exit_code == 0
    assert "list[" not in shown.output


def test_the_version_is_told() -> None:
    assert re.match(r"agentserve(, run from its source| \d+\.\d+\.\d+$)", CliRunner().invoke(app, ["--version"]).output)


def test_a_variable_without_a_meaning_is_named(tmp_path: Path) -> None:
    flags = ["doctor", "--brief", "--port", "0", "--state-dir", str(tmp_path)]
    result = CliRunner().invoke(app, flags, env={"AGENTSERVE_PROT": "1", "AGENTSERVE_URL": "http://x"})
    assert "environment: AGENTSERVE_PROT: set, and means nothing" in result.output


def test_an_installation_is_in_order_whatever_a_server_here_is_set_to(stranger: str) -> None:
    taken = {"AGENTSERVE_PORT": stranger.rsplit(":", 1)[1], "AGENTSERVE_MODEL": "/nowhere", "AGENTSERVE_TURN_TOP_P": "much"}
    assert CliRunner().invoke(app, ["doctor", "--brief"], env=taken).exit_code != 0
    alone = CliRunner().invoke(app, ["doctor", "--brief", "--installation"], env=taken)
    assert (alone.exit_code, "4 in order" in alone.output) == (0, True), alone.output


def test_doctor_names_the_dialect_and_what_is_odd_about_it(tmp_path: Path) -> None:
    flags = ["doctor", "--port", "0", "--state-dir", str(tmp_path)]
    odd = CliRunner().invoke(app, flags, env={"AGENTSERVE_MODEL_DIALECT": "glm"})
    assert "warn  dialect: glm as set; the chat template looks like hermes" in odd.output
    unknown = CliRunner().invoke(app, flags, env={"AGENTSERVE_MODEL_DIALECT": "klingon"})
    assert "fail  dialect: 'klingon' is unknown" in unknown.output
    assert "kimi_k2" in unknown.output


def test_long_tool_output_is_shown_in_part() -> None:
    lines = [str(n) for n in range(SHOWN_LINES + 3)]
    assert clipped("\n".join(lines[:SHOWN_LINES])) == "\n".join(lines[:SHOWN_LINES])
    assert clipped("\n".join(lines)) == "\n".join([*lines[:SHOWN_LINES], "… 3 more lines"])


def test_each_call_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    show = show_events(Console(width=80))
    for name in ("first", "second"):
        show({"type": "response.output_item.done", "item": {"type": "function_call", "name": name, "arguments": "{}"}})
    show({"type": "response.completed"})
    assert capsys.readouterr().out == "  first({})\n  second({})\n"


def test_a_state_directory_that_is_not_there_is_an_error_and_one_without_states_is_none(tmp_path: Path) -> None:
    run = CliRunner().invoke
    mistyped = run(app, ["cache", "ls", "--state-dir", str(tmp_path / "mistyped")])
    assert mistyped.exit_code == 2
    assert "--state-dir" in mistyped.output
    empty = run(app, ["cache", "ls", "--state-dir", str(tmp_path)])
    assert (empty.exit_code, empty.stdout) == (0, f"no saved states in {tmp_path / 'checkpoints'}\n")
