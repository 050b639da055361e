"""What survives a SIGKILL of the worker in mid-turn and of the server between turns, and that nothing stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentserve.cli.connect import TERMINAL, AgentSocket, Event, Target
from agentserve.cli.private_server import PrivateServer

Start = Callable[..., PrivateServer]


def body(text: str, previous: str | None = None, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"input": [{"role": "user", "content": text}], "max_output_tokens": 16, **more}
    return made if previous is None else {**made, "previous_response_id": previous}


def last(events: list[Event]) -> dict[str, Any]:
    assert events[-1]["type"] in TERMINAL, events[-1]
    return events[-1]["response"]


def worker_pid(server: PrivateServer) -> int:
    """The server's only child process."""
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        children = (task / "children").read_text().split()
        if children:
            return int(children[0])
    raise AssertionError("the server has no child process")


def counter(target: Target, name: str) -> float:
    request = urllib.request.Request(target.url + "/metrics", headers=target.headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def wait_until(reached: Callable[[], bool], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < until, f"not reached within {limit_s:.0f} s"
        time.sleep(0.05)


def assert_idle(target: Target) -> None:
    """The worker reports no turn, no hold and no pin."""
    for name in ("turns", "holds", "pins", "release_errors"):
        wait_until(lambda name=name: counter(target, f'agentserve_worker_counter{{name="{name}",') == 0)
    assert counter(target, "agentserve_active_responses") == 0


def test_a_killed_worker_fails_its_turn_and_the_session_goes_on(rambling: PrivateServer) -> None:
    server, restarts = rambling, counter(rambling.target, "agentserve_worker_restarts{")
    with AgentSocket(server.target) as socket:
        first = last(list(socket.turn(body("hello"))))
        pid, killed, events = worker_pid(server), False, []
        for event in socket.turn(body("go on", first["id"], max_output_tokens=4000)):
            events.append(event)
            if event["type"].endswith(".delta") and not killed:
                os.kill(pid, signal.SIGKILL)
                killed = True
        failed = last(events)
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert "worker" in failed["error"]["message"]
        # The same socket, the parent of the turn that failed: a new worker takes it up.
        again = last(list(socket.turn(body("go on", first["id"]))))
        assert again["status"] == "incomplete"
        assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert worker_pid(server) != pid
    assert counter(server.target, "agentserve_worker_restarts{") == restarts + 1
    assert_idle(server.target)


def test_a_killed_server_ends_its_worker_and_keeps_every_committed_turn(start_server: Start, rambling_model: Path) -> None:
    server = start_server("--model", str(rambling_model))
    with AgentSocket(server.target) as socket:
        first = last(list(socket.turn(body("remember this"))))
        second = last(list(socket.turn(body("and this", first["id"]))))
    pid = worker_pid(server)
    server.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    server.start()
    for response in (first, second):
        assert server.target.get(f"/v1/responses/{response['id']}")["output"] == response["output"]
    with AgentSocket(server.target) as socket:
        third = last(list(socket.turn(body("what was it", second["id"]))))
        known = second["usage"]["input_tokens"] + second["usage"]["output_tokens"]
        # Everything said before is in the new prompt, with the exact ids that were generated.
        assert third["usage"]["input_tokens"] > known
        fourth = last(list(socket.turn(body("go on", third["id"]))))
        assert fourth["usage"]["input_tokens_details"]["cached_tokens"] > known
    sessions = server.target.get("/v1/sessions")["data"]
    assert [session["turns"] for session in sessions] == [4]


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
def test_an_abandoned_turn_frees_everything(rambling: PrivateServer, how: str) -> None:
    server = rambling
    with AgentSocket(server.target) as socket:
        last(list(socket.turn(body("warm up"))))
        for event in socket.turn(body("go on and on", max_output_tokens=4000)):
            if event["type"].endswith(".delta"):
                break
        assert counter(server.target, "agentserve_active_responses") == 1
        if how == "cancel":
            socket.cancel()
            assert last(list(socket.rest()))["status"] in ("cancelled", "incomplete")
    wait_until(lambda: counter(server.target, "agentserve_active_responses") == 0)
    # The last report of an idle worker is that of its last finished turn.
    with AgentSocket(server.target) as socket:
        last(list(socket.turn(body("anybody there?"))))
    assert_idle(server.target)


def test_a_missed_deadline_fails_the_turn_by_its_name(server: PrivateServer) -> None:
    with AgentSocket(server.target) as socket:
        text = "word " * 3000
        failed = last(list(socket.turn(body(text, agentserve={"ttft_deadline_ms": 1, "on_miss": "fail"}))))
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "deadline_exceeded"
        assert "deadline was 1 ms" in failed["error"]["message"]


def test_a_bad_model_directory_is_told_by_readyz_while_the_server_answers(tmp_path: Path, rambling_model: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(rambling_model, broken)
    (broken / "model.safetensors").unlink()
    server = PrivateServer(tmp_path / "state", flags=("--model", str(broken)))
    try:
        with pytest.raises(Exception, match="safetensors"):
            server.start()
    finally:
        server.stop()
