"""The commands as a person runs them: demo, chat, doctor, migrate, serve and their refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from agentserve.cli.chat import NO_TOOLS
from agentserve.cli.private_server import PrivateServer


def agentserve(*arguments: str, said: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentserve.cli.main", *arguments],
        input=said,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "160", **environment},
    )


def test_the_demo_runs_two_tools_over_a_restart_and_an_edit() -> None:
    shown = agentserve("demo")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    text = shown.stdout
    assert "list_files(" in text
    assert "calculate(" in text
    assert "server killed" in text
    assert "context edited" in text
    assert "docs/glossary.md" in text
    assert re.search(r"[2-9]\d* tool calls executed; [1-9]\d* of \d+ prompt tokens reused", text)
    responses = text[text.index("restored from") :]
    turns = {line.split()[0]: line for line in responses.splitlines() if re.match(r" +\d+ +\d+ +\d+ +\d+ ", line)}
    assert set(turns) == {"1", "2", "3", "4", "5"}
    assert all(re.search(r" \d+ ms (met|missed) ", line) for line in turns.values())
    assert re.search(r"^ +4 .*, disk ", responses, re.MULTILINE)  # after the kill, before anything new was saved
    # The edited context found a checkpoint.
    assert re.search(r"^ +5 .*, disk +tool_output_changed @ \d+", responses, re.MULTILINE)
    for kind in ("system", "prompt_end", "turn", "tool_result"):
        assert re.search(rf"│ {kind} +│ (device|ram|disk)", text)


def test_chat_answers_once_with_a_tool_and_tells_what_it_reused(server: PrivateServer, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    common = ("--url", server.target.url, "--token", str(server.target.token))
    shown = agentserve("chat", *common, "--tools", str(tmp_path), "--temperature", "0", "--once", "What is 12 * 12?")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "calculate(" in shown.stdout
    assert "144" in shown.stdout
    assert re.search(r"reused \d+/\d+ tokens .*first token \d+ ms \(30 s: (met|missed)\)", shown.stdout)


def test_chat_keeps_a_session_until_told_to_start_over(server: PrivateServer) -> None:
    common = ("--url", server.target.url, "--token", str(server.target.token))
    shown = agentserve("chat", *common, said="hello there\nthank you\n/new\nhello there\n/help\n/quit\n")
    assert shown.stdout.count(NO_TOOLS) == 1
    assert shown.returncode == 0, shown.stderr
    assert "new session" in shown.stdout
    reused = [int(n) for n in re.findall(r"reused (\d+)/", shown.stdout)]
    assert len(reused) == 3
    assert reused[1] > 0


def test_an_interrupt_stops_the_answer_and_not_the_chat(rambling: PrivateServer) -> None:
    # Random weights do end an answer by themselves, after two thousand tokens on average: then there was nothing to stop.
    assert any("incomplete: cancelled" in interrupted_chat(rambling) for _ in range(5))


def interrupted_chat(server: PrivateServer) -> str:
    """Say something, interrupt the answer once it has begun, leave. Returns what was shown after the interrupt."""
    common = ("--url", server.target.url, "--token", str(server.target.token))
    command = [sys.executable, "-m", "agentserve.cli.main", "chat", *common]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as process:  # pyright: ignore[reportCallIssue, reportArgumentType]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        while process.stdout.read(1) != "›":
            pass
        process.stdout.read(20)  # it has begun
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate("/quit\n", timeout=60)
        assert process.returncode == 0
    return shown


def test_chat_says_what_to_do_when_nobody_answers() -> None:
    shown = agentserve("chat", "--url", "http://127.0.0.1:9", "--once", "hello")
    assert shown.returncode == 1
    assert "agentserve serve" in shown.stderr


def test_doctor_finds_this_machine_in_order(tmp_path: Path) -> None:
    shown = agentserve("doctor", "--state-dir", str(tmp_path), "--port", "0")
    assert shown.returncode == 0, shown.stdout
    assert "0 to mend" in shown.stdout
    assert "cpu library" in shown.stdout
    assert "dialect: hermes, by chat template and tokens" in shown.stdout


def test_doctor_names_what_is_wrong_and_what_to_do(tmp_path: Path, server: PrivateServer) -> None:
    (tmp_path / "file").touch()
    flags = ("--model", str(tmp_path), "--port", str(server.port), "--state-dir", str(tmp_path / "file" / "state"))
    shown = agentserve("doctor", *flags, "--database-url", "postgresql+psycopg://nobody@127.0.0.1:9/none")
    assert shown.returncode == 1
    failed = [line for line in shown.stdout.splitlines() if line.startswith("fail")]
    assert [line.split()[1].rstrip(":") for line in failed] == ["state", "model", "address", "database"]
    assert "config.json" in shown.stdout
    assert "--port N" in shown.stdout


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_health_check_of_a_container_asks_whether_the_server_is_ready(name: str, server: PrivateServer) -> None:
    text = (Path(__file__).parents[2] / "docker" / f"Dockerfile.{name}").read_text(encoding="utf-8")
    found = re.search(r"^HEALTHCHECK [^\[]*CMD (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def asked(port: int) -> subprocess.CompletedProcess[str]:
        line = found[1].replace("8741", str(port))
        return subprocess.run(json.loads(line), env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60)

    assert asked(server.port).returncode == 0, asked(server.port).stderr
    assert "refused" in asked(9).stderr


def test_migrate_brings_an_empty_database_up_to_date_twice(tmp_path: Path) -> None:
    first = agentserve("migrate", "--state-dir", str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert "schema is at revision" in first.stdout
    assert agentserve("migrate", "--state-dir", str(tmp_path)).stdout == first.stdout
    assert (tmp_path / "sessions.db").exists()


def test_serve_shows_address_and_token_once_and_ends_cleanly(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "agentserve.cli.main",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(tmp_path),
        "--threads",
        "1",
    ]
    shown = []
    for ending in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "ready" in line:
                    break
            url = re.search(r"(http://127\.0\.0\.1:\d+)/v1", lines[0])
            assert url is not None
            with urllib.request.urlopen(url[1] + "/readyz", timeout=60) as reply:
                assert json.load(reply)["status"] == "ready"
            process.send_signal(ending)
            assert process.wait(60) == 0
        shown.append("".join(lines))
    token = (tmp_path / "token").read_text().strip()
    assert token in shown[0]
    assert token not in shown[1]
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--port", "70000"), "port"),
        (("--no-auth", "--host", "0.0.0.0"), "auth"),
        (("--log-level", "LOUD"), "level"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
    ],
)
def test_bad_settings_end_serve_with_the_name_of_the_setting(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    shown = agentserve("serve", "--state-dir", str(tmp_path), *arguments)
    assert shown.returncode == 2
    assert complaint in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.fixture(scope="module")
def overview() -> str:
    return agentserve("--help").stdout


@pytest.mark.parametrize("command", ["serve", "demo", "chat", "doctor", "migrate"])
def test_every_command_explains_itself(command: str, overview: str) -> None:
    shown = agentserve(command, "--help")
    assert shown.returncode == 0
    assert "--" in shown.stdout
    assert command in overview
