"""A session of thousands of tokens goes on after its server was stopped or killed, from what lies on disk."""

from __future__ import annotations

import pytest

from agentserve.cli.connect import AgentSocket
from agentserve.cli.private_server import PrivateServer
from tests.e2e.test_survival import body, counter, last, wait_until

ITEMS = 60
WORDS = "the lamp in the old house by the river is green and costs forty two coins today "


def cached(response: dict) -> int:
    return response["usage"]["input_tokens_details"]["cached_tokens"]


def long_session(server: PrivateServer) -> tuple[dict, int]:
    """One turn of about 4,000 tokens and one that appends; (the last response, tokens of its whole context)."""
    with AgentSocket(server.target) as socket:
        first = last(list(socket.turn(body("\n".join(f"{i}: {WORDS}" for i in range(4 * ITEMS)), temperature=0))))
        second = last(list(socket.turn(body("go on", first["id"], temperature=0))))
    usage = second["usage"]
    assert usage["input_tokens"] >= 4000
    assert cached(second) > 3900
    return second, usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL after write-back"])
def test_a_long_session_is_restored_from_disk_after_a_restart(own_server: PrivateServer, how: str) -> None:
    server = own_server
    response, known = long_session(server)
    if how == "SIGTERM":
        assert server.stop() == 0
    else:
        wait_until(lambda: counter(server.target, 'agentserve_worker_counter{name="write_back_waiting",') == 0)
        server.kill()
    server.start()
    with AgentSocket(server.target) as socket:
        events = list(socket.turn(body("and now?", response["id"], temperature=0, agentserve={"events": True})))
    after = last(events)
    assert cached(after) >= 0.99 * known
    assert next(e["restored_from"] for e in events if e.get("restored_from")) == "disk"


def test_without_a_disk_budget_nothing_is_written(start_server) -> None:
    server = start_server("--disk-cache-mb", "0")
    with AgentSocket(server.target) as socket:
        last(list(socket.turn(body("hello"))))
    assert not list(server.state_dir.glob("checkpoints/**/*.safetensors"))
