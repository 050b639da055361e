"""Aliases: digest of what a context says → the ids that the model sampled when it said it.

An alias only proposes. Nothing about a request depends on whether one is there, except that text which comes back to us keeps
the tokens it was generated with. This file has the nouns and the keys; session/aliases.py keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import xxhash


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """ids: little-endian uint32. context: digest of the ids before them, to choose between two that say the same.

    lead, trail: white space that the ids begin and end with. claim: digest of name and arguments of a call, else empty.
    """

    ids: bytes
    context: bytes = b""
    lead: str = ""
    trail: str = ""
    claim: bytes = b""


class AliasBook(Protocol):
    """Where aliases are kept. Thread-safe; may block on a database."""

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, Sequence[Alias]]:
        """Aliases of each key that has any, newest last."""
        ...

    def add(self, entries: Iterable[tuple[bytes, Alias]], source: bytes = b"") -> None:
        """source: the generated ids (uint32) that taught them, by which the turn's commit finds them."""
        ...


class NoAliases:
    """Keeps nothing: every context is tokenised from its text."""

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, Sequence[Alias]]:
        return {}

    def add(self, entries: Iterable[tuple[bytes, Alias]], source: bytes = b"") -> None:
        pass


class OwnAliases:
    """A model's part of a book that several share: what was sampled with one tokenizer means nothing to another.

    tag: digest of the tokenizer.
    """

    def __init__(self, book: AliasBook, tag: bytes) -> None:
        self._book = book
        self._tag = tag

    def _key(self, key: bytes) -> bytes:
        return xxhash.xxh3_128_digest(self._tag + key)

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, Sequence[Alias]]:
        own = {self._key(key): key for key in keys}
        return {own[key]: found for key, found in self._book.find(list(own)).items()}

    def add(self, entries: Iterable[tuple[bytes, Alias]], source: bytes = b"") -> None:
        self._book.add([(self._key(key), alias) for key, alias in entries], source)


def _digest(salt: bytes, kind: str, parts: Iterable[bytes]) -> bytes:
    h = xxhash.xxh3_128(b"%d:" % len(salt) + salt + kind.encode())
    for part in parts:
        h.update(b"%d:" % len(part))
        h.update(part)
    return h.digest()


def turn_key(salt: bytes, signature: Iterable[bytes]) -> bytes:
    """Key of a whole assistant turn. signature: its markers and what stands between them (see renderer.py)."""
    return _digest(salt, "turn", signature)


def stretch_key(salt: bytes, text: str) -> bytes:
    """Key of the text between two markers, white space around it left out."""
    return _digest(salt, "stretch", (text.strip().encode("utf-8", "surrogatepass"),))


def call_key(salt: bytes, call_id: str) -> bytes:
    """Key of a tool call's block, by the id under which the client sends it back."""
    return _digest(salt, "call", (call_id.encode("utf-8", "surrogatepass"),))


def call_claim(name: str, arguments: Mapping[str, Any]) -> bytes:
    """Digest of a call, equal for every way to write the same JSON."""
    text = json.dumps([name, _plain(arguments)], sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_digest(text.encode())


def _plain(value: Any) -> Any:
    """JSON numbers that are equal get one form: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
