"""Types of a tool's parameters, read from its JSON schema, and bare text → a value of that type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentserve.constraints.references import resolve
from agentserve.protocol.items import CUSTOM_INPUT, MAX_DEPTH, FunctionTool, Tool

Types = frozenset[str]
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}


def parameter_types(name: str, tools: Sequence[Tool]) -> Mapping[str, Types]:
    """JSON type names of each parameter of a tool; absent where the schema says nothing."""
    tool = next((t for t in tools if isinstance(t, FunctionTool) and t.name == name), None)
    root = (tool.parameters or {}) if tool else {}
    properties = root.get("properties")
    if not isinstance(properties, dict):
        return {}
    found = {key: types_of(schema, root) for key, schema in properties.items()}
    return {key: types for key, types in found.items() if types}


def parameter_names(name: str, tools: Sequence[Tool]) -> frozenset[str]:
    """Parameters that a tool declares."""
    tool = next((t for t in tools if t.name == name), None)
    if not isinstance(tool, FunctionTool):
        return frozenset((CUSTOM_INPUT,)) if tool is not None else frozenset()
    properties = (tool.parameters or {}).get("properties")
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def types_of(schema: Any, root: Mapping[str, Any], followed: set[str] | None = None) -> Types:
    """Type names that values of a schema may have; none if it does not say. root: what its references refer to.

    followed: references that were looked at; each is once, since schemas may go round in circles, and in many at a time.
    """
    if not isinstance(schema, dict):
        return frozenset()
    followed = set() if followed is None else followed
    if isinstance(reference := schema.get("$ref"), str):
        if reference in followed or len(followed) > MAX_DEPTH:
            return frozenset()
        followed.add(reference)
        try:
            return types_of(resolve(root, reference), root, followed)
        except LookupError:
            return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return frozenset().union(*(types_of(s, root, followed) for s in schema[word]))
    if isinstance(schema.get("allOf"), list):
        return next((found for part in schema["allOf"] if (found := types_of(part, root, followed))), frozenset())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(_NAMES[type(v)] for v in values if type(v) in _NAMES)


def typed_value(text: str, types: Types | None) -> Any:
    """The value that `text` stands for. What fits none of the types stays a string: the tool's own error says more."""
    if not types or types == {"string"}:
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = json.loads(word)
        json.dumps(value, allow_nan=False)  # NaN and 1e999 are read, but are no JSON
    except (ValueError, RecursionError):
        return text
    kind = _NAMES[type(value)]
    if kind in types or (kind == "integer" and "number" in types):
        return value
    if kind == "number" and "integer" in types and float(value).is_integer():
        return int(value)
    return text
