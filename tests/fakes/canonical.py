"""Checks a response's events against the protocol's canonical order. Independent of agentserve.protocol.machine on purpose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LETTERS = {
    "response.created": "C",
    "response.in_progress": "P",
    "response.queued": "P",
    "response.completed": "T",
    "response.incomplete": "T",
    "response.failed": "T",
    "response.output_item.done": "D",
    "response.content_part.added": "a",
    "response.content_part.done": "d",
    "response.output_text.delta": "t",
    "response.output_text.done": "x",
    "response.reasoning_text.delta": "r",
    "response.reasoning_text.done": "q",
    "response.function_call_arguments.delta": "f",
    "response.function_call_arguments.done": "g",
    "response.custom_tool_call_input.delta": "u",
    "response.custom_tool_call_input.done": "v",
}
ADDED = {"compaction": "K", "reasoning": "R", "message": "M", "function_call": "F", "custom_tool_call": "U"}
ORDER = re.compile(r"CP+(KDP*)?(Rr*qD|Mat*xdD|Ff*gD|Uu*vD)*T")


def check(events: Sequence[dict[str, Any]], stream_id: str | None = None) -> dict[str, Any]:
    """Assert that these are the events of exactly one whole response; returns its final `response` object."""
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert all(e.get("stream_id") == stream_id for e in events)
    letters = ""
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            letters += ADDED[event["item"]["type"]]
        elif not kind.startswith("agentserve."):
            letters += LETTERS[kind]
    assert ORDER.fullmatch(letters), letters
    final = events[-1]["response"]
    assert events[0]["response"]["id"] == final["id"]
    _check_items(events, final)
    if final["usage"] is not None:
        use = final["usage"]
        assert use["total_tokens"] == use["input_tokens"] + use["output_tokens"]
        assert set(use["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}
        assert set(use["output_tokens_details"]) == {"reasoning_tokens"}
    return final


def _check_items(events: Sequence[dict[str, Any]], final: dict[str, Any]) -> None:
    done: list[dict[str, Any]] = []
    item_id, text, call_ids = "", "", set()
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            item_id, text = event["item"]["id"], ""
        if "output_index" in event:
            assert event["output_index"] == len(done)
        if "item_id" in event:
            assert event["item_id"] == item_id
        if "content_index" in event:
            assert event["content_index"] == 0
        if kind.endswith(".delta"):
            assert event["delta"] != ""
            text += event["delta"]
        for field in ("text", "arguments", "input"):
            if kind.endswith(".done") and field in event:
                assert event[field] == text
        if kind == "response.output_item.done":
            item = event["item"]
            assert item["id"] == item_id
            if "call_id" in item:
                assert item["call_id"] not in call_ids
                call_ids.add(item["call_id"])
            done.append(item)
    assert final["output"] == done
