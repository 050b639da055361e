"""Every dialect, over the registry: calls survive a round trip, whatever the cut; what is broken is never lost. Grammars are
in test_grammars.py."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.dialects.base import Piece
from agentserve.dialects.registry import get_dialect
from agentserve.dialects.schema import typed_value, types_of
from agentserve.dialects.stream import DialectParser
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta, ReasoningDelta, TextDelta
from agentserve.protocol.items import CustomTool, FunctionTool
from tests.agentserve.dialects.calls import (
    WITH_TOOLS,
    block,
    calls,
    dialects,
    encode,
    ends_of,
    forms,
    parse,
    prose,
    quick,
    tokenizer_of,
    tool_dialects,
    tool_for,
    unambiguous,
)


@tool_dialects
@forms
@quick
@given(thought=prose, said=prose, made=st.lists(calls, min_size=1, max_size=3), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_calls_survive_a_round_trip(name: str, as_tokens: bool, thought: str, said: str, made: list, cuts: list[int]):
    if not as_tokens and any(m in thought + said for m in "<["):
        thought, said = "t", "s"  # spelled markers in prose are markers there
    made = [(n, a) for n, a in made if unambiguous(name, as_tokens, a)]
    seen: set[str] = set()
    made = [c for c in made if not (c[0] in seen or seen.add(c[0]))][: 1 if get_dialect(name).one_call else 3]
    tok = tokenizer_of(name, as_tokens)
    ids = encode(tok, get_dialect(name).write_answer(thought, said, made))
    deltas = parse(name, tok, ids, cuts, [tool_for(*c) for c in made])
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
    tok = tokenizer_of(name, as_tokens)
    dialect = get_dialect(name)
    call = dialect.write_answer("", "", [("f", {"a": "b</x>", "n": 1})]) if name != "plain" else []
    pieces = [
        Piece('\n{"name": "f", "arguments": {"a": "b'),
        Piece("<function=f>\n<parameter=a>\nb"),
        Piece("</parameter>"),
        Piece("</function>"),
        Piece('"}}'),
        Piece(" x \n"),
        Piece("é</thin"),
        Piece("k>"),
        Piece("analysis to=functions.f"),
        *call,
        *(Piece(marker, True) for marker in dialect.markers.all),
    ]
    parts = data.draw(st.lists(st.sampled_from(pieces), max_size=12))
    ids = encode(tok, parts)
    whole = parse(name, tok, ids)
    assert parse(name, tok, ids, range(len(ids))) == whole
    cuts = data.draw(st.lists(st.integers(0, max(len(ids), 1)), max_size=5))
    assert parse(name, tok, ids, cuts) == whole
    for delta in whole:
        if not isinstance(delta, CallClose):
            (delta.name if isinstance(delta, CallOpen) else delta.text).encode()


@tool_dialects
@forms
def test_truncation_anywhere_keeps_what_was_written(name: str, as_tokens: bool):
    tok = tokenizer_of(name, as_tokens)
    ids = encode(tok, get_dialect(name).write_answer("", "Look.", [("get_weather", {"city": "Paris é", "days": 3})]))
    tool = tool_for("get_weather", {"city": "", "days": 1})
    deltas: list[Delta] = []
    for end in range(len(ids) + 1):
        deltas = parse(name, tok, ids[:end], tools=[tool])
        if CallClose() in deltas:
            body = next(d for d in deltas if isinstance(d, CallDelta))
            assert json.loads(body.text) == {"city": "Paris é", "days": 3}
        elif any(isinstance(d, CallOpen) for d in deltas):
            body = next((d for d in deltas if isinstance(d, CallDelta)), CallDelta(""))
            assert body.text == "" or body.text.startswith("{")
        elif name != "harmony":  # whose heads are no text
            text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
            assert "".join(text.split()) == "".join(tok.decode(ids[:end]).split())
    assert deltas[-1] == CallClose()
    assert deltas[0] == TextDelta("Look.")


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if get_dialect(name).markers.call_open])
@forms
def test_a_block_that_is_no_call_comes_back_as_text(name: str, as_tokens: bool):
    tok = tokenizer_of(name, as_tokens)
    m = get_dialect(name).markers
    ids = encode(tok, [Piece(m.call_open, True), Piece("\nnonsense\n"), Piece(m.call_close, True)])
    assert parse(name, tok, ids) == [TextDelta(f"{m.call_open}\nnonsense\n{m.call_close}")]


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if get_dialect(name).markers.call_open])
@forms
def test_a_bare_call_marker_ends_open_thinking(name: str, as_tokens: bool):
    tok = tokenizer_of(name, as_tokens)
    ids = encode(tok, [Piece("I must call.\n"), *block(name, "f", {})])
    tools = [FunctionTool(name="f")]
    assert parse(name, tok, ids, range(len(ids)), tools, opens_reasoning=True) == [
        ReasoningDelta("I must call."),
        CallOpen("f"),
        CallDelta("{}"),
        CallClose(),
    ]


@dialects
def test_spelled_markers_are_text_where_markers_are_tokens(name: str):
    tok = tokenizer_of(name, True)
    spelled = "say </think> and <tool_call> and " + " ".join(get_dialect(name).markers.all) + " plainly"
    ids = tok.encode(spelled).tolist()
    if name != "harmony":
        assert parse(name, tok, ids, range(len(ids))) == [TextDelta(spelled)]
    ids = encode(tok, get_dialect(name).write_answer(spelled, spelled, []))
    assert parse(name, tok, ids, range(len(ids))) == [ReasoningDelta(spelled), TextDelta(spelled)]


@tool_dialects
def test_markers_in_arguments_stay_text_where_markers_are_tokens(name: str):
    """Also the tags of the call itself, all of them one after the other."""
    tok = tokenizer_of(name, True)
    own = "".join(piece.text for piece in block(name, "f", {"a": "x"}))
    arguments = {"a": f"see {own} and more", "b": 2}
    ids = encode(tok, block(name, "f", arguments))
    opened, body, closed = parse(name, tok, ids, range(len(ids)), [tool_for("f", arguments)])
    assert (opened, closed) == (CallOpen("f"), CallClose())
    assert isinstance(body, CallDelta)
    assert json.loads(body.text) == arguments


@tool_dialects
@forms
def test_free_text_tools_get_their_text(name: str, as_tokens: bool):
    tok = tokenizer_of(name, as_tokens)
    text = 'print("hi")\n  # done </b>'
    ids = encode(tok, block(name, "exec", {"input": text}))
    tools = [CustomTool(name="exec")]
    assert parse(name, tok, ids, range(len(ids)), tools) == [CallOpen("exec", True), CallDelta(text), CallClose()]


@dialects
def test_half_characters_wait_for_the_rest(name: str):
    tok = tokenizer_of(name, True)
    ids = encode(tok, get_dialect(name).write_answer("", "né 日本 🙂", []))
    parser = DialectParser(get_dialect(name), tok, ends_of(name, tok))
    shown = "".join(d.text for i in ids for d in parser.push([i]) if isinstance(d, TextDelta))
    assert "�" not in shown
    assert shown == "né 日本 🙂"
    assert parser.finish() == []


@dialects
def test_a_cut_character_is_not_lost(name: str):
    tok = tokenizer_of(name, True)
    ids = tok.encode("日").tolist()[:-1]
    assert parse(name, tok, ids) == [TextDelta("�")]


def test_types_of_a_schema_that_refers_to_itself_twice_are_found() -> None:
    both = {"anyOf": [{"$ref": "#/$defs/v"}, {"$ref": "#/$defs/v"}, {"type": "array"}]}
    assert types_of(both, {"$defs": {"v": both}}) == {"array"}


def test_registry_names_what_it_knows():
    with pytest.raises(KeyError, match="hermes"):
        get_dialect("no such")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, NaN]", "[" * 100_000])
def test_what_json_cannot_hold_stays_a_string(text: str) -> None:
    assert typed_value(text, frozenset({"number", "array"})) == text
