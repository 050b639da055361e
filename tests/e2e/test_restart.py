"""A session of thousands of tokens goes on after its server was stopped or killed, from what lies on disk."""

from __future__ import annotations

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


def goes_on_from_disk(server: PrivateServer, response: dict, known: int) -> tuple[dict, int]:
    """Start the server again, and go on by so much that what is known then is not what is known now."""
    server.start()
    more = "and now?\n" + "\n".join(f"{i}: {WORDS}" for i in range(20))
    with AgentSocket(server.target) as socket:
        events = list(socket.turn(body(more, response["id"], temperature=0, agentserve={"events": True})))
    after = last(events)
    assert cached(after) >= 0.99 * known
    assert next(e["restored_from"] for e in events if e.get("restored_from")) == "disk"
    return after, after["usage"]["input_tokens"] + after["usage"]["output_tokens"]


def test_a_long_session_is_restored_from_disk_after_an_end_in_order_and_after_a_kill(own_server: PrivateServer) -> None:
    server = own_server
    response, known = long_session(server)
    wait_until(lambda: counter(server.target, 'agentserve_worker_counter{name="write_back_waiting",') == 0)
    assert server.stop() == 0
    response, longer = goes_on_from_disk(server, response, known)
    assert 0.99 * longer > known, "what the first server wrote would do after the kill"
    wait_until(lambda: counter(server.target, 'agentserve_worker_counter{name="write_back_waiting",') == 0)
    server.kill()
    goes_on_from_disk(server, response, longer)


def test_without_a_disk_budget_nothing_is_written(rambling: PrivateServer) -> None:
    with AgentSocket(rambling.target) as socket:
        last(list(socket.turn(body("hello"))))
    assert not list(rambling.state_dir.glob("checkpoints/**/*.safetensors"))
