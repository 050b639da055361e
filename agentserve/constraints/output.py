"""What an answer must be: the form of its text, and which tools it may or must call with which arguments. Nouns only.

rules.py makes them of requests; a dialect turns them into a grammar (dialects/grammar.py); the worker holds the model to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Schema = dict[str, Any]

TEXT_GRAMMAR = "x-lark"
"""Keyword of a string's schema, which clients cannot set: the text has the form of this grammar, see free_text.py."""

ANY_OBJECT: Schema = {"type": "object"}


@dataclass(frozen=True, slots=True)
class TextForm:
    """kind json: content is a schema. regex, lark: content is text."""

    kind: Literal["json", "regex", "lark"]
    content: Any


@dataclass(frozen=True, slots=True)
class OutputRule:
    """form: of the text, None = free. calls: whether tools are called.

    schemas: arguments of every tool that may be called, by name. exact: tools that are strict; the others' arguments are held
    to their schemas as far as that is possible. one_call: at most one call.
    """

    form: TextForm | None = None
    calls: Literal["auto", "none", "required"] = "auto"
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    one_call: bool = False
