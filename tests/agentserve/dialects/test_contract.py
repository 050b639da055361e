"""Every dialect, over the registry: calls survive a round trip, whatever the cut; what is broken is never lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentserve.dialects.registry import DIALECTS, get_dialect
from agentserve.dialects.schema import typed_value
from agentserve.dialects.stream import DialectParser
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta, ReasoningDelta, TextDelta
from agentserve.protocol.items import CustomTool, FunctionTool, Tool
from statecache.types import MarkerTable
from tests.agentserve.text.models import tokenizer

WITH_TOOLS = [name for name in DIALECTS if get_dialect(name).markers.call_open]
dialects = pytest.mark.parametrize("name", list(DIALECTS))
tool_dialects = pytest.mark.parametrize("name", WITH_TOOLS)
forms = pytest.mark.parametrize("as_tokens", [True, False], ids=["token markers", "text markers"])
quick = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)

characters = st.characters(codec="utf-8", exclude_categories=("Cs",))
names = st.from_regex(r"[a-z][a-z0-9_.-]{0,15}", fullmatch=True)
NASTY = ["</tool_call>", "<tool_call>", "</think>", "<|im_end|>", '"}', "\\", "</function>", "</parameter>x", "\n", "{", "日本"]
strings = st.one_of(st.text(characters, max_size=20), st.lists(st.sampled_from([*NASTY, "a", " "]), max_size=6).map("".join))
values = st.recursive(
    st.one_of(
        strings, st.integers(-(10**9), 10**9), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
calls = st.tuples(names, st.dictionaries(names, values, max_size=4))
prose = st.text(characters, max_size=30).map(str.strip)


def table(name: str, as_tokens: bool) -> MarkerTable:
    m = get_dialect(name).markers
    ids = tokenizer().marker_ids
    if not as_tokens:
        return MarkerTable(turn_end=ids("<|im_end|>"))
    return MarkerTable(
        think_open=ids(m.think_open),
        think_close=ids(m.think_close),
        call_open=ids(m.call_open),
        call_close=ids(m.call_close),
        turn_end=ids("<|im_end|>"),
    )


def write(markers: MarkerTable, name: str, parts: Sequence[tuple[str, Any]]) -> list[int]:
    """Ids of marker and text parts, the markers as tokens or spelled out."""
    m = get_dialect(name).markers
    ids: list[int] = []
    for kind, value in parts:
        known = getattr(markers, kind) if kind != "text" else ()
        ids += known if known else tokenizer().encode(value if kind == "text" else getattr(m, kind)).tolist()
    return ids


def parse(
    name: str, markers: MarkerTable, ids: Sequence[int], cuts: Sequence[int] = (), tools: Sequence[Tool] = (), **options: Any
) -> list[Delta]:
    parser = DialectParser(get_dialect(name), tokenizer(), markers, tools, **options)
    out: list[Delta] = []
    at = 0
    for cut in [*sorted(c for c in cuts if c < len(ids)), len(ids)]:
        out += parser.push(ids[at:cut])
        at = cut
    return merged([*out, *parser.finish()])


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind joined."""
    out: list[Delta] = []
    for delta in deltas:
        if out and type(out[-1]) is type(delta) and isinstance(delta, TextDelta | ReasoningDelta | CallDelta):
            last = out[-1]
            assert isinstance(last, TextDelta | ReasoningDelta | CallDelta)
            out[-1] = type(delta)(last.text + delta.text)
        else:
            out.append(delta)
    return out


def tool_for(name: str, arguments: dict[str, Any]) -> FunctionTool:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
    return FunctionTool(
        name=name,
        parameters={"type": "object", "properties": {k: {"type": kinds[type(v)]} for k, v in arguments.items()}},
    )


def unambiguous(name: str, arguments: dict[str, Any]) -> bool:
    """The tag dialect cannot hold a value that spells the end of itself."""
    if name != "qwen3_xml":
        return True
    return not any(isinstance(v, str) and "</parameter>" in v and "</function>" in v for v in arguments.values())


@tool_dialects
@forms
@quick
@given(thought=prose, said=prose, made=st.lists(calls, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_calls_survive_a_round_trip(name: str, as_tokens: bool, thought: str, said: str, made: list, cuts: list[int]):
    if not as_tokens and any(m in thought + said for m in ("<t", "</t", "<")):
        thought, said = "t", "s"  # spelled markers in prose are markers there
    made = [(n, a) for n, a in made if unambiguous(name, a)]
    if not as_tokens and name == "qwen3_xml":
        made = [(n, a) for n, a in made if "</tool_call>" not in json.dumps(a)]
    seen: set[str] = set()
    made = [c for c in made if not (c[0] in seen or seen.add(c[0]))]
    markers = table(name, as_tokens)
    parts: list[tuple[str, Any]] = [("think_open", 0), ("text", f"\n{thought}\n"), ("think_close", 0), ("text", f"\n\n{said}")]
    for called, arguments in made:
        block = get_dialect(name).write_call(called, arguments)
        parts += [("text", "\n"), ("call_open", 0), ("text", block), ("call_close", 0)]
    ids = [*write(markers, name, parts), *markers.turn_end]
    deltas = parse(name, markers, ids, cuts, [tool_for(*c) for c in made])
    expected: list[Delta] = [ReasoningDelta(thought)] if thought else []
    expected += [TextDelta(said)] if said else []
    assert deltas[: len(expected)] == expected
    rest = deltas[len(expected) :]
    assert len(rest) == 3 * len(made)
    for i, (called, arguments) in enumerate(made):
        opened, body, closed = rest[3 * i : 3 * i + 3]
        assert opened == CallOpen(called)
        assert isinstance(body, CallDelta)
        assert json.loads(body.text) == arguments
        assert closed == CallClose()


@dialects
@forms
@quick
@given(data=st.data())
def test_every_cut_gives_the_same(name: str, as_tokens: bool, data: st.DataObject):
    """Also for nonsense: markers in any order, broken calls, half characters."""
    markers = table(name, as_tokens)
    pieces = [
        ("text", '\n{"name": "f", "arguments": {"a": "b'),
        ("text", "<function=f>\n<parameter=a>\nb"),
        ("text", "</parameter>"),
        ("text", "</function>"),
        ("text", '"}}'),
        ("text", " x \n"),
        ("text", "é</thin"),
        ("text", "k>"),
        *((k, 0) for k in ("think_open", "think_close", "call_open", "call_close") if getattr(get_dialect(name).markers, k)),
    ]
    parts = data.draw(st.lists(st.sampled_from(pieces), max_size=10))
    ids = write(markers, name, parts)
    whole = parse(name, markers, ids)
    assert parse(name, markers, ids, range(len(ids))) == whole
    cuts = data.draw(st.lists(st.integers(0, max(len(ids), 1)), max_size=5))
    assert parse(name, markers, ids, cuts) == whole


@tool_dialects
@forms
def test_truncation_anywhere_keeps_what_was_written(name: str, as_tokens: bool):
    markers = table(name, as_tokens)
    block = get_dialect(name).write_call("get_weather", {"city": "Paris é", "days": 3})
    parts = [("text", "Look."), ("call_open", 0), ("text", block), ("call_close", 0)]
    ids = write(markers, name, parts)
    tool = tool_for("get_weather", {"city": "", "days": 1})
    deltas: list[Delta] = []
    for end in range(len(ids) + 1):
        deltas = parse(name, markers, ids[:end], tools=[tool])
        if CallClose() in deltas:
            body = next(d for d in deltas if isinstance(d, CallDelta))
            assert json.loads(body.text) == {"city": "Paris é", "days": 3}
        elif any(isinstance(d, CallOpen) for d in deltas):
            body = next((d for d in deltas if isinstance(d, CallDelta)), CallDelta(""))
            assert body.text == "" or body.text.startswith("{")
        else:
            text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
            written = tokenizer().decode(ids[:end]).strip()
            assert text.strip() == written
    assert deltas[-1] == CallClose()


@tool_dialects
def test_a_block_that_is_no_call_comes_back_as_text(name: str):
    markers = table(name, True)
    m = get_dialect(name).markers
    ids = write(markers, name, [("call_open", 0), ("text", "\nnonsense\n"), ("call_close", 0)])
    assert parse(name, markers, ids) == [TextDelta(f"{m.call_open}\nnonsense\n{m.call_close}")]


@tool_dialects
@forms
def test_a_bare_call_marker_ends_open_thinking(name: str, as_tokens: bool):
    markers = table(name, as_tokens)
    block = get_dialect(name).write_call("f", {})
    ids = write(markers, name, [("text", "I must call.\n"), ("call_open", 0), ("text", block), ("call_close", 0)])
    assert parse(name, markers, ids, opens_reasoning=True) == [
        ReasoningDelta("I must call."),
        CallOpen("f"),
        CallDelta("{}"),
        CallClose(),
    ]


@dialects
def test_spelled_markers_are_text_where_markers_are_tokens(name: str):
    markers = table(name, True)
    spelled = "say </think> and <tool_call> and </tool_call> plainly"
    ids = tokenizer().encode(spelled).tolist()
    assert parse(name, markers, ids, range(len(ids))) == [TextDelta(spelled)]


@tool_dialects
def test_free_text_tools_get_their_text(name: str):
    markers = table(name, True)
    text = 'print("hi")\n  # </tool_call>'
    ids = write(
        markers, name, [("call_open", 0), ("text", get_dialect(name).write_call("exec", {"input": text})), ("call_close", 0)]
    )
    tools = [CustomTool(name="exec")]
    assert parse(name, markers, ids, range(len(ids)), tools) == [CallOpen("exec", True), CallDelta(text), CallClose()]


@dialects
def test_half_characters_wait_for_the_rest(name: str):
    markers = table(name, True)
    ids = tokenizer().encode("né 日本 🙂").tolist()
    parser = DialectParser(get_dialect(name), tokenizer(), markers)
    shown = "".join(d.text for i in ids for d in parser.push([i]) if isinstance(d, TextDelta))
    assert "�" not in shown
    assert shown == "né 日本 🙂"
    assert parser.finish() == []


@dialects
def test_a_cut_character_is_not_lost(name: str):
    markers = table(name, True)
    ids = tokenizer().encode("日").tolist()[:-1]
    assert parse(name, markers, ids) == [TextDelta("�")]


def test_registry_names_what_it_knows():
    with pytest.raises(KeyError, match="hermes"):
        get_dialect("no such")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, NaN]", "[" * 100_000])
def test_what_json_cannot_hold_stays_a_string(text: str) -> None:
    assert typed_value(text, frozenset({"number", "array"})) == text
