"""What msgspec says about a wrong value, in words that name what is accepted. Knows types only, no values and no wire."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_AT = re.compile(r" - at `(key in )?\$(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[[^\]]*\]")
_ENUM = "Invalid enum value"
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)


def explain(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """Message and path of a failed decode as `kind`. The path is like `.input[0].role`, empty for the whole.

    A value that is none of a few is told together with those, and so is a field that a struct does not have.
    """
    message, path = _split(error)
    unknown = unknown_field(error)
    if unknown is not None:
        fields = sorted(name for found in _along(inspect.type_info(kind), path) for name in _fields(found))
        return f"no such field; accepted: {', '.join(fields)}", f"{path}.{unknown[1]}"
    if message.startswith(_ENUM):
        accepted = sorted({str(value) for found in _along(inspect.type_info(kind), path) for value in _values(found)})
        if accepted:
            message = f"got{message.removeprefix(_ENUM)}; accepted: {', '.join(accepted)}"
    return message, path


def unknown_field(error: msgspec.ValidationError) -> tuple[str, str] | None:
    """(path of a struct, the field that it does not have), None if the error is another one."""
    message, path = _split(error)
    unknown = _UNKNOWN.match(message)
    return None if unknown is None else (path, unknown.group(1))


def _split(error: msgspec.ValidationError) -> tuple[str, str]:
    text = str(error)
    at = _AT.search(text)
    return (text, "") if at is None else (text[: at.start()], at.group(2))


def _along(kind: inspect.Type, path: str) -> Iterator[inspect.Type]:
    """The types that stand at `path`; several where a union leads there."""
    found = [kind]
    for step in _STEP.finditer(path):
        found = [inner for outer in found for inner in _inside(outer, step.group(1))]
    yield from found


def _inside(kind: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    for member in _members(kind):
        if isinstance(member, inspect.StructType):
            yield from (one.type for one in member.fields if one.encode_name == field)
        elif isinstance(member, inspect.DictType):
            yield member.value_type
        elif isinstance(member, inspect.ListType | inspect.VarTupleType) and field is None:
            yield member.item_type


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):
        return _members(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(inner for member in kind.types for inner in _members(member))
    return (kind,)


def _fields(kind: inspect.Type) -> Iterator[str]:
    for member in _members(kind):
        if isinstance(member, inspect.StructType):
            yield from (one.encode_name for one in member.fields)


def _values(kind: inspect.Type) -> Iterator[Any]:
    for member in _members(kind):
        if isinstance(member, inspect.LiteralType):
            yield from member.values
        elif isinstance(member, inspect.EnumType):
            yield from (one.value for one in member.cls)
