"""What a bounded cache says that it takes is what its values and their entries take, and never above its limit."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.config import StoreConfig
from agentserve.constraints.rules import Rules
from agentserve.context import LocalResponses
from agentserve.kept import ENTRY_BYTES, PER_JSON_BYTE, Kept
from agentserve.metrics import Metrics
from agentserve.protocol.items import FunctionCall, FunctionTool
from agentserve.protocol.tool_choice import tool_choice
from agentserve.session.store import SqlStore
from agentserve.text.messages import call_arguments
from agentserve.text.planner import claim_of
from agentserve.text.tool_forms import ToolForms
from tests.agentserve.session.test_store import response

LIMIT = 4 * ENTRY_BYTES
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "drop", "setdefault"]), st.sampled_from("abcdef"), st.integers(0, 2 * ENTRY_BYTES))
)


def shorten(model: OrderedDict[str, int]) -> None:
    while sum(model.values()) + ENTRY_BYTES * len(model) > LIMIT and len(model) > 1:
        model.popitem(last=False)


@given(STEPS)
def test_it_keeps_the_newest_that_fit_with_their_entries(steps: list[tuple[str, str, int]]) -> None:
    kept: Kept[str, int] = Kept(LIMIT)
    model: OrderedDict[str, int] = OrderedDict()
    for what, key, size in steps:
        if what == "put":
            kept.put(key, size, size)
            model.pop(key, None)
            model[key] = size
            shorten(model)
        elif what == "get":
            assert kept.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        elif what == "setdefault":
            assert kept.setdefault(key, size, size) == model.get(key, size)
            model[key] = model.pop(key, size)
            shorten(model)
        else:
            kept.drop(key)
            model.pop(key, None)
        assert kept.size_bytes == sum(model.values()) + ENTRY_BYTES * len(model)
    kept.clear()
    assert kept.size_bytes == 0


def test_metrics_tell_what_a_store_keeps_now() -> None:
    store, metrics = SqlStore(StoreConfig(url="sqlite://")), Metrics()
    for what, cache in store.caches.items():
        metrics.watch_kept(what, lambda cache=cache: cache.size_bytes)
    assert b'agentserve_kept_bytes{what="contexts"} 0.0' in metrics.render()
    store._contexts.put("resp_1", (b"1234", 0), 4)
    assert f'agentserve_kept_bytes{{what="contexts"}} {4.0 + ENTRY_BYTES}'.encode() in metrics.render()
    assert set(store.caches) == {"responses", "contexts", "digests", "aliases"}


LONG = "x" * 4096


def test_what_is_remembered_of_texts_is_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4 * PER_JSON_BYTE * len(LONG)
    small: dict[str, Kept[Any, Any]] = {name: Kept(limit) for name in ("arguments", "claims")}
    monkeypatch.setattr("agentserve.text.messages.PARSED", small["arguments"])
    monkeypatch.setattr("agentserve.text.planner.CLAIMS", small["claims"])
    rules, forms, local = Rules(limit), ToolForms(limit), LocalResponses(limit)
    most: Counter[str] = Counter()
    for n in range(200):
        call = FunctionCall(call_id="c", name="f", arguments=json.dumps({"a": LONG, "n": n}))
        assert call_arguments(call)["n"] == n
        assert claim_of(call) == claim_of(call)
        tool = FunctionTool(name="f", description=f"{n}{LONG}", parameters={"type": "object"}, strict=True)
        assert forms.first([tool], b"") == (tool,)
        assert rules.rule(None, tool_choice("required"), [tool], one_call=True) is not None
        turn = response(id=f"r{n}", body=LONG.encode())
        local.add(turn, len(LONG))
        assert local.get(turn.id) is not None
        for name, cache in {**small, "rules": rules, "tools": forms.kept, "local": local}.items():
            most[name] = max(most[name], cache.size_bytes)
    assert {name: size for name, size in most.items() if not limit / 2 < size <= limit} == {}
    assert local.get("r0") is None
