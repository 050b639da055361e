"""A tool that comes back with its keys in another order is the same prompt; everything else about it counts."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.kept import ENTRY_BYTES, PER_JSON_BYTE
from agentserve.protocol.items import FunctionTool
from agentserve.text.tool_forms import ToolForms
from tests.agentserve.text.models import FAMILIES, model
from tests.agentserve.text.play import MemoryBook, request, user

CITY = {"type": "string", "description": "Name of the city"}
DAYS = {"type": "integer", "minimum": 1}


def weather(**properties: object) -> FunctionTool:
    return FunctionTool(name="get_weather", parameters={"type": "object", "properties": properties, "required": ["city"]})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_keys_does_not_change_a_prompt(family: str):
    text = model(family, MemoryBook())
    first = text.render(request(user("Hello"), tools=(weather(city=CITY, days=DAYS),)))
    turned = FunctionTool(
        name="get_weather",
        parameters={"required": ["city"], "properties": {"days": dict(reversed(DAYS.items())), "city": CITY}, "type": "object"},
    )
    again = text.render(request(user("Hello"), tools=(turned,)))
    assert again.ids.tolist() == first.ids.tolist()
    changed = text.render(request(user("Hello"), tools=(weather(city=CITY, days={**DAYS, "minimum": 2}),)))
    assert changed.ids.tolist() != first.ids.tolist()


def test_each_salt_keeps_its_own_order_and_memory_is_bounded():
    one, turned = weather(city=CITY, days=DAYS), weather(days=DAYS, city=CITY)
    forms = ToolForms(kept_bytes=2 * (PER_JSON_BYTE * len(msgspec.json.encode(one)) + ENTRY_BYTES))
    assert forms.first([one], b"a") == (one,)
    assert forms.first([turned], b"a")[0] is one
    assert forms.first([turned], b"b")[0] is turned
    forms.first([weather(city=CITY)], b"a")
    forms.first([weather(days=DAYS)], b"a")
    assert forms.first([turned], b"a")[0] is turned


def test_the_order_of_arrays_and_of_tools_is_the_clients():
    forms = ToolForms()
    one = FunctionTool(name="f", parameters={"enum": ["a", "b"]})
    other = FunctionTool(name="f", parameters={"enum": ["b", "a"]})
    assert forms.first([one, other], b"") == (one, other)
    assert forms.first([other, one], b"") == (other, one)
