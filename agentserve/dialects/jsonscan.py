"""Incremental look at one JSON object: which of its top-level values is being written now, character by character.

Checks nothing beyond what it needs to find the ends of values; json.loads does that where it matters.
"""

from __future__ import annotations

import json


class ObjectScan:
    """Feed characters; `key` and `value` tell where the character belongs.

    step returns True while the character is part of the top-level value of `key` (its first and last included).
    done: the object has ended. broken: no object began.
    """

    def __init__(self) -> None:
        self.key: str | None = None
        self.done = False
        self.broken = False
        self.in_string = False
        self._escaped = False
        self._depth = 0
        self._string: list[str] = []
        self._in_value = False
        self._scalar = False

    def step(self, char: str) -> bool:
        if self.done or self.broken:
            return False
        if self.in_string:
            return self._string_char(char)
        if self._depth == 0:
            if char == "{":
                self._depth = 1
            elif not char.isspace():
                self.broken = True
            return False
        if self._depth == 1 and not self._in_value:
            return self._before_value(char)
        if self._scalar and (char in ",}" or char.isspace()):
            self._end_value()
            return self._before_value(char)
        return self._value_char(char)

    def _before_value(self, char: str) -> bool:
        if self.key is None or not self._colon:
            if char == '"':
                self.in_string = True
                self._string = []
            elif char == ":" and self.key is not None:
                self._colon = True
            elif char == "}":
                self.done = True
            return False
        if char.isspace():
            return False
        self._in_value = True
        self._scalar = char not in '"{['
        return self._value_char(char)

    _colon = False

    def _value_char(self, char: str) -> bool:
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._end_value()
        return True

    def _string_char(self, char: str) -> bool:
        value = self._in_value
        if not value:
            self._string.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
            if value:
                if self._depth == 1:
                    self._end_value()
            else:
                self.key = _unquote("".join(self._string))
                self._colon = False
        return value

    def _end_value(self) -> None:
        self._in_value = self._scalar = self._colon = False
        self.last_key, self.key = self.key, None

    last_key: str | None = None


def _unquote(rest: str) -> str:
    try:
        return json.loads('"' + rest, strict=False)
    except ValueError:
        return rest[:-1]
