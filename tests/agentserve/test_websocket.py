"""Turns over a real WebSocket against a scripted worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from agentserve.large import LARGE_BYTES
from tests.fakes.canonical import check
from tests.fakes.server import TOKEN, FakeServer, config_for_tests, running, wait_for
from tests.fakes.sockets import client_frame, close_code, raw_socket, read_frames
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import answer, failing, progress

AUTH = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as one:
        yield one


@pytest.fixture
def socket(server: FakeServer) -> Iterator[ClientConnection]:
    with connect(server.ws_url, additional_headers=AUTH, max_size=None) as one:
        yield one


def send(socket: ClientConnection, **frame: Any) -> None:
    socket.send(json.dumps({"type": "response.create", **frame}))


def until_terminal(socket: ClientConnection) -> list[dict[str, Any]]:
    events = []
    while True:
        events.append(json.loads(socket.recv(timeout=60)))
        if events[-1]["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
            return events


def test_a_turn_thinks_calls_and_answers_in_canonical_order(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(answer((*think("hm"), *ids_of("Sure. "), *call("f", '{"a":1}'), *call("f", "{}"))))
    send(socket, input="hi", tools=[{"type": "function", "name": "f", "parameters": {}}])
    events = until_terminal(socket)
    final = check(events)
    assert events[-1]["type"] == "response.completed"
    assert [i["type"] for i in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert final["output"][2]["arguments"] == '{"a":1}'
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert server.store.committed == [final["id"]]


def test_every_event_echoes_the_lane_and_lanes_interleave(server: FakeServer, socket: ClientConnection) -> None:
    gate = asyncio.Event()
    server.worker.scripts.append(lambda start: [gate, *answer("slow")(start)])
    server.worker.scripts.append(answer("fast"))
    send(socket, input="a", stream_id="one")
    wait_for(lambda: len(server.worker.starts) == 1)
    send(socket, input="b", stream_id="two")
    seen: dict[str, list[dict[str, Any]]] = {"one": [], "two": []}
    while not (seen["two"] and seen["two"][-1]["type"] == "response.completed"):
        event = json.loads(socket.recv(timeout=60))
        seen[event["stream_id"]].append(event)
    server.call(gate.set)
    while seen["one"][-1]["type"] != "response.completed":
        event = json.loads(socket.recv(timeout=60))
        seen[event["stream_id"]].append(event)
    assert check(seen["one"], "one")["output"][0]["content"][0]["text"] == "slow"
    assert check(seen["two"], "two")["output"][0]["content"][0]["text"] == "fast"


def test_turns_of_one_lane_run_one_after_the_other(server: FakeServer, socket: ClientConnection) -> None:
    send(socket, input="first")
    send(socket, input="second")
    first, second = until_terminal(socket), until_terminal(socket)
    assert check(first)["id"] != check(second)["id"]


def test_turns_that_wait_are_bounded_in_bytes_and_the_refused_one_can_come_again() -> None:
    gate = asyncio.Event()
    with (
        running(config_for_tests(limits={"waiting_bytes": 4000})) as small,
        connect(small.ws_url, additional_headers=AUTH, max_size=None) as socket,
    ):
        small.worker.scripts.append(lambda start: [gate, *answer("first")(start)])
        send(socket, input="x" * 8000)  # nothing runs, so it need not wait
        wait_for(lambda: small.worker.starts)
        send(socket, input="ü" * 1900)
        send(socket, input="y" * 200)
        *begun, refused = until_terminal(socket)
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused["error"]["message"].endswith("try again in 5s")
        assert "at most 4000 may" in refused["error"]["message"]
        small.call(gate.set)
        check(begun + until_terminal(socket))
        check(until_terminal(socket))
        send(socket, input="y" * 200)
        check(until_terminal(socket))
        assert small.api.sockets._open.copy().pop()._lanes.waiting_bytes == 0


def test_a_turn_follows_its_parent_with_the_items_of_both(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(answer(call("f", "{}")))
    send(socket, input="go", tools=[{"type": "function", "name": "f"}])
    parent = check(until_terminal(socket))
    output = {"type": "function_call_output", "call_id": parent["output"][0]["call_id"], "output": "done"}
    send(socket, previous_response_id=parent["id"], input=[output])
    child = check(until_terminal(socket))
    assert child["previous_response_id"] == parent["id"]
    rendered = server.text.renders[-1]
    assert [type(i).__name__ for i in rendered.items] == ["Message", "FunctionCall", "FunctionCallOutput"]
    assert [t.name for t in rendered.tools] == ["f"]
    assert server.store.rows[child["id"]].session == server.store.rows[parent["id"]].session


def test_unstored_turns_can_be_followed_on_their_connection_only(server: FakeServer, socket: ClientConnection) -> None:
    send(socket, input="a", store=False)
    first = check(until_terminal(socket))
    send(socket, input="b", store=False, previous_response_id=first["id"])
    second = check(until_terminal(socket))
    assert len(server.text.renders[-1].items) == 3
    assert server.store.committed == []
    with connect(server.ws_url, additional_headers=AUTH) as other:
        send(other, input="c", previous_response_id=second["id"])
        error = until_terminal(other)[-1]
        assert (error["type"], error["status"]) == ("error", 400)
        assert error["error"]["code"] == "previous_response_not_found"


def test_rows_are_committed_before_completed_is_sent(server: FakeServer, socket: ClientConnection) -> None:
    send(socket, input="a")
    while json.loads(socket.recv(timeout=60))["type"] != "response.completed":
        pass
    assert len(server.store.committed) == 1
    row = server.store.rows[server.store.committed[0]]
    assert row.generated_ids == b"".join(i.to_bytes(4, "little") for i in ids_of("Hello there"))


def test_a_commit_that_fails_ends_the_response_as_failed(server: FakeServer, socket: ClientConnection) -> None:
    server.store.fail = OSError("disk full")
    send(socket, input="a")
    events = until_terminal(socket)
    assert events[-1]["type"] == "response.failed"
    assert check(events)["error"]["code"] == "server_error"


def test_prewarming_renders_and_prefills_and_answers_empty(server: FakeServer, socket: ClientConnection) -> None:
    send(socket, input=[{"role": "developer", "content": "rules"}], generate=False)
    final = check(until_terminal(socket))
    assert final["output"] == []
    assert final["status"] == "completed"
    assert not server.worker.starts[0].generate


def test_the_token_limit_ends_a_response_as_incomplete(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(answer("abc", reason="length"))
    send(socket, input="a", max_output_tokens=3)
    events = until_terminal(socket)
    assert events[-1]["type"] == "response.incomplete"
    final = check(events)
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert server.worker.starts[0].sampling.max_tokens == 3


@pytest.mark.parametrize("code", ["context_length_exceeded", "deadline_exceeded", "server_error"])
def test_what_the_worker_fails_with_reaches_the_client(server: FakeServer, socket: ClientConnection, code: str) -> None:
    server.worker.scripts.append(failing(code, "got 9, accepted 8"))
    send(socket, input="a")
    events = until_terminal(socket)
    assert events[-1]["type"] == "response.failed"
    error = check(events)["error"]
    assert (error["code"], error["message"]) == (code, "got 9, accepted 8")


def test_a_cancelled_turn_ends_as_incomplete_and_the_lane_goes_on(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(lambda start: [*answer("abc")(start)[:-1], asyncio.Event()])
    send(socket, input="a")
    text = ""
    events = []
    while text != "abc":
        events.append(json.loads(socket.recv(timeout=60)))
        text += events[-1].get("delta", "")
    socket.send(json.dumps({"type": "response.cancel", "response_id": events[0]["response"]["id"]}))
    events += until_terminal(socket)
    assert events[-1]["type"] == "response.incomplete"
    final = check(events)
    assert (final["status"], final["incomplete_details"]) == ("cancelled", {"reason": "cancelled"})
    send(socket, input="b")
    assert check(until_terminal(socket))["status"] == "completed"


@pytest.mark.parametrize("lane", [{}, {"stream_id": "a"}])
def test_a_turn_that_is_cancelled_while_its_context_is_looked_up_never_reaches_the_worker(
    server: FakeServer, socket: ClientConnection, lane: dict[str, str]
) -> None:
    send(socket, input="a", **lane)
    first = check(until_terminal(socket), lane.get("stream_id"))["id"]
    gate, chain = asyncio.Event(), server.store.chain

    async def slow(principal: str, response_id: str) -> Any:
        await gate.wait()
        return await chain(principal, response_id)

    server.store.chain = slow
    send(socket, input="b", previous_response_id=first, **lane)
    socket.send(json.dumps({"type": "response.cancel", **lane}))
    socket.send(json.dumps({"type": "response.cancel", "response_id": "resp_0", "stream_id": "other"}))
    unknown = json.loads(socket.recv(timeout=60))  # so the one before it was taken
    assert (unknown["type"], unknown["stream_id"]) == ("error", "other")
    server.call(gate.set)
    final = check(until_terminal(socket), lane.get("stream_id"))
    assert (final["status"], final["incomplete_details"], final["output"]) == ("cancelled", {"reason": "cancelled"}, [])
    assert len(server.worker.starts) == 1
    wait_for(lambda: not server.services.beginning)
    send(socket, input="c", previous_response_id=first, **lane)
    assert check(until_terminal(socket), lane.get("stream_id"))["status"] == "completed"
    socket.send(json.dumps({"type": "response.cancel", **lane}))
    assert json.loads(socket.recv(timeout=60))["error"]["code"] == "not_found"


def test_a_client_that_leaves_stops_its_turns(server: FakeServer) -> None:
    server.worker.scripts.append(lambda start: [*answer("abc")(start)[:-1], asyncio.Event()])
    with connect(server.ws_url, additional_headers=AUTH) as one:
        send(one, input="a")
        wait_for(lambda: len(server.worker.starts) == 1)
    wait_for(lambda: server.worker.left == [server.worker.starts[0].turn_id])
    wait_for(lambda: not server.services.active)
    assert server.store.committed == []


def test_a_detached_turn_goes_on_without_its_client(server: FakeServer) -> None:
    gate = asyncio.Event()
    server.worker.scripts.append(lambda start: [gate, *answer("abc")(start)])
    with connect(server.ws_url, additional_headers=AUTH) as one:
        send(one, input="a", agentserve={"detach": True})
        wait_for(lambda: len(server.worker.starts) == 1)
    wait_for(lambda: len(server.api.sockets) == 0)
    server.call(gate.set)
    wait_for(lambda: len(server.store.committed) == 1)


def test_a_waiting_client_hears_something_before_output(server: FakeServer) -> None:
    with running(config_for_tests(turn={"keepalive_s": 0.1})) as quick:
        gate = asyncio.Event()
        quick.worker.scripts.append(lambda start: [progress(start, queued=2), gate, *answer("abc")(start)])
        with connect(quick.ws_url, additional_headers=AUTH) as one:
            send(one, input="a")
            events = [json.loads(one.recv(timeout=60)) for _ in range(6)]
            assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
            assert {e["type"] for e in events[3:]} == {"response.queued"}
            quick.call(gate.set)
            check(events + until_terminal(one))


def test_our_events_come_only_to_a_client_that_asked(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.default = answer("abc", reused=2)
    send(socket, input="a")
    assert not [e for e in until_terminal(socket) if e["type"].startswith("agentserve.")]
    asked = ({"agentserve": {"events": True, "ttft_deadline_ms": 5000}}, {"metadata": {"agentserve.events": "1"}})
    for extra in asked:
        send(socket, input="a", tools=[{"type": "web_search"}], **extra)
        events = until_terminal(socket)
        final = check(events)
        ours = [e for e in events if e["type"].startswith("agentserve.")]
        assert {e["type"] for e in ours} == {"agentserve.cache.report", "agentserve.prefill.progress", "agentserve.deadline"}
        assert {e["response_id"] for e in ours} == {final["id"]}
        report = next(e for e in ours if e["type"] == "agentserve.cache.report")
        assert (report["reused_tokens"], report["restored_from"]) == (2, "ram")
        assert report["checkpoint"] == {"kind": "turn", "position": 2}
        assert report["ignored_tools"] == ["web_search"]
        assert ours[-1]["status"] == "met"
        assert final["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert server.worker.starts[1].deadline_s == 5.0
    assert server.worker.starts[2].deadline_s == 30.0, "the default, for the order of turns"
    assert server.worker.starts[2].on_miss == "continue"


def test_a_header_of_the_upgrade_asks_for_our_events_on_every_turn(server: FakeServer) -> None:
    headers = {**AUTH, "agentserve-events": "1", "Idempotency-Key": "of-the-socket"}
    with connect(server.ws_url, additional_headers=headers) as socket:
        for text in ("a", "b"):
            send(socket, input=text)
            events = until_terminal(socket)
            check(events)
            assert any(e["type"] == "agentserve.cache.report" for e in events)


def test_without_parallel_calls_a_turn_ends_after_the_first(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(answer((*call("f", "{}"), *call("f", "{}"))))
    send(socket, input="a", parallel_tool_calls=False, tools=[{"type": "function", "name": "f"}])
    final = check(until_terminal(socket))
    assert final["status"] == "completed"
    assert len(final["output"]) == 1
    assert server.store.rows[final["id"]].generated_ids == b"".join(i.to_bytes(4, "little") for i in call("f", "{}"))


def test_log_probabilities_come_with_the_text_they_belong_to(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(answer((*think("x"), *ids_of("ab")), logprobs=True))
    send(socket, input="a", include=["message.output_text.logprobs"], top_logprobs=1)
    events = until_terminal(socket)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [[m["token"] for m in e["logprobs"]] for e in deltas] == [["a"], ["b"]]
    assert len(check(events)["output"][1]["content"][0]["logprobs"]) == 2
    assert server.worker.starts[0].sampling.logprobs == 1


def test_a_custom_tool_takes_free_text(server: FakeServer, socket: ClientConnection) -> None:
    server.worker.scripts.append(answer(call("patch", "*** begin")))
    send(socket, input="a", tools=[{"type": "custom", "name": "patch"}])
    final = check(until_terminal(socket))
    assert final["output"][0]["type"] == "custom_tool_call"
    assert final["output"][0]["input"] == "*** begin"


def test_the_server_drains_turn_by_turn_and_closes_with_1012() -> None:
    gate = asyncio.Event()
    with (
        running(config_for_tests(server={"drain_s": 60.0})) as server,
        connect(server.ws_url, additional_headers=AUTH) as busy,
        connect(server.ws_url, additional_headers=AUTH) as idle,
    ):
        server.worker.scripts.append(lambda start: [gate, *answer("abc")(start)])
        send(busy, input="a")
        wait_for(lambda: len(server.worker.starts) == 1)
        server.server.should_exit = True
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        server.call(gate.set)
        assert check(until_terminal(busy))["status"] == "completed"
        with pytest.raises(ConnectionClosed) as closed:
            busy.recv(timeout=60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012


def test_a_client_that_never_reads_is_closed_with_1013_and_slows_nobody() -> None:
    with running(config_for_tests(limits={"buffer_bytes": 1 << 16, "slow_s": 0.3})) as server:
        server.worker.scripts.append(answer("x" * 300_000, chunk=2_000))
        with raw_socket(server, receive_buffer=4096) as raw:
            raw.sendall(client_frame(json.dumps({"type": "response.create", "input": "a"})))
            wait_for(lambda: len(server.worker.starts) == 1)
            with connect(server.ws_url, additional_headers=AUTH) as other:
                send(other, input="b")
                assert check(until_terminal(other))["status"] == "completed"
            wait_for(lambda: server.worker.left == [server.worker.starts[0].turn_id])
            assert close_code(raw) == 1013
        assert server.store.committed == [server.worker.starts[1].turn_id]


def test_deltas_are_joined_for_a_slow_client_without_a_gap() -> None:
    with running(config_for_tests(limits={"buffer_events": 64})) as server:
        server.worker.scripts.append(answer("x" * 60_000, chunk=1))
        with raw_socket(server, receive_buffer=4096) as raw:
            raw.sendall(client_frame(json.dumps({"type": "response.create", "input": "a"})))
            wait_for(lambda: any(turn.sink.pressed for turn in tuple(server.services.active.values())))
            events = [json.loads(text) for text in read_frames(raw)]
        final = check(events)
        assert final["output"][0]["content"][0]["text"] == "x" * 60_000
        assert len(events) < 60_000


def test_wrong_frames_of_a_client_that_does_not_read_wait_in_its_own_socket() -> None:
    """Answers to them must not pile up here: they are larger than what they answer."""
    config = config_for_tests(limits={"buffer_bytes": 1 << 16, "buffer_events": 64})
    with running(config) as server, raw_socket(server, receive_buffer=4096) as raw:
        (connection,) = server.api.sockets._open
        nonsense = client_frame("x") * 1000
        raw.setblocking(False)
        sent = 0

        def full() -> bool:
            nonlocal sent
            with contextlib.suppress(BlockingIOError):
                sent += raw.send(nonsense[sent % len(nonsense) :])
            return connection.full

        wait_for(full)
        assert len(connection._outbox._queue) <= 65
        with connect(server.ws_url, additional_headers=AUTH) as other:
            send(other, input="b")
            assert check(until_terminal(other))["status"] == "completed"


def test_a_connection_of_its_age_limit_is_closed_after_its_turns() -> None:
    with running(config_for_tests(limits={"connection_s": 3600.0})) as server:
        gate = asyncio.Event()
        server.worker.scripts.append(lambda start: [gate, *answer("abc")(start)])
        expiries: list[tuple[float, Callable[[], None]]] = []
        later = server.loop.call_later

        def call_later(delay: float, call: Callable[..., None], *args: Any, **more: Any) -> asyncio.TimerHandle:
            if delay == 3600.0:
                expiries.append((delay, call))
            return later(delay, call, *args, **more)

        server.loop.call_later = call_later  # type: ignore[method-assign]
        with connect(server.ws_url, additional_headers=AUTH) as busy:
            send(busy, input="a")
            wait_for(lambda: server.worker.starts)
            ((_, expire),) = expiries
            server.call(expire)
            server.call(gate.set)
            assert check(until_terminal(busy))["status"] == "completed"
            assert json.loads(busy.recv(timeout=60))["error"]["code"] == "websocket_connection_limit_reached"
            with pytest.raises(ConnectionClosed) as closed:
                busy.recv(timeout=60)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1000


def test_text_that_is_not_utf_8_closes_with_1007_and_is_no_error_of_ours(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_socket(server, receive_buffer=4096) as raw:
        raw.sendall(client_frame('{"type": "?"}').replace(b"?", b"\xff"))
        assert close_code(raw) == 1007
    assert caplog.records == []


LARGE = "w " * LARGE_BYTES


def test_a_large_frame_is_read_on_another_thread_and_answered_in_its_place(
    server: FakeServer, socket: ClientConnection
) -> None:
    """Frames behind it wait for it, and what is wrong with it is told as of any other."""
    threads: list[str] = []
    whole = server.services.reader.submit

    def submit(*call: Any) -> Any:
        threads.append("read")
        return whole(*call)

    server.services.reader.submit = submit  # type: ignore[method-assign]
    send(socket, input=LARGE, stream_id="large")
    send(socket, input="hi", stream_id="small")
    socket.send(
        json.dumps({"type": "response.create", "stream_id": "wrong", "input": [{"role": "user", "content": [7, LARGE]}]})
    )
    first: list[str] = []
    ends: dict[str, str] = {}
    while len(ends) < 3:
        event = json.loads(socket.recv(timeout=60))
        if event["type"] == "response.created":
            first.append(event["stream_id"])
        if event["type"] in ("response.completed", "error"):
            ends[event["stream_id"]] = event["type"]
            assert event["type"] != "error" or event["error"]["param"] == "input[0].content[0]"
    assert first == ["large", "small"]
    assert ends == {"large": "response.completed", "small": "response.completed", "wrong": "error"}
    assert len(threads) == 2, "the large ones, and no other"
