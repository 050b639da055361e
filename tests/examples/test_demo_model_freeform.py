"""The hand-worded sets can be won, as they are judged, and by the expected calls only."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

from agentserve.cli.connect import AgentSocket
from examples.demo_model import freeform

KINDS = {"one call": 43, "chain": 5, "independent": 6, "talk": 6}


class Scripted:
    """Stands for a server whose model makes the given calls (independent ones in one turn), then says `answer`."""

    def __init__(self, request: dict[str, Any], calls: list[dict[str, Any]], answer: str) -> None:
        one = [json.dumps(call["arguments"]) for call in calls]
        items = [
            {"type": "function_call", "name": call["name"], "arguments": text, "call_id": str(number)}
            for number, (call, text) in enumerate(zip(calls, one, strict=True))
        ]
        turns = [items] if request["parallel"] else [[item] for item in items]
        self._turns = iter([*turns, [{"type": "message", "content": [{"text": answer}]}]])
        self.got: list[str] = []

    def turn(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.got += [item["output"] for item in body["input"] if "output" in item]
        return [{"type": "response.completed", "response": {"id": "resp_1", "output": next(self._turns)}}]


def play(request: dict[str, Any], calls: list[dict[str, Any]], answer: str) -> tuple[bool, list[str]]:
    socket = Scripted(request, calls, answer)
    right, _ = freeform.play(cast(AgentSocket, socket), request)
    return right, socket.got


def kind(request: dict[str, Any]) -> str:
    if not request["calls"]:
        return "talk"
    if request["parallel"]:
        return "independent"
    return "one call" if len(request["calls"]) == 1 else "chain"


def said(request: dict[str, Any]) -> str:
    """An answer that says all that must be said."""
    parts = [part if isinstance(part, str) else part[0] for part in request["answer_contains"]]
    return " ".join(["Well:", *parts])


@pytest.fixture(params=["a", "b", "c"])
def requests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return freeform.load(freeform.set_file(request.param))


def test_every_set_has_the_same_shares_of_kinds(requests):
    assert Counter(map(kind, requests)) == KINDS
    assert len({request["user"] for request in requests}) == len(requests)


def test_every_expected_call_is_valid_by_its_schema(requests):
    for request in requests:
        schemas = {tool["name"]: tool["parameters"] for tool in request["tools"]}
        for schema in schemas.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        for call in request["calls"]:
            closed = schemas[call["name"]] | {"additionalProperties": False}
            jsonschema.validate(call["arguments"], closed)


def test_what_must_be_said_stands_in_results_or_in_the_request(requests):
    for request in requests:
        known = " ".join([request["user"], *(call["result"] for call in request["calls"])])
        assert all(freeform.says(known, part) for part in request["answer_contains"]), request["user"]


def test_the_expected_calls_win_and_get_their_results(requests):
    for request in requests:
        won = play(request, request["calls"], said(request))
        assert won == (True, [call["result"] for call in request["calls"]]), request["user"]


def test_a_call_too_many_or_too_few_loses(requests):
    for request in requests:
        needless = {"name": "never_declared", "arguments": {}}
        assert not play(request, [*request["calls"], needless], said(request))[0], request["user"]
        if request["calls"]:
            assert not play(request, request["calls"][:-1], said(request))[0], request["user"]


def test_a_chain_out_of_order_loses(requests):
    for request in (r for r in requests if kind(r) == "chain"):
        assert not play(request, request["calls"][::-1], said(request))[0], request["user"]


def test_an_answer_that_says_nothing_of_the_results_loses(requests):
    for request in (r for r in requests if r["calls"]):
        assert not play(request, request["calls"], "Hm.")[0], request["user"]


def test_the_third_set_shares_no_tool_and_no_request_with_the_others():
    older = [r for letter in "ab" for r in freeform.load(freeform.set_file(letter))]
    third = freeform.load(freeform.set_file("c"))
    assert not {r["user"] for r in older} & {r["user"] for r in third}
    tools, new = ({tool["name"] for r in rows for tool in r["tools"]} for rows in (older, third))
    assert new
    assert tools & new == set()


def test_a_set_is_named_by_its_letter_or_by_its_path(tmp_path: Path):
    assert freeform.set_file("c") == freeform.SETS / "set_c.jsonl"
    assert freeform.set_file(str(tmp_path / "mine.jsonl")) == tmp_path / "mine.jsonl"
