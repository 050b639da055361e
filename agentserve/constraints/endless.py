"""Schemas whose values would have to hold themselves without an end, such as an object that requires an object like itself.

The grammar library takes them and writes such a value for as long as it may, or fails in the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentserve.constraints.references import resolve

MOST_VISITS = 200_000
"""Of a schema's parts, for a tenth of a second. A schema may be made so that all of it is looked at once for each of its
references; one that takes more is taken to end."""
_NESTING = ("object", "array")


def endless_reference(schema: Any, search: Search | None = None) -> str:
    """The path of the first `$ref` to something that no value has an end of, like `.properties.a.$ref`; "" if there is none."""
    references = dict(_references(schema, ""))
    named = {name: _named(schema, name) for name in references.values()}
    search = search or Search()
    grew = True
    while grew and search.visits <= MOST_VISITS:
        before = len(search.ending)
        search.ending.update(name for name, node in named.items() if name not in search.ending and search.ends(node))
        grew = len(search.ending) > before
    if search.visits > MOST_VISITS:
        return ""
    return next((path for path, name in references.items() if name not in search.ending), "")


class Search:
    """ending: references that are known to lead to something that has an end."""

    def __init__(self) -> None:
        self.ending: set[str] = set()
        self.visits = 0

    def ends(self, node: Any) -> bool:
        """Whether some value of this kind has an end."""
        self.visits += 1
        if self.visits > MOST_VISITS or not isinstance(node, dict) or "const" in node or "enum" in node:
            return True
        if "$ref" in node and node["$ref"] not in self.ending:
            return False
        if not all(self.ends(part) for part in node.get("allOf", ())):
            return False
        if not all(any(self.ends(part) for part in node[key]) for key in ("anyOf", "oneOf") if key in node):
            return False
        kinds = node.get("type", "any")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return any(kind not in _NESTING or all(self.ends(part) for part in _required(node, kind)) for kind in kinds)


def _required(node: dict[str, Any], kind: str) -> Iterator[Any]:
    """Schemas of what a value of this kind cannot do without."""
    if kind == "object":
        known = node.get("properties", {})
        yield from (known.get(name, node.get("additionalProperties", True)) for name in node.get("required", ()))
    else:
        least, first = node.get("minItems", 0), node.get("prefixItems", [])
        yield from first[: max(0, int(least))]
        if least > len(first):
            yield node.get("items", True)


def _references(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield f"{path}.$ref", value
            elif key not in ("const", "enum"):
                yield from _references(value, f"{path}.{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _references(value, f"{path}[{i}]")


def _named(schema: Any, name: str) -> Any:
    try:
        return resolve(schema, name)
    except LookupError:
        return True  # whoever asks the library is told
