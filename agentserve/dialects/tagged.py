"""Calls whose arguments stand in tags, one tag for each: strings as bare text, everything else as JSON.

A bare text may spell tags. So a closing tag ends a value only where something follows that can follow a value: another
parameter (one that the tool declares and the call does not have yet, if the tool declares any), or the end of the call and
what can follow that. Tags that hold a marker which is a token end what they end, since no text spells them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentserve.dialects.base import is_custom
from agentserve.dialects.schema import Types, parameter_names, parameter_types, typed_value
from agentserve.dialects.spelling import has_sign
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta
from agentserve.protocol.items import Tool

_Follows = Literal["yes", "no", "wait"]


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family writes a call, as parsers see it (see base.Spell).

    begin: expression of a call's head, group `name`. begin_start: text that it begins with. end: the call's closing tag, empty
    if the block's end is the call's. parameter: expression of an opening tag, groups `key` and maybe `string` (true or false).
    parameter_start: text that it begins with. partial: expression of all that may still become one, if more than the start and
    then anything up to `>`. close: the closing tag of a value. padded: a line break beside a value is the
    tags'. bare_name: a head without arguments is a call only if it names a tool.
    """

    begin: str
    begin_start: str
    end: str
    parameter: str
    parameter_start: str
    close: str
    partial: str = ""
    padded: bool = False
    bare_name: bool = False


class TaggedCalls:
    """Emits the arguments as JSON; string values stream while they are written, others when they are whole."""

    def __init__(self, tags: Tags, tools: Sequence[Tool]) -> None:
        self._tags = tags
        self._tools = tools
        self._names = {tool.name for tool in tools}
        self._begin = re.compile(tags.begin)
        self._parameter = re.compile(tags.parameter + (r"\n?" if tags.padded else ""))
        self._partial = re.compile(tags.partial or re.escape(tags.parameter_start) + r"[^>\n]*")
        self._close = re.compile((r"\n?" if tags.padded else "") + re.escape(tags.close))
        self._held = ""
        self._opened = False
        self._name: str | None = None
        self._custom = False
        self._types: Mapping[str, Types] = {}
        self._declared: frozenset[str] = frozenset()
        self._seen: set[str] = set()
        self._key: str | None = None
        self._streaming = False
        self._value_types: Types | None = None
        self._ended = False

    @property
    def done(self) -> bool:
        return False

    @property
    def inside_value(self) -> bool:
        return self._key is not None and not self._close_at_end()

    def push(self, text: str) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        while self._step(out):
            pass
        return out

    def finish(self, closed: bool) -> list[Delta] | None:
        out: list[Delta] = []
        if self._name is None:
            self._last_head(out, closed)
        if not self._opened:
            return None
        if self._name is None:
            return out
        if self._key is not None:
            match = self._last_close()
            if match is None and not closed:
                if self._streaming:
                    self._send(self._held, out)
                return out
            self._end_value(self._held if match is None else self._held[: match.start()], out)
            self._ended = self._ended or (match is not None and bool(self._tags.end) and self._tags.end in self._held)
        if closed or self._ended:
            self._end_call(out)
        return out

    # ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, out: list[Delta]) -> bool:
        """Take one element off the held text; False if more text is needed."""
        if self._key is not None:
            return self._value(out)
        if self._name is None:
            return self._head(out)
        return self._between(out)

    def _head(self, out: list[Delta]) -> bool:
        match = self._begin.search(self._held)
        if match is None or (match.end() == len(self._held) and self._tags.bare_name):
            return False
        if self._tags.bare_name and not self._held[match.end() :].lstrip().startswith(self._tags.parameter_start):
            return False
        self._open(match["name"].strip(), out)
        self._held = self._held[match.end() :]
        return True

    def _last_head(self, out: list[Delta], closed: bool) -> None:
        """A call without arguments where the block's end is the call's."""
        name = self._held.strip()
        if self._tags.bare_name and closed and name in self._names:
            self._open(name, out)
            self._held = ""

    def _open(self, name: str, out: list[Delta]) -> None:
        self._opened = True
        self._name = name
        self._custom = is_custom(name, self._tools)
        self._types = parameter_types(name, self._tools)
        self._declared = parameter_names(name, self._tools)
        self._seen = set()
        out.append(CallOpen(name, self._custom))

    # ── between values ───────────────────────────────────────────────────────────────────────────────────────────

    def _between(self, out: list[Delta]) -> bool:
        tags = self._tags
        if self._ended:
            return self._behind_call(out)
        parameter = self._parameter.search(self._held)
        end = self._held.find(tags.end) if tags.end else -1
        if end >= 0 and (parameter is None or end < parameter.start()):
            self._held = self._held[end + len(tags.end) :]
            self._ended = True
            return True
        if parameter is None or (tags.padded and parameter.end() == len(self._held) and not parameter[0].endswith("\n")):
            return False  # the line break behind the tag may still come
        self._start_value(parameter, out)
        self._held = self._held[parameter.end() :]
        return True

    def _behind_call(self, out: list[Delta]) -> bool:
        """The call is over once another begins; else the end of the block decides."""
        if self._begin.search(self._held) is None:
            return False
        self._end_call(out)
        return True

    def _start_value(self, match: re.Match[str], out: list[Delta]) -> None:
        groups = match.groupdict()
        self._key = key = match["key"].strip()
        types = self._types.get(key)
        if groups.get("string") == "true":
            types = frozenset(("string",))
        elif groups.get("string") == "false":
            types = (types or frozenset()) - {"string"} or frozenset(("object", "array", "number", "boolean", "null"))
        self._value_types = types
        self._streaming = types is None or types == {"string"}
        lead = "{" if not self._seen else ", "
        self._seen.add(key)
        if not self._custom:
            opening = '"' if self._streaming else ""
            out.append(CallDelta(f"{lead}{json.dumps(key, ensure_ascii=False)}: {opening}"))

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _value(self, out: list[Delta]) -> bool:
        at = 0
        while (match := self._close.search(self._held, at)) is not None:
            follows = self._follows(self._held[match.end() :])
            if follows == "wait":
                self._stream(match.start(), out)
                return False
            if follows == "yes":
                self._end_value(self._held[: match.start()], out)
                self._held = self._held[match.end() :]
                return True
            at = match.end()
        self._stream(_safe_length(self._held, self._tags), out)
        return False

    def _stream(self, length: int, out: list[Delta]) -> None:
        if self._streaming:
            self._send(self._held[:length], out)
            self._held = self._held[length:]

    def _follows(self, rest: str) -> _Follows:
        """Whether what stands behind a closing tag shows that it ended the value."""
        tags = self._tags
        if has_sign(tags.close):
            return "yes"
        text = rest.lstrip()
        if not text:
            return "wait"
        found = [self._parameter_follows(text), self._end_follows(text)]
        return "yes" if "yes" in found else "wait" if "wait" in found else "no"

    def _parameter_follows(self, text: str) -> _Follows:
        start = self._tags.parameter_start
        if not text.startswith(start):
            return "wait" if start.startswith(text) else "no"
        match = self._parameter.match(text)
        if match is None:
            return "wait" if self._partial.fullmatch(text) is not None else "no"
        key = match["key"].strip()
        return "yes" if key not in self._seen and (not self._declared or key in self._declared) else "no"

    def _end_follows(self, text: str) -> _Follows:
        end, begin = self._tags.end, self._tags.begin_start
        if not text.startswith(end):
            return "wait" if end.startswith(text) else "no"
        text = text[len(end) :].lstrip()
        if not text or begin.startswith(text):
            return "wait"
        return "yes" if begin and text.startswith(begin) else "no"

    def _last_close(self) -> re.Match[str] | None:
        """The closing tag that the text ends with, but for the end of the call."""
        found = None
        for match in self._close.finditer(self._held):
            rest = self._held[match.end() :].strip()
            if not rest or (self._tags.end and rest == self._tags.end):
                found = match
        return found

    def _close_at_end(self) -> bool:
        """A marker spelled here would be one: what is held may be the end of the value."""
        return self._last_close() is not None

    def _send(self, text: str, out: list[Delta]) -> None:
        if text:
            out.append(CallDelta(text if self._custom else json.dumps(text, ensure_ascii=False)[1:-1]))

    def _end_value(self, rest: str, out: list[Delta]) -> None:
        assert self._key is not None
        if self._streaming:
            self._send(rest, out)
            if not self._custom:
                out.append(CallDelta('"'))
        else:
            value = typed_value(rest, self._value_types)
            out.append(CallDelta(json.dumps(value, ensure_ascii=False)))
        self._key = None

    def _end_call(self, out: list[Delta]) -> None:
        if not self._custom:
            out.append(CallDelta("}" if self._seen else "{}"))
        out.append(CallClose())
        self._name = None
        self._ended = False


def _safe_length(text: str, tags: Tags) -> int:
    """Characters that cannot belong to the closing tag, whatever follows."""
    for closing in ("\n" + tags.close, tags.close) if tags.padded else (tags.close,):
        for size in range(min(len(text), len(closing) - 1), 0, -1):
            if text.endswith(closing[:size]):
                return len(text) - size
    return len(text)
