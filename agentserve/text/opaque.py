"""Opaque contents: what a chat template sees instead of text that came from outside.

Every content is one private-use character while the template runs. Afterwards the output falls apart into what the template
wrote itself (where control tokens are control tokens) and contents (where they are text). A template can move, trim or drop
such a character, but it cannot look inside, so nothing a tool prints can change what the template does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agentserve.text.errors import TemplateError

_PLANES = ((0xF0000, 0xFFFFD), (0x100000, 0x10FFFD))
BREAK = chr(_PLANES[0][0])
"""Reserved: a place where two pieces must be encoded apart."""
SENTINEL = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
MAX_CONTENTS = sum(last - first + 1 for first, last in _PLANES) - 1


@dataclass(frozen=True, slots=True)
class Content:
    """text: what stands there in the end. item: index of the context item, −1 for instructions and tools.

    field: system, user, text, reasoning, name, arguments, output, tools or other.
    """

    text: str
    item: int
    field: str


class ContentTable:
    """Contents of one rendering, by sentinel."""

    def __init__(self) -> None:
        self._contents: list[Content] = []
        self._json: dict[tuple[str, bool], str] = {}

    def add(self, text: str, item: int, field: str) -> str:
        """Register a content; returns its one-character sentinel. Empty text stays empty: templates ask `if content`."""
        if not text:
            return ""
        index = len(self._contents) + 1
        if index > MAX_CONTENTS:
            raise TemplateError(f"a context of more than {MAX_CONTENTS} contents cannot be rendered")
        self._contents.append(Content(text, item, field))
        first, last = _PLANES[0]
        size = last - first + 1
        return chr(first + index) if index < size else chr(_PLANES[1][0] + index - size)

    def mark(self, item: int, field: str) -> str:
        """Sentinel of an empty content, to find out where a template puts an item that it has nothing to write of."""
        sentinel = self.add("?", item, field)
        self._contents[-1] = Content("", item, field)
        return sentinel

    def __getitem__(self, sentinel: str) -> Content:
        code = ord(sentinel)
        first, last = _PLANES[0]
        index = code - first if code <= last else code - _PLANES[1][0] + (last - first + 1)
        try:
            return self._contents[index - 1]
        except IndexError:
            raise TemplateError(f"the chat template writes the private-use character U+{code:X} itself") from None

    def __len__(self) -> int:
        return len(self._contents)

    def escaped(self, sentinel: str, ensure_ascii: bool) -> str:
        """Sentinel of the same content as it stands between the quotes of a JSON string."""
        key = (sentinel, ensure_ascii)
        if key not in self._json:
            content = self[sentinel]
            text = json.dumps(content.text, ensure_ascii=ensure_ascii)[1:-1]
            self._json[key] = self.add(text, content.item, content.field)
        return self._json[key]


class Document(dict[str, Any]):
    """A JSON object from outside (a tool description, a call's arguments): a mapping of opaque leaves.

    `| tojson` makes one content of the whole, so that it is encoded (and cached) in one piece.
    """

    def __init__(self, plain: Mapping[str, Any], table: ContentTable, item: int, field: str) -> None:
        super().__init__({_key(k, table, item, field): _leaf(v, table, item, field) for k, v in plain.items()})
        self.source = Source(plain, item, field)


class Array(list[Any]):
    """A JSON array inside a Document."""

    def __init__(self, plain: Iterable[Any], table: ContentTable, item: int, field: str) -> None:
        super().__init__(_leaf(v, table, item, field) for v in plain)
        self.source = Source(plain, item, field)


@dataclass(frozen=True, slots=True)
class Source:
    """What a Document or Array was made of."""

    plain: Any
    item: int
    field: str


_SAFE_KEY = re.compile(r"[\w$.-]*", re.ASCII)


def _key(key: str, table: ContentTable, item: int, field: str) -> str:
    """Keys that could spell a marker are contents too; ordinary ones stay, since templates look them up by name."""
    return key if _SAFE_KEY.fullmatch(key) else table.add(key, item, field)


def _leaf(value: Any, table: ContentTable, item: int, field: str) -> Any:
    if isinstance(value, str):
        return table.add(value, item, field)
    if isinstance(value, dict):
        return Document(value, table, item, field)
    if isinstance(value, list | tuple):
        return Array(value, table, item, field)
    return value


class Dump(Protocol):
    """Object → JSON text with the separators, indent … that the template asked for."""

    def __call__(self, value: Any, *, ensure_ascii: bool) -> str: ...


def to_json(value: Any, table: ContentTable, dump: Dump, ensure_ascii: bool) -> str:
    """JSON of a template value in which contents may be hidden."""
    if isinstance(value, Document | Array):
        source = value.source
        return table.add(dump(source.plain, ensure_ascii=ensure_ascii), source.item, source.field)

    def reveal(node: Any) -> Any:
        if isinstance(node, str):
            return SENTINEL.sub(lambda m: table.escaped(m[0], ensure_ascii), node)
        if isinstance(node, dict):
            return {reveal(k): reveal(v) for k, v in node.items()}
        if isinstance(node, list | tuple):
            return [reveal(v) for v in node]
        return node

    # Never ASCII here: that would spell out the sentinels themselves, and the contents were escaped one by one.
    return dump(reveal(value), ensure_ascii=False)
