"""Arguments in tags, one tag for each: strings as bare text, everything else as JSON. A value's text, and the grammar.

A bare text has no end but its closing tag, so it may not contain that; and what a schema says of a string must be said as a
regular expression.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from agentserve.constraints.lark import LarkWriter, between_slashes, choice, has_outer_bar, literal
from agentserve.constraints.output import TEXT_GRAMMAR, Schema
from agentserve.constraints.references import resolve
from agentserve.constraints.schemas import LISTS, MAPS, NESTED
from agentserve.dialects.schema import types_of
from agentserve.errors import UnsupportedValue
from agentserve.protocol.items import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """opening(name, whether a bare string follows): the opening tag. closing: behind each value.

    core: the part of `closing` by which a reader knows the end of a value. tells: the opening tag says which of the two
    follows; else a reader knows it by the schema, and only what the schema calls no string is JSON.
    """

    opening: Callable[[str, bool], str]
    closing: str
    core: str
    tells: bool = False


def value_text(value: Any) -> str:
    """What stands between the tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_NAME = "\x00"
_ABOUT_OBJECTS = ("anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties", "const", "enum")


def parameter_rules(writer: LarkWriter, tool: str, schema: Schema, tags: ParameterTags) -> str:
    """All arguments of a call. Raises UnsupportedValue for what cannot be said so."""
    where = f"tools.{tool}.parameters"
    schema = _followed(_lifted(schema), where)
    for key in _ABOUT_OBJECTS:
        if key in schema:
            raise UnsupportedValue(f"'{key}' cannot be enforced for a whole call in this model's tool syntax", f"{where}.{key}")
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = schema.get("required") or []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts: list[str] = []
    for key, part in properties.items():
        if part is False:
            continue
        body = writer.rule(_parameter(writer, key, part, definitions, tags, f"{where}.properties.{key}"))
        parts.append(body if key in required else f"{body}?")
    parts += [writer.rule(_parameter(writer, key, {}, {}, tags, where)) for key in required if key not in properties]
    if not properties and schema.get("additionalProperties", True) is not False:
        parts.append(f"{_any_parameter(writer, tags)}*")
    return " ".join(parts)


def _parameter(writer: LarkWriter, key: str, schema: Any, definitions: Schema, tags: ParameterTags, where: str) -> str:
    whole = {**definitions, **schema} if isinstance(schema, dict) else {}
    types = types_of(whole, whole)
    if types == {"string"} or not (types or tags.tells):
        return f"{writer.tag(tags.opening(key, True))} {_bare(writer, whole, tags, where)}"
    forms = [f"{writer.tag(tags.opening(key, False))} {writer.json(whole)} {writer.tag(tags.closing)}"]
    if tags.tells and (not types or "string" in types):
        with contextlib.suppress(UnsupportedValue):  # then its strings are told as JSON too
            forms.insert(0, f"{writer.tag(tags.opening(key, True))} {_bare(writer, whole, tags, where)}")
    return choice(forms)


def _bare(writer: LarkWriter, schema: Schema, tags: ParameterTags, where: str) -> str:
    schema = _followed(schema, where)
    if TEXT_GRAMMAR in schema:
        return writer.value_upto(tags.closing, tags.core, writer.free_text(schema[TEXT_GRAMMAR], in_json=False))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = [value for value in values if isinstance(value, str) and tags.core not in value]
        if not texts:
            raise UnsupportedValue("no value that this model's tool syntax can hold", where)
        return f"{choice([literal(text) for text in texts])} {writer.tag(tags.closing)}"
    for key in schema:
        if key in ("anyOf", "oneOf", "allOf"):
            raise UnsupportedValue(f"'{key}' of strings cannot be enforced in this model's tool syntax", f"{where}.{key}")
    matching: list[str] = []
    if "pattern" in schema:
        matching.append(_search(schema["pattern"], f"{where}.pattern"))
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        matching.append(f"/(?s:.){{{low},{'' if high is None else high}}}/")
    return writer.value_upto(tags.closing, tags.core, " & ".join(matching))


def _followed(schema: Schema, where: str) -> Schema:
    """What a schema that is a reference refers to, with what stands beside it. Raises UnsupportedValue."""
    for _ in range(MAX_DEPTH):
        if "$ref" not in schema:
            return schema
        found = resolve(schema, schema["$ref"])
        found = {} if found is True else found
        if not isinstance(found, dict):
            break
        schema = {**{k: v for k, v in schema.items() if k != "$ref"}, **found}
    raise UnsupportedValue("it refers to no schema that this model's tool syntax can hold", f"{where}.$ref")


def _lifted(root: Schema) -> Schema:
    """The same schema with every reference into `$defs`: each parameter is a grammar of its own, and those are all it is given
    of the rest."""
    definitions: dict[str, Any] = dict(root.get("$defs") or {})
    declared = tuple(definitions)
    names: dict[str, str] = {}

    def walk(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        out: Schema = {}
        for key, value in node.items():
            if key in MAPS:
                out[key] = {name: walk(part) for name, part in value.items()}
            elif key in LISTS:
                out[key] = [walk(part) for part in value]
            elif key == "$ref":
                out[key] = lift(value)
            else:
                out[key] = walk(value) if key in NESTED else value
        return out

    def lift(reference: str) -> str:
        if reference.startswith(("#/$defs/", "#/definitions/")):
            return reference
        if reference not in names:
            name = names[reference] = next(n for i in count(len(names)) if (n := f"lifted{i}") not in definitions)
            definitions[name] = {}  # taken
            definitions[name] = walk(resolve(root, reference))
        return f"#/$defs/{names[reference]}"

    root = {key: value for key, value in root.items() if key != "$defs"}
    made = walk(root)
    for name in declared:
        definitions[name] = walk(definitions[name])
    return {**made, "$defs": definitions} if definitions else made


def _search(pattern: str, where: str) -> str:
    """A pattern that is looked for → one for the whole text. Anchors only at the ends."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and has_outer_bar(inner):
        raise UnsupportedValue("'|' beside '^' or '$' cannot be enforced in this model's tool syntax: put it in a group", where)
    lead, trail = ("" if begins else "(?s:.*)"), ("" if ends else "(?s:.*)")
    return f"/{lead}(?:{between_slashes(inner)}){trail}/"


def _any_parameter(writer: LarkWriter, tags: ParameterTags) -> str:
    """A parameter of any name, for a tool that declares none: a bare string, and where tags tell the two apart also JSON."""
    name = writer.terminal(r"/[A-Za-z_][A-Za-z0-9_.-]*/")
    forms: list[str] = []
    for bare in (True, False) if tags.tells else (True,):
        before, after = tags.opening(_NAME, bare).split(_NAME)
        json = f"{writer.json({})} {writer.tag(tags.closing)}"
        value = writer.value_upto(tags.closing, tags.core) if bare else json
        forms.append(writer.rule(f"{writer.tag(before)} {name} {writer.tag(after)} {value}"))
    return choice(forms)
