"""Writes grammars in llguidance's Lark notation: names for rules, literals, free text up to a marker, JSON by schema.

A marker that is one token of the tokenizer is that token, and no text can spell it; one that is not is text, and then free
text is kept from containing it. Knows no dialect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

JSON_OPTIONS = {"json_allowed_escapes": 'nrbtf"\\', "whitespace_pattern": "[ \\n\\t]{0,40}"}
"""No \\u escapes: with them a key could be spelled so that the library does not know it for a declared one. White space has an
end, so that a model that likes it comes to its point."""
COMPACT = {
    "json_allowed_escapes": 'nrbtf"\\',
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
"""As chat templates write the arguments of calls."""
_REGEX_SYNTAX = frozenset("\\.+*?()|[]{}^$/&~#-")


def literal(text: str) -> str:
    """A string as the notation has it."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Regular expression that matches exactly this text, to stand between slashes."""
    return "".join(f"\\{c}" if c in _REGEX_SYNTAX else {"\n": "\\n", "\r": "\\r"}.get(c, c) for c in text)


def between_slashes(pattern: str) -> str:
    """A client's regular expression as it may stand between slashes. Raises ValueError if it ends inside an escape."""
    out: list[str] = []
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            following = next(chars, None)
            if following is None:
                raise ValueError("ends with a backslash")
            out.append("\\" + {"\n": "n", "\r": "r"}.get(following, following))
        else:
            out.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(char, char))
    return "".join(out)


class LarkWriter:
    """Collects the rules of one grammar.

    marker_id: id of a text that is one token, else None. markers: those that the model's answer is read by.
    """

    def __init__(self, marker_id: Callable[[str], int | None], markers: Sequence[str]) -> None:
        self._marker_id = marker_id
        self._avoid = [m for m in markers if m and marker_id(m) is None]
        self._rules: list[str] = []
        self._known: dict[str, str] = {}
        self._side: list[dict[str, str]] = []

    def rule(self, body: str) -> str:
        """A name for this body."""
        return self._name(body, "r")

    def terminal(self, body: str) -> str:
        """A name for something that is matched as one piece."""
        return self._name(body, "T")

    def _name(self, body: str, prefix: str) -> str:
        key = prefix + body
        if key not in self._known:
            name = self._known[key] = f"{prefix}{len(self._rules)}"
            self._rules.append(f"{name}: {body}")
        return self._known[key]

    def marker(self, text: str) -> str:
        token = self._marker_id(text)
        return literal(text) if token is None else f"<[{token}]>"

    def is_token(self, text: str) -> bool:
        return self._marker_id(text) is not None

    def text_without(self, *texts: str, matching: str = "") -> str:
        """Expression of a terminal: any text in which none of these occurs. matching: another expression that it must fit."""
        parts = ["/(?s:.*)/", *(f"~/(?s:.*){escaped(t)}(?s:.*)/" for t in dict.fromkeys(texts))]
        if matching:
            parts.append(matching)
        return " & ".join(parts)

    def free(self) -> str:
        """Any text without a marker, also none."""
        return self.terminal(self.text_without(*self._avoid))

    def upto(self, marker: str) -> str:
        """Any text, then this marker."""
        if self.is_token(marker):
            return self.rule(f"{self.free()} {self.marker(marker)}")
        return self.terminal(f"({self.text_without(*self._avoid, marker)}) {literal(marker)}")

    def value_upto(self, closing: str, *without: str, matching: str = "") -> str:
        """Text that holds none of `without`, then `closing`, all matched as one piece. closing must contain one of them."""
        return self.terminal(f"({self.text_without(*without, matching=matching)}) {literal(closing)}")

    def json(self, schema: Any, options: dict[str, Any] = COMPACT) -> str:
        """JSON that fits the schema."""
        body = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        return self.rule(f"%json {json.dumps({**body, 'x-guidance': options}, ensure_ascii=False)}")

    def side_grammar(self, lark: str) -> str:
        """A client's own grammar, whose names are kept apart from ours."""
        name = f"client{len(self._side)}"
        self._side.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def grammar(self, start: str) -> str:
        """The whole, as the worker takes it."""
        main = "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"
        if not self._side:
            return main
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._side]}, ensure_ascii=False)


def choice(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
