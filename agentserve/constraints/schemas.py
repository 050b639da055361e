"""JSON schemas of clients → schemas that the grammar library takes: only keywords that it enforces, references that resolve.

What cannot be enforced is refused by keyword and path, or (for output that need not be exact) left out. The library itself is
asked in `check`, which finds the smallest part that it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agentserve.constraints.endless import endless_reference
from agentserve.constraints.output import Schema
from agentserve.constraints.reasons import stated
from agentserve.constraints.references import resolve
from agentserve.errors import InvalidValue, UnsupportedValue
from agentserve.protocol.items import MAX_DEPTH, nesting

MAX_SCHEMA_BYTES = 256 << 10
MAX_ENUM = 4096

_PLAIN = frozenset(
    {
        "type",
        "const",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "required",
    }
)
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
NESTED = frozenset({"items", "additionalProperties"})
_UNENFORCED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
        "$anchor",
    }
)
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
"""Others are annotations, as the standard has all formats by default."""
_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def enforceable(schema: Any, where: str, *, exact: bool) -> Schema:
    """The part of a schema that output can be held to. where: the field that it came in.

    exact: refuse what cannot be enforced, else leave it out. Raises InvalidValue, UnsupportedValue.
    """
    if not isinstance(schema, dict):
        raise InvalidValue(f"Expected `object`, got `{type(schema).__name__}`", where)
    if nesting(schema, MAX_DEPTH) > MAX_DEPTH:
        raise InvalidValue(f"nested more than {MAX_DEPTH} levels deep", where)
    size = len(json.dumps(schema, ensure_ascii=False))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidValue(f"a schema of {size} characters, at most {MAX_SCHEMA_BYTES} are accepted", where)
    clean = _Cleaner(schema, exact).clean(schema, where)
    if endless := endless_reference(clean):
        what = "no value has an end here: what is required leads back to itself; make a part of it optional"
        raise UnsupportedValue(what, f"{where}{endless}")
    return clean


class _Cleaner:
    def __init__(self, root: Schema, exact: bool) -> None:
        self._root = root
        self._exact = exact

    def clean(self, schema: Any, where: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidValue(f"Expected a schema, got `{type(schema).__name__}`", where)
        out: Schema = {}
        for key, value in schema.items():
            at = f"{where}.{key}"
            if key in _PLAIN:
                out[key] = self._plain(key, value, at)
            elif key == "enum":
                out[key] = self._enum(value, at)
            elif key == "format":
                if not isinstance(value, str):
                    raise InvalidValue(f"Expected `str`, got `{type(value).__name__}`", at)
                if value in _FORMATS:
                    out[key] = value
            elif key in MAPS:
                if not isinstance(value, dict):
                    raise InvalidValue(f"Expected `object`, got `{type(value).__name__}`", at)
                out[key] = {name: self.clean(part, f"{at}.{name}") for name, part in value.items()}
            elif key in LISTS:
                out[key] = self._list(value, at)
            elif key == "items" and isinstance(value, list):  # before draft 2020 what is prefixItems now
                out["prefixItems"] = self._list(value, at)
                if "additionalItems" in schema:
                    out["items"] = self.clean(schema["additionalItems"], f"{where}.additionalItems")
            elif key in NESTED:
                out[key] = self.clean(value, at)
            elif key == "$ref":
                self._check_reference(value, at)
                out[key] = value
            elif key in _UNENFORCED and value not in (False, None) and self._exact:
                raise UnsupportedValue(f"'{key}' cannot be enforced; leave it out, or do not ask for strict output", at)
            # Everything else says something about the schema, not about what it describes.
        return out

    def _plain(self, key: str, value: Any, at: str) -> Any:
        if key == "type":
            kinds = value if isinstance(value, list) else [value]
            if not kinds or any(not isinstance(k, str) or k not in _TYPES for k in kinds):
                raise InvalidValue(f"accepted: {', '.join(sorted(_TYPES))}, or a list of them", at)
        # The grammar library would quote a value of another kind, and panics where the quote ends within a character.
        elif key == "required":
            if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
                raise InvalidValue("Expected `array` of `str`", at)
        elif key == "pattern":
            if not isinstance(value, str):
                raise InvalidValue(f"Expected `str`, got `{type(value).__name__}`", at)
        elif key != "const" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidValue(f"Expected a number, got `{type(value).__name__}`", at)
        return value

    def _enum(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_ENUM:
            raise InvalidValue(f"Expected `array` of 1 to {MAX_ENUM} values", at)
        return value

    def _list(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise InvalidValue("Expected a non-empty `array` of schemas", at)
        return [self.clean(part, f"{at}[{i}]") for i, part in enumerate(value)]

    def _check_reference(self, value: Any, at: str) -> None:
        """Only what is in this schema, in a place that is kept."""
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise UnsupportedValue("only references into the schema itself ('#/…') are supported", at)
        seen: set[str] = set()
        while isinstance(value, str) and value not in seen:
            seen.add(value)
            try:
                found = resolve(self._root, value)
            except LookupError:
                raise InvalidValue("refers to nothing in this schema", at) from None
            value = found.get("$ref") if isinstance(found, dict) else None
        if value in seen:
            raise InvalidValue("refers to itself, without a schema in between", at)


def check(schema: Schema, where: str, refusal: Callable[[Schema], str]) -> None:
    """Ask the library. refusal(schema): its reason, "" if it takes it.

    Raises UnsupportedValue with the path of the smallest part that is refused.
    """
    reason = refusal(schema)
    if not reason:
        return
    at = where
    node: Any = schema
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = True
    while found:
        found = False
        for step, part in _parts(node):
            if isinstance(part, dict) and (why := refusal({**definitions, **part})):
                at, node, reason, found = f"{at}{step}", part, why, True
                break
    raise UnsupportedValue(f"this schema cannot be enforced: {stated(reason)}", at)


def _parts(node: Mapping[str, Any]) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in node.items():
        if key in MAPS and isinstance(value, dict):
            out += [(f".{key}.{name}", part) for name, part in value.items()]
        elif key in LISTS and isinstance(value, list):
            out += [(f".{key}[{i}]", part) for i, part in enumerate(value)]
        elif key in NESTED:
            out.append((f".{key}", value))
    return out
