"""Writes grammars in llguidance's Lark notation: names for rules, literals, free text up to a marker, JSON by schema.

A marker that is one token of the tokenizer is that token, and no text can spell it; one that is not is text, and then free
text is kept from containing it. Knows no dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentserve.constraints.free_text import terminals
from agentserve.constraints.output import TEXT_GRAMMAR

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


def has_outer_bar(pattern: str) -> bool:
    """Whether a pattern has a `|` outside of any group or class."""
    depth, in_class, skip = 0, False, False
    for char in pattern:
        if skip or char == "\\":
            skip = not skip
        elif in_class or char == "[":
            in_class = char != "]"
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return True
    return False


class LarkWriter:
    """Collects the rules of one grammar.

    marker_id: id of a text that is one token, else None. markers: those that the model's answer is read by.
    """

    def __init__(self, marker_id: Callable[[str], int | None], markers: Sequence[str]) -> None:
        found = {m: token for m in markers if (token := marker_id(m)) is not None}
        self._tokens: Mapping[str, int] = found
        self._pattern = re.compile("(" + "|".join(re.escape(m) for m in sorted(found, key=len, reverse=True)) + ")")
        self._avoid = [m for m in markers if not any(token in m for token in found)]
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

    def tag(self, text: str) -> str:
        """Text that a dialect writes, the markers in it as the tokens that they are."""
        parts = self._split(text)
        return " ".join(literal(part) if token is None else f"<[{token}]>" for part, token in parts)

    def _split(self, text: str) -> list[tuple[str, int | None]]:
        """(text, None) and (marker, id), in order."""
        if not self._tokens:
            return [(text, None)]
        parts = [part for part in self._pattern.split(text) if part]
        return [(part, self._tokens.get(part)) for part in parts]

    def text_without(self, *texts: str, matching: str = "") -> str:
        """Expression of a terminal: any text in which none of these occurs. matching: another expression that it must fit."""
        parts = ["/(?s:.*)/"]
        if texts:
            parts.append(f"~/(?s:.*)({'|'.join(map(escaped, dict.fromkeys(texts)))})(?s:.*)/")
        if matching:
            parts.append(matching)
        return " & ".join(parts)

    def free(self) -> str:
        """Any text without a marker, also none."""
        return self.terminal(self.text_without(*self._avoid))

    def upto(self, marker: str) -> str:
        """Any text without a marker, then this one."""
        return self._ending(marker, marker, self._avoid, "")

    def value_upto(self, closing: str, core: str, matching: str = "") -> str:
        """A value of any text, then `closing`. core: the part of it by which a reader knows the value's end."""
        return self._ending(closing, core, (), matching)

    def _ending(self, closing: str, core: str, avoid: Sequence[str], matching: str) -> str:
        parts = self._split(closing)
        at = next((i for i, (_, token) in enumerate(parts) if token is not None), None)
        if at is None:
            # The text cannot go on behind its end, so that the two are matched as one piece.
            return self.terminal(f"({self.text_without(*avoid, core, matching=matching)}) {literal(closing)}")
        # No text can spell the token; what stands before it is matched together with the value.
        before = "".join(part for part, _ in parts[:at])
        head = self.text_without(*avoid, matching=matching)
        first = self.terminal(f"({head}) {literal(before)}" if before else head)
        rest = " ".join(literal(part) if token is None else f"<[{token}]>" for part, token in parts[at:])
        return self.rule(f"{first} {rest}")

    def free_text(self, grammar: str, *, in_json: bool) -> str:
        """Name of a terminal: text of a client's grammar. in_json: as it stands inside a JSON string."""
        key = f"{in_json} {grammar}"
        if key not in self._known:
            prefix = f"C{len(self._rules)}"
            self._known[key] = f"{prefix}R_START"
            self._rules.append(terminals(grammar, prefix, in_json=in_json))
        return self._known[key]

    def json(self, schema: Any, options: dict[str, Any] = COMPACT) -> str:
        """JSON that fits the schema."""
        for name, part in (schema.get("properties") or {}).items() if isinstance(schema, dict) else ():
            if isinstance(part, dict) and TEXT_GRAMMAR in part:  # the one property of a custom tool
                text = self.free_text(part[TEXT_GRAMMAR], in_json=True)
                return self.terminal(f"{literal(json.dumps({name: ''})[:-2])} {text} {literal(chr(34) + '}')}")
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
