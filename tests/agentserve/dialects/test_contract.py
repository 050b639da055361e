"""Every dialect, over the registry: calls survive a round trip, whatever the cut; what is broken is never lost."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import OutputRule
from agentserve.constraints.rules import Rules
from agentserve.dialects.base import Piece
from agentserve.dialects.registry import DIALECTS, get_dialect
from agentserve.dialects.schema import typed_value, types_of
from agentserve.dialects.stream import DialectParser
from agentserve.errors import InvalidValue
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta, ReasoningDelta, TextDelta
from agentserve.protocol.items import CustomTool, FunctionTool, Tool
from agentserve.protocol.responses import TextFormat
from agentserve.protocol.tool_choice import tool_choice
from agentserve.text.tokenizer import Tokenizer
from agentserve.worker.grammars import Grammars
from statecache.types import MarkerTable
from tests.agentserve.text.models import tokenizer_with
from tests.budget import examples

WITH_TOOLS = [name for name in DIALECTS if name != "plain"]
dialects = pytest.mark.parametrize("name", list(DIALECTS))
tool_dialects = pytest.mark.parametrize("name", WITH_TOOLS)
forms = pytest.mark.parametrize("as_tokens", [True, False], ids=["token markers", "text markers"])
quick = settings(
    max_examples=examples(14, 60),
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


def tokenizer_of(name: str, as_tokens: bool) -> Tokenizer:
    """One that has the dialect's markers as tokens (of those that hold others, only these), or has none of them."""
    markers = get_dialect(name).markers.all
    simple = tuple(m for m in markers if not any(other in m for other in markers if other != m))
    return tokenizer_with(simple + (get_dialect(name).turn_ends or ()) if as_tokens else ())


def ends_of(name: str, tok: Tokenizer) -> MarkerTable:
    return MarkerTable(turn_end=tok.marker_ids(*(get_dialect(name).turn_ends or ("<|im_end|>",))))


def encode(tok: Tokenizer, pieces: Sequence[Piece]) -> list[int]:
    """Ids of what a model writes: markers in tags as tokens where they are, texts as text."""
    ids: list[int] = []
    for text, tag in pieces:
        parts = re.split("(" + "|".join(map(re.escape, tok.markers)) + ")", text) if tag else [text]
        for part in parts:
            ids += [tok.markers[part].id] if tag and part in tok.markers else tok.encode(part).tolist() if part else []
    return ids


def block(name: str, called: str, arguments: dict[str, Any]) -> list[Piece]:
    """An answer that is just this call."""
    return get_dialect(name).write_answer("", "", [(called, arguments)])


def parse(
    name: str, tok: Tokenizer, ids: Sequence[int], cuts: Sequence[int] = (), tools: Sequence[Tool] = (), **options: Any
) -> list[Delta]:
    parser = DialectParser(get_dialect(name), tok, ends_of(name, tok), tools, **options)
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


def unambiguous(name: str, as_tokens: bool, arguments: dict[str, Any]) -> bool:
    """What a dialect can carry. Where all its tags hold tokens: everything, and so where arguments are JSON.

    Bare text between tags that are text cannot hold a closing tag with the opening tag of another parameter of the call
    behind it, or with all the rest of a call; the tests leave a little more out, to say it briefly.
    """
    if get_dialect(name).markers.call_open.startswith("[TOOL") or name in ("hermes", "deepseek_v3", "kimi_k2"):
        return True
    if name == "harmony":
        return as_tokens or "<|" not in json.dumps(arguments)
    bare = [value for value in arguments.values() if isinstance(value, str)]
    if as_tokens and name not in ("qwen3_xml", "minimax"):
        return True
    if as_tokens:
        return not any("</parameter>" in value and value.rstrip().endswith(("</function>", "</invoke>")) for value in bare)
    return not any("</" in value for value in bare)


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


# ── answers that must have a form ────────────────────────────────────────────────────────────────────────────────

STRICT: Any = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 40}, "n": {"type": ["integer", "null"]}, "o": {"type": "array"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
STRICT_TOOL = FunctionTool(name="f", parameters=STRICT, strict=True)


@functools.cache
def grammars_of(tok: Tokenizer) -> Grammars:
    """As a worker has: handing a vocabulary to the compiler takes longer than most grammars."""
    return Grammars(lambda: tok, tok.vocab_size)


def accepts(name: str, tok: Tokenizer, rule: OutputRule, pieces: Sequence[Piece]) -> bool:
    """Whether the grammar of an answer takes these ids, and then the end of the turn."""
    dialect = get_dialect(name)
    writer = LarkWriter(lambda text: tok.markers[text].id if text in tok.markers else None, dialect.markers.all)
    ends = list(ends_of(name, tok).turn_end)
    grammar = dialect.answer_grammar(rule, writer, "allowed")
    mask = grammars_of(tok).compile(grammar, ends).result()
    ids = encode(tok, pieces)
    for token in [*ids, *([] if ids[-1] in ends else ends[:1])]:
        bits = np.unpackbits(mask.words().view(np.uint8), bitorder="little")
        if not bits[token]:
            return False
        mask.accept(token)
    return True


def rule_for(choice: Any, *tools: Tool, form: TextFormat | None = None) -> OutputRule:
    made = Rules().rule(form, tool_choice(choice), tools, one_call=False)
    assert made is not None
    return made


@tool_dialects
@forms
def test_a_grammar_takes_what_the_dialect_writes_and_nothing_else(name: str, as_tokens: bool):
    tok = tokenizer_of(name, as_tokens)
    if not as_tokens and get_dialect(name).turn_ends is not None:
        tok = tokenizer_with(get_dialect(name).turn_ends or ())
    write = get_dialect(name).write_answer
    good: list[Any] = [{"a": "x é", "n": 3}, {"a": "", "n": None, "o": [1, "<b>"]}]
    required, auto, none = (rule_for(choice, STRICT_TOOL) for choice in ("required", "auto", "none"))
    for arguments in good:
        for thought in ("", "hm"):
            assert accepts(name, tok, required, write(thought, "", [("f", arguments)]))
            assert accepts(name, tok, auto, write(thought, "Look:" if name != "plain" else "", [("f", arguments)]))
            assert not accepts(name, tok, none, write(thought, "", [("f", arguments)]))
    for wrong in ({"a": "x"}, {"a": "x" * 41, "n": 1}, {"a": "x", "n": 1.5}, {"a": "x", "n": 1, "z": 1}):
        assert not accepts(name, tok, required, write("", "", [("f", wrong)]))
        assert not accepts(name, tok, auto, write("", "", [("f", wrong)]))
    assert not accepts(name, tok, required, write("", "", [("g", good[0])]))
    assert not accepts(name, tok, required, write("", "Just text.", []))
    for rule in (auto, none):
        assert accepts(name, tok, rule, write("hm", "Just text.", []))
    if not get_dialect(name).one_call:
        assert accepts(name, tok, required, write("", "", [("f", good[0]), ("f", good[1])]))
        assert accepts(name, tok, auto, write("", "", [("f", good[0]), ("f", good[1])]))


@dialects
def test_a_form_of_text_comes_behind_the_thinking(name: str):
    tok = tokenizer_of(name, True)
    rule = rule_for(None, form=TextFormat(type="json_schema", schema={"type": "array", "items": {"type": "integer"}}))
    write = get_dialect(name).write_answer
    for thought in ("", "I think [1]"):
        pieces = write(thought, "[1, 2]", [])
        assert accepts(name, tok, rule, pieces)
        assert parse(name, tok, encode(tok, pieces), literal=True)[-1] == TextDelta("[1, 2]")
        assert not accepts(name, tok, rule, write(thought, '["x"]', []))


@tool_dialects
@pytest.mark.parametrize(
    ("part", "root"),
    [
        ({"$ref": "#/properties/b"}, {}),
        ({"type": "array", "items": {"$ref": "#/properties/b"}}, {}),
        ({"$ref": "#/$defs/any"}, {"$defs": {"any": True}}),
        ({"$ref": "#/$defs/one"}, {"$defs": {"one": {"$ref": "#/$defs/two"}, "two": {"type": "string", "maxLength": 3}}}),
    ],
)
def test_references_are_followed_wherever_they_lead(name: str, part: Any, root: Any):
    """Also of a tool that is not strict: its array of objects can be given, whatever the schema is made of."""
    properties = {"a": part, "b": {"type": "string", "maxLength": 3}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False, **root}
    tok, write = tokenizer_of(name, True), get_dialect(name).write_answer
    array = part.get("type") == "array"
    for strict in (True, False):
        rule = rule_for("required", FunctionTool(name="f", parameters=schema, strict=strict))
        assert accepts(name, tok, rule, write("", "", [("f", {"a": ["x"] if array else "x"})]))
        long = write("", "", [("f", {"a": ["long"] if array else "long"})])
        assert accepts(name, tok, rule, long) is ("any" in str(part))


@tool_dialects
def test_a_schema_that_refers_to_itself_is_followed(name: str):
    tree = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "more": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    rule = rule_for("required", FunctionTool(name="f", parameters=tree, strict=True))
    tok, write = tokenizer_of(name, True), get_dialect(name).write_answer
    assert accepts(name, tok, rule, write("", "", [("f", {"n": 1, "more": [{"n": 2, "more": [{"n": 3}]}]})]))
    assert not accepts(name, tok, rule, write("", "", [("f", {"n": 1, "more": [{"n": "x"}]})]))


@pytest.mark.parametrize("name", ["deepseek_dsml", "deepseek_dsml_v4"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "properties": {"a": {}, "b": {}}},
        {"type": "object", "properties": {"a": {"type": ["array", "string"]}, "b": {"type": ["string", "object"]}}},
    ],
)
def test_where_tags_tell_strings_from_json_a_loose_tool_takes_both(name: str, schema: Any):
    tok, write = tokenizer_of(name, True), get_dialect(name).write_answer
    rule = rule_for("required", FunctionTool(name="f", parameters=schema))
    arguments: Any = {"a": [1, {"x": None}], "b": "bare text"}
    assert accepts(name, tok, rule, write("", "", [("f", arguments)]))
    assert accepts(name, tok, rule, write("", "", [("f", {"a": "bare"})]))


def test_types_of_a_schema_that_refers_to_itself_twice_are_found() -> None:
    both = {"anyOf": [{"$ref": "#/$defs/v"}, {"$ref": "#/$defs/v"}, {"type": "array"}]}
    assert types_of(both, {"$defs": {"v": both}}) == {"array"}


def test_registry_names_what_it_knows():
    with pytest.raises(KeyError, match="hermes"):
        get_dialect("no such")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "[1, NaN]", "[" * 100_000])
def test_what_json_cannot_hold_stays_a_string(text: str) -> None:
    assert typed_value(text, frozenset({"number", "array"})) == text


# ── custom tools whose text has a grammar ────────────────────────────────────────────────────────────────────────

PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change+

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("@@" | "+" | "-" | " ") /(.*)/ LF  // one line
%import common.LF
"""
"""Like what Codex sends for its patches."""
PATCHED = '*** Begin Patch\n*** Update File: a b.py\n@@ def f():\n-\tx = "a\\n" # </b>\n+\ty = 1 é\n*** End Patch'
SMALL = r'start: "é" WORD ("\"" | "\n")? [DIGITS]' + "\nWORD: /[^0-9\\s]+/\nDIGITS: /\\d{2,3}/i\n"


def custom(definition: str, syntax: str = "lark") -> CustomTool:
    return CustomTool(name="exec", format={"type": "grammar", "syntax": syntax, "definition": definition})


@tool_dialects
@forms
@pytest.mark.parametrize(
    ("tool", "good", "bad"),
    [
        (custom(PATCH), [PATCHED, PATCHED + "\n"], [PATCHED[:-1], "x" + PATCHED, PATCHED.replace("@@", "!")]),
        (custom(SMALL), ["éa", 'éb\\"12', "é</\n123"], ["é", "éa1", "a", "éa\n1234"]),
        (
            custom(r"^(SELECT|select) [^;\"]+;$", "regex"),
            ["select a\n/b\\;", "SELECT <b>;"],
            ["select ;;", "drop a;"],
        ),
        (custom(r".*\\\d", "regex"), ["\\1", 'a"b\t\\9'], ["a", "\n\\1"]),
    ],
)
def test_free_text_is_held_to_its_tool_s_grammar(name: str, as_tokens: bool, tool: CustomTool, good: list[str], bad: list[str]):
    tok = tokenizer_of(name, as_tokens)
    if not as_tokens and get_dialect(name).turn_ends is not None:
        tok = tokenizer_with(get_dialect(name).turn_ends or ())
    write = get_dialect(name).write_answer
    for rule in (rule_for("required", tool), rule_for("auto", tool)):
        for text in good:
            pieces = write("", "", [("exec", {"input": text})])
            assert accepts(name, tok, rule, pieces), text
        for text in bad:
            assert not accepts(name, tok, rule, write("", "", [("exec", {"input": text})])), text


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ({"type": "xml"}, "format.type"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "x"}, "format.syntax"),
        ({"type": "grammar", "syntax": "lark"}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "x"}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "start: %json {}"}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": 'start: "a" "b"\n%ignore / /'}, "format.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": "a(?=b)"}, "format.definition"),
        ({"type": "grammar", "syntax": "regex", "definition": r"\p{L}+"}, "format.definition"),
        ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "(?i)x"}}, "format.definition"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused_by_name(form: Any, path: str):
    with pytest.raises(InvalidValue) as caught:
        rule_for("auto", CustomTool(name="exec", format=form))
    assert caught.value.param == f"tools.exec.{path}"


def test_text_without_a_grammar_is_free():
    for form in (None, {"type": "text"}):
        assert Rules().rule(None, tool_choice("auto"), [CustomTool(name="exec", format=form)], one_call=False) is None
