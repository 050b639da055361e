"""`context_management`: a context over its threshold is summed up within the turn, and turns after it start from there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.client import connect

from agentserve import room
from agentserve.config import StoreConfig
from agentserve.protocol.items import FunctionCall, FunctionCallOutput, Item, Message
from agentserve.sealing import Seal, is_summary, summary_message
from agentserve.session.store import SqlStore
from tests.agentserve.test_http import sse_events
from tests.agentserve.test_websocket import AUTH, send, until_terminal
from tests.agentserve.text.play import answer as said
from tests.agentserve.text.play import call as called
from tests.agentserve.text.play import output, system, thought, user
from tests.fakes.canonical import check
from tests.fakes.server import FakeServer, config_for_tests, running, wait_for
from tests.fakes.text import call, ids_of, think
from tests.fakes.worker import HELLO, answer, failing

COMPACT = {"context_management": [{"type": "compaction", "compact_threshold": 150}]}
LONG = "x" * 200
GONE = "EARLIER"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    store = SqlStore(StoreConfig(url=f"sqlite:///{tmp_path}/s.db"))
    asyncio.run(store.open())
    with running(store=store) as one:
        yield one
    asyncio.run(store.close())


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTH) as one:
        yield one


def create(client: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def shown(server: FakeServer) -> list[tuple[str, str]]:
    """What the last turn showed its model: roles or types, with texts."""
    return [(getattr(i, "role", i.__struct_config__.tag), getattr(i, "text", "")) for i in server.text.renders[-1].items]


def begun(server: FakeServer, client: httpx.Client, **body: Any) -> dict[str, Any]:
    """A first exchange, whose answer makes the context long."""
    server.worker.scripts.append(answer(GONE + LONG))
    return create(client, input=[{"role": "developer", "content": "rules"}, {"role": "user", "content": "one"}], **body)


SUMMED = [("developer", "rules"), ("user", "one"), ("user", "Summary of…"), ("user", "two")]


def in_short(items: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(role, "Summary of…" if text.startswith("Summary of") else text) for role, text in items]


def test_a_long_context_is_summed_up_within_the_turn(server: FakeServer, client: httpx.Client) -> None:
    first = begun(server, client, **COMPACT)
    assert [item["type"] for item in first["output"]] == ["message"], "below the threshold nothing happens"
    server.worker.scripts += [answer("THE SUMMARY"), answer((*think("hm"), *ids_of("Two!")))]
    streamed = client.post(
        "/v1/responses", json={"input": "two", "previous_response_id": first["id"], "stream": True, **COMPACT}
    )
    events = sse_events(streamed.text)
    second = check(events)
    compaction, thinking, message = second["output"]
    assert (compaction["type"], thinking["type"], message["content"][0]["text"]) == ("compaction", "reasoning", "Two!")
    assert "SUMMARY" not in streamed.text
    assert GONE not in streamed.text
    asked, _ = server.text.renders[-2:]
    assert [type(i).__name__ for i in asked.items] == ["Message"] * 5
    assert asked.items[-1].text == room.QUESTION  # pyright: ignore[reportAttributeAccessIssue]
    assert in_short(shown(server)) == SUMMED
    assert server.text.renders[-1].items[2].text.endswith("THE SUMMARY")  # pyright: ignore[reportAttributeAccessIssue]
    summing, going_on = server.worker.starts[-2:]
    assert len(going_on.ids) < len(summing.ids)
    assert summing.session == going_on.session
    assert second["usage"]["input_tokens"] == len(going_on.ids) // 4
    # Told again it is the same, also from the store.
    assert sse_events(client.get(f"/v1/responses/{second['id']}?stream=true").text) == events


@pytest.mark.parametrize("how", ["id", "whole", "pruned", "local"])
def test_later_turns_start_from_the_compaction(server: FakeServer, client: httpx.Client, how: str) -> None:
    """By id, or resent: with what stood before the compaction or without it."""
    with connect(server.ws_url, additional_headers=AUTH) as socket:

        def turn(**body: Any) -> dict[str, Any]:
            if how != "local":
                return create(client, **body)
            send(socket, store=False, **body)
            return check(until_terminal(socket))

        items: list[Any] = [{"role": "developer", "content": "rules"}, {"role": "user", "content": "one"}]
        server.worker.scripts.append(answer(GONE + LONG))
        first = turn(input=items, **COMPACT)
        items += [*first["output"], {"role": "user", "content": "two"}]
        server.worker.scripts.append(answer("THE SUMMARY"))
        resent = how in ("whole", "pruned")
        second = turn(**({"input": items} if resent else {"input": "two", "previous_response_id": first["id"]}), **COMPACT)
        assert second["output"][0]["type"] == "compaction"
        items = [*(items if how == "whole" else []), *second["output"], {"role": "user", "content": "three"}]
        third = turn(**({"input": items} if resent else {"input": "three", "previous_response_id": second["id"]}), **COMPACT)
        assert [item["type"] for item in third["output"]] == ["message"], "it is short again"
        assert in_short(shown(server)) == [*SUMMED, ("assistant", "Hello there"), ("user", "three")]
        starts = server.worker.starts
        assert starts[-1].ids[: len(starts[-2].ids)] == starts[-2].ids, "the compacted context goes on as it was"
        assert len({start.session for start in starts}) == 1


def test_a_conversation_keeps_the_compaction_and_goes_on_without_it_once_it_is_deleted(
    server: FakeServer, client: httpx.Client
) -> None:
    name = client.post("/v1/conversations").json()["id"]
    begun(server, client, conversation=name, **COMPACT)
    server.worker.scripts.append(answer("THE SUMMARY"))
    second = create(client, input="two", conversation=name, **COMPACT)
    create(client, input="three", conversation=name)
    assert in_short(shown(server)) == [*SUMMED, ("assistant", "Hello there"), ("user", "three")]
    listed = client.get(f"/v1/conversations/{name}/items?order=asc").json()["data"]
    (kept,) = [item for item in listed if item["type"] == "compaction"]
    assert kept == second["output"][0]
    assert client.delete(f"/v1/conversations/{name}/items/{kept['id']}").status_code == 200
    create(client, input="four", conversation=name)
    assert (GONE + LONG) in [text for _, text in shown(server)]


def test_it_is_compacted_again_when_it_has_grown_again(server: FakeServer, client: httpx.Client) -> None:
    last = begun(server, client, **COMPACT)
    for n in range(3):
        server.worker.scripts += [answer(f"SUMMARY {n}"), answer(LONG)]
        last = create(client, input=f"more {n}", previous_response_id=last["id"], **COMPACT)
        assert last["output"][0]["type"] == "compaction"
        summaries = [text for _, text in shown(server) if text.startswith("Summary of")]
        assert [text.rsplit("\n", 1)[1] for text in summaries] == [f"SUMMARY {n}"], "one summary takes the other's place"


def test_a_compaction_by_request_leaves_the_old_summary_out(server: FakeServer, client: httpx.Client) -> None:
    first = begun(server, client, **COMPACT)
    server.worker.scripts += [answer("OLD SUMMARY"), answer("Two!"), answer("NEW SUMMARY")]
    second = create(client, input="two", previous_response_id=first["id"], **COMPACT)
    made = client.post("/v1/responses/compact", json={"previous_response_id": second["id"]}).json()
    assert [item["type"] for item in made["output"]] == ["message", "message", "compaction"]
    assert "SUMMARY" not in msgspec.json.encode(made).decode()


def test_results_that_the_model_has_not_seen_stay_with_their_call(server: FakeServer, client: httpx.Client) -> None:
    tools = [{"type": "function", "name": "f"}]
    first = begun(server, client, tools=tools, **COMPACT)
    server.worker.scripts.append(answer(call("f", "{}")))
    second = create(client, input="two", previous_response_id=first["id"])
    result = {"type": "function_call_output", "call_id": second["output"][0]["call_id"], "output": "RESULT"}
    server.worker.scripts.append(answer("THE SUMMARY"))
    create(client, input=[result], previous_response_id=second["id"], **COMPACT)
    asked = server.text.renders[-2]
    assert asked.rule is not None
    assert (asked.rule.calls, asked.thinking) == ("none", False)
    kinds = [role for role, _ in in_short(shown(server))]
    assert kinds == ["developer", "user", "user", "user", "function_call", "function_call_output"]
    assert shown(server)[-1][1] == "RESULT"


@pytest.mark.parametrize(
    "script",
    [answer(think("only thinking")), answer(""), failing("context_length_exceeded", "too long")],
    ids=["only thinking", "nothing", "too long"],
)
def test_without_a_summary_the_turn_goes_on_as_it_is(server: FakeServer, client: httpx.Client, script: Any) -> None:
    first = begun(server, client, **COMPACT)
    server.worker.scripts.append(script)
    second = create(client, input="two", previous_response_id=first["id"], **COMPACT)
    assert [item["type"] for item in second["output"]] == ["message"]
    assert (GONE + LONG) in [text for _, text in shown(server)]


def test_a_worker_that_fails_while_summing_up_fails_the_turn(server: FakeServer, client: httpx.Client) -> None:
    first = begun(server, client, **COMPACT)
    server.worker.scripts.append(failing("server_error", "the worker is gone; retry"))
    failed = client.post("/v1/responses", json={"input": "two", "previous_response_id": first["id"], **COMPACT})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "server_error")
    assert create(client, input="two", previous_response_id=first["id"])["status"] == "completed"


@pytest.mark.parametrize("how", ["cancel", "steer"])
def test_a_turn_can_be_stopped_while_it_sums_up(server: FakeServer, client: httpx.Client, how: str) -> None:
    first = begun(server, client, **COMPACT)
    with connect(server.ws_url, additional_headers=AUTH) as socket:
        hold = asyncio.Event()
        server.worker.scripts.append(lambda start: [*answer("half a sum")(start)[:4], hold, *answer("x")(start)])
        send(socket, input="two", previous_response_id=first["id"], **COMPACT)
        wait_for(lambda: len(server.worker.starts) == 2)
        name = next(iter(server.services.active))
        if how == "steer":
            send(socket, type="response.steer", previous_response_id=name, input="else")
        else:
            send(socket, type="response.cancel", response_id=name)
        events = [e for e in until_terminal(socket) if not e["type"].startswith("response.steer")]
        final = check(events)
    assert (final["output"], final["incomplete_details"]["reason"]) == ([], "steered" if how == "steer" else "cancelled")


def test_signs_of_life_come_before_and_behind_the_compaction(tmp_path: Path) -> None:
    store = SqlStore(StoreConfig(url=f"sqlite:///{tmp_path}/s.db"))
    asyncio.run(store.open())
    with running(config_for_tests(turn={"keepalive_s": 0.05}), store=store) as server:
        with httpx.Client(base_url=server.url, headers=AUTH) as client:
            first = begun(server, client, **COMPACT)
            before, behind = asyncio.Event(), asyncio.Event()
            server.worker.scripts += [
                lambda start: [before, *answer("THE SUMMARY")(start)],
                lambda start: [behind, *answer("Two!")(start)],
            ]
            body = {"input": "two", "previous_response_id": first["id"], "stream": True, **COMPACT}
            text = ""
            with client.stream("POST", "/v1/responses", json=body) as reply:
                for piece in reply.iter_text():
                    text += piece
                    head, _, tail = text.partition("event: response.output_item.done\n")
                    if head.count("event: response.in_progress\n") > 2:
                        server.call(before.set)
                    if tail.count("event: response.in_progress\n") > 1:
                        server.call(behind.set)
            events = sse_events(text)
        final = check(events)
        kinds = [e["type"].removeprefix("response.") for e in events]
        at = kinds.index("output_item.done")
        assert kinds[:at].count("in_progress") > 2
        signs = [e for e in events[at:] if e["type"] == "response.in_progress"]
        assert len(signs) > 1
        assert all(e["response"]["output"] == final["output"][:1] for e in signs)
    asyncio.run(store.close())


def test_the_model_s_own_length_is_a_threshold_too(server: FakeServer, client: httpx.Client) -> None:
    first = begun(server, client)
    server.worker.hello = msgspec.structs.replace(HELLO, max_context=240)
    for wanted in ([{"type": "compaction"}], [{"type": "compaction", "compact_threshold": 100_000}]):
        server.worker.scripts.append(answer("THE SUMMARY"))
        second = create(client, input="two", previous_response_id=first["id"], context_management=wanted)
        assert [item["type"] for item in second["output"]] == ["compaction", "message"]
    prewarmed = create(client, input="two", previous_response_id=first["id"], generate=False, **COMPACT)
    assert prewarmed["output"] == [], "nothing is generated, so nothing is summed up"
    third = create(client, input="two", previous_response_id=first["id"], context_management=[])
    assert [item["type"] for item in third["output"]] == ["message"]


@pytest.mark.parametrize(
    ("wanted", "code", "param"),
    [
        ([{"type": "clear_tool_uses"}], "unsupported_value", "context_management[0].type"),
        ([{"type": "compaction", "compact_threshold": 0}], "invalid_value", "context_management[0].compact_threshold"),
        ([{"compact_threshold": 9}], "invalid_value", "context_management[0]"),
        ("compaction", "invalid_value", "context_management"),
    ],
)
def test_what_context_management_does_not_do_is_refused(client: httpx.Client, wanted: Any, code: str, param: str) -> None:
    refused = client.post("/v1/responses", json={"input": "x", "context_management": wanted})
    assert refused.status_code == 400
    assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == (code, param)


def test_a_compaction_that_this_server_cannot_open_any_more_is_passed_over(server: FakeServer, client: httpx.Client) -> None:
    """Its key file was lost; what the compaction stood for is stored before it."""
    first = begun(server, client, **COMPACT)
    server.worker.scripts.append(answer("THE SUMMARY"))
    second = create(client, input="two", previous_response_id=first["id"], **COMPACT)
    server.services.seal = Seal()
    third = create(client, input="three", previous_response_id=second["id"])
    assert third["status"] == "completed"
    assert (GONE + LONG) in [text for _, text in shown(server)]
    resent = client.post("/v1/responses", json={"input": [*second["output"], {"role": "user", "content": "three"}]})
    assert (resent.status_code, resent.json()["error"]["param"]) == (400, "input[0].encrypted_content")


PARTS = st.lists(
    st.sampled_from(
        [
            [user("question")],
            [said("answer")],
            [thought("hm"), called("c", "f", "{}"), output("c", "result")],
            [called("a", "f", "{}"), called("b", "g", "{}"), output("a", "r"), output("b", "r")],
            [called("c", "f", "{}"), output("c", "result"), user("and")],
            [system("note")],
            [summary_message("cmp_1", "old")],
        ]
    ),
    max_size=8,
)


@given(parts=PARTS, threshold=st.sampled_from([1, 8, 10_000]))
def test_what_goes_on_has_all_that_is_unanswered_and_no_call_without_its_result(
    parts: Sequence[Sequence[Item]], threshold: int
) -> None:
    items = [item for part in parts for item in part]
    found = room.going_on(items, threshold)
    kept_all = [i for i in items if isinstance(i, Message) and i.role != "assistant" and not is_summary(i)]
    if found is None:
        # Nothing would be left out, so no result has been answered.
        results = [at for at, item in enumerate(items) if isinstance(item, FunctionCallOutput)]
        assert not any(isinstance(i, FunctionCall) for at in results[:1] for i in items[at:])
        return
    kept, behind = found
    assert items[len(items) - len(behind) :] == list(behind)
    assert all(i in kept_all for i in kept)
    calls = {i.call_id for i in behind if isinstance(i, FunctionCall)}
    assert {i.call_id for i in behind if isinstance(i, FunctionCallOutput)} <= calls
    newest = [i for i in items[: len(items) - len(behind)] if isinstance(i, Message) and i.role == "user" and not is_summary(i)]
    mine = [i for i in kept if i.role == "user"]  # pyright: ignore[reportAttributeAccessIssue]
    assert mine == newest[len(newest) - len(mine) :], "the newest are kept"
    assert [i for i in kept if i not in mine] == [i for i in items[: len(items) - len(behind)] if i == system("note")]
    if threshold == 10_000:
        assert mine == newest
    # What the model has said last stands behind only where results of it are new.
    assert bool(behind) or not items or not isinstance(items[-1], FunctionCallOutput)
