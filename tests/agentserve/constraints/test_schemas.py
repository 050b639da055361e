"""Which schemas are enforced, which are refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.constraints.endless import MOST_VISITS, Search, endless_reference
from agentserve.constraints.output import ANY_OBJECT
from agentserve.constraints.rules import Rules
from agentserve.constraints.schemas import MAX_SCHEMA_BYTES, enforceable
from agentserve.errors import InvalidValue, UnsupportedValue
from agentserve.protocol.items import CustomTool, FunctionTool
from agentserve.protocol.responses import TextFormat
from agentserve.protocol.tool_choice import ToolChoice, tool_choice

WHERE = "text.format.schema"


def rule_of(schema: Any, *, strict: bool | None = True) -> Any:
    form = TextFormat(type="json_schema", schema=schema, strict=strict)
    made = Rules().rule(form, ToolChoice(), (), one_call=False)
    assert made is not None
    assert made.form is not None
    return made.form.content


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"not": {}}, "not"),
        ({"properties": {"a": {"items": {"if": {}}}}}, "properties.a.items.if"),
        ({"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, "anyOf[1].uniqueItems"),
        ({"properties": {"a": {"$ref": "https://x/y"}}}, "properties.a.$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "properties.a.$ref"),
        ({"properties": {"a": {"type": "str"}}}, "properties.a.type"),
        ({"properties": {"a": {"enum": []}}}, "properties.a.enum"),
        ({"properties": {"a": 5}}, "properties.a"),
        ({"properties": {"a": {"properties": {"b": {"pattern": "a(?=b)"}}}}}, "properties.a.properties.b"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]}}}, "properties.a"),
        ({"$defs": {"d": {"pattern": "("}}, "properties": {"a": {"$ref": "#/$defs/d"}}}, "$defs.d"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, ""),
        ({"properties": {"a": {"format": ["date"]}}}, "properties.a.format"),
        ({"anyOf": [{"type": "null"}], "$ref": "#/anyOf/\u00b2"}, "$ref"),
        ({"anyOf": [{"type": "null"}], "$ref": "#/anyOf/" + "9" * 5000}, "$ref"),
        ({"$ref": "#"}, "$ref"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "properties.a.$ref"),
        ({"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#"}]}}, "items.anyOf[0].$ref"),
        (
            {
                "$defs": {
                    "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                    "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1},
                },
                "properties": {"x": {"type": ["string", "null"]}, "y": {"$ref": "#/$defs/a"}},
            },
            "$defs.a.properties.b.$ref",
        ),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$defs.a.$ref"),
    ],
)
def test_what_cannot_be_enforced_is_named_by_its_path(schema: Any, path: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        rule_of(schema)
    assert caught.value.param == (f"{WHERE}.{path}" if path else WHERE)


def test_output_that_need_not_be_exact_is_held_to_what_can_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}, "if": {}}
    assert rule_of(schema, strict=None) == {"type": "object", "properties": {"a": {"type": "string"}}}
    assert rule_of({"type": "string", "pattern": "("}, strict=False) == {}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "string"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "minItems": 1, "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}},
    ],
)
def test_a_schema_may_lead_back_to_itself_where_a_value_need_not(schema: Any) -> None:
    assert rule_of({**schema, "additionalProperties": False} if schema["type"] == "object" else schema)


def test_arguments_that_would_never_end_are_left_to_the_model_where_they_need_not_be_exact() -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tool = FunctionTool(name="f", parameters=endless)
    rule = Rules().rule(None, ToolChoice("required"), (tool,), one_call=False)
    assert rule is not None
    assert rule.schemas["f"] == ANY_OBJECT


def test_a_schema_that_is_laborious_to_follow_does_not_hold_up_the_server() -> None:
    """Each round over all of it finds one more reference that ends; without a bound these are 2,000 rounds."""
    links = {f"d{i}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)}
    visits = Search()
    schema = {"$defs": links | {"d2000": {"type": "null"}}, "allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(2000)]}
    assert endless_reference(schema, visits) == ""
    assert visits.visits <= MOST_VISITS + 2000


def test_words_about_a_schema_are_not_part_of_it() -> None:
    schema = {"title": "T", "x-guidance": {"lenient": True}, "type": "string", "format": "made-up", "default": "x"}
    assert enforceable(schema, WHERE, exact=True) == {"type": "string"}


def test_tuples_of_older_drafts_become_those_of_the_newest() -> None:
    old = {"type": "array", "items": [{"type": "string"}], "additionalItems": False}
    assert enforceable(old, WHERE, exact=True) == {"type": "array", "prefixItems": [{"type": "string"}], "items": False}


def test_size_and_depth_have_limits() -> None:
    with pytest.raises(InvalidValue, match="at most"):
        rule_of({"enum": ["x" * MAX_SCHEMA_BYTES]})
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(InvalidValue, match="levels"):
        rule_of(deep)


TOOLS = (
    FunctionTool(name="f", parameters={"type": "object", "properties": {"a": {"not": {}}}}),
    FunctionTool(name="g", parameters={"type": "object", "properties": {"a": {"type": "string"}}}, strict=True),
    CustomTool(name="c"),
)


def test_only_what_limits_an_answer_makes_a_rule() -> None:
    rules = Rules()
    assert rules.rule(None, ToolChoice(), TOOLS[:1], one_call=False) is None
    assert rules.rule(TextFormat(type="text"), ToolChoice(), (), one_call=False) is None
    for tools in (TOOLS, ()):  # a model may call what nobody offered
        none = rules.rule(None, ToolChoice("none"), tools, one_call=False)
        assert none is not None
        assert (none.calls, none.schemas) == ("none", {})


def test_a_tool_that_is_not_strict_is_held_to_what_is_possible() -> None:
    rule = Rules().rule(None, tool_choice("required"), TOOLS, one_call=True)
    assert rule is not None
    assert list(rule.schemas) == ["f", "g", "c"]
    assert rule.schemas["f"] == {"type": "object", "properties": {"a": {}}}
    assert (rule.exact, rule.one_call) == (frozenset({"g"}), True)
    broken = FunctionTool(name="f", parameters={"type": "object", "properties": {"a": {"pattern": "("}}})
    rule = Rules().rule(None, tool_choice("required"), [broken], one_call=False)
    assert rule is not None
    assert rule.schemas["f"] == ANY_OBJECT


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, "auto", None),
        ("required", "required", None),
        ({"type": "function", "name": "g"}, "required", ("g",)),
        ({"type": "function", "function": {"name": "g"}}, "required", ("g",)),
        ({"type": "custom", "name": "c"}, "required", ("c",)),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, "auto", ("g",)),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            "required",
            ("f",),
        ),
    ],
)
def test_choices_of_both_apis(choice: Any, mode: str, names: Any) -> None:
    assert tool_choice(choice) == ToolChoice(mode, names)  # type: ignore[arg-type]
    rule = Rules().rule(None, tool_choice(choice), TOOLS, one_call=False)
    assert rule is not None
    assert list(rule.schemas) == list(names or ("f", "g", "c"))


def test_a_choice_among_tools_that_are_not_there_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no tool 'x'"):
        Rules().rule(None, ToolChoice("required", ("x",)), TOOLS, one_call=False)
    with pytest.raises(UnsupportedValue):
        tool_choice({"type": "mcp"})


@pytest.mark.parametrize("definition", ["start: start", 'start: b "x"\nb: c\nc: b'])
def test_a_grammar_that_no_text_has_is_refused(definition: str) -> None:
    form = TextFormat(type="grammar", syntax="lark", definition=definition)
    with pytest.raises(InvalidValue, match="no text has this form") as caught:
        Rules().rule(form, ToolChoice(), (), one_call=False)
    assert caught.value.param == "text.format.definition"


@pytest.mark.parametrize("member", ["const", "title", "default"])
def test_a_schema_may_hold_integers_of_any_size(member: str) -> None:
    assert rule_of({"type": "integer", member: 10**30}, strict=False) is not None


def test_a_rule_is_made_and_checked_once() -> None:
    rules, seen = Rules(), []
    made = [rules.rule(None, tool_choice("required"), TOOLS, one_call=False, check=seen.append) for _ in range(3)]
    assert made[0] is made[1] is made[2]
    assert len(seen) == 1


@pytest.mark.parametrize("key", ["required", "pattern", "minLength", "maxItems", "multipleOf", "minimum"])
@pytest.mark.parametrize("value", [["é" * 200, 7], {"a": "é" * 200}, True])
def test_a_keyword_of_another_kind_is_refused_before_a_library_quotes_it(key: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        enforceable({"type": "object", key: value}, "schema", exact=True)
    assert refused.value.param == f"schema.{key}"
    assert "é" not in str(refused.value)
