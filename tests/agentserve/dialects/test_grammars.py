"""Every dialect's grammar, over the registry: it takes what the dialect writes in the form that was asked for, nothing else."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agentserve.constraints.lark import LarkWriter
from agentserve.constraints.output import OutputRule
from agentserve.constraints.rules import Rules
from agentserve.dialects.base import Piece
from agentserve.dialects.registry import get_dialect
from agentserve.errors import InvalidValue
from agentserve.interfaces import TextDelta
from agentserve.protocol.items import CustomTool, FunctionTool, Tool
from agentserve.protocol.responses import TextFormat
from agentserve.protocol.tool_choice import tool_choice
from agentserve.text.tokenizer import Tokenizer
from agentserve.worker.grammars import Grammars
from tests.agentserve.dialects.calls import (
    dialects,
    encode,
    ends_of,
    forms,
    parse,
    tokenizer_of,
    tool_dialects,
)
from tests.agentserve.text.models import tokenizer_with

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
