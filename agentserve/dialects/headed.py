"""Calls that are a head with the name, a separator, and the arguments as one JSON object.

The object's own end ends the arguments, so that any marker inside its strings is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentserve.dialects.base import is_custom
from agentserve.dialects.hermes import free_text
from agentserve.dialects.jsonscan import ObjectScan
from agentserve.interfaces import CallClose, CallDelta, CallOpen, Delta
from agentserve.protocol.items import Tool

_LEAD = re.compile(r"\s*(?:```(?:json)?\s*)?")
_LONGEST_HEAD = 512


@dataclass(frozen=True, slots=True)
class Head:
    """How a family writes the head of a call, as parsers see it (see base.Spell).

    begin: text before the head, empty if the block begins with it. separator: behind the head. name_of: what a head names, ""
    if nothing. single: the block ends with its first call.
    """

    begin: str
    separator: str
    name_of: Callable[[str], str]
    single: bool = False


class HeadedCalls:
    """Streams the arguments as they are written."""

    def __init__(self, head: Head, tools: Sequence[Tool]) -> None:
        self._head = head
        self._tools = tools
        self._held = ""
        self._scan: ObjectScan | None = None
        self._begun = False
        self._custom = False
        self._arguments: list[str] = []
        self._fresh: list[str] = []
        self._opened = False
        self._call_open = False
        self._calls = 0

    @property
    def done(self) -> bool:
        return self._head.single and self._calls > 0

    @property
    def inside_value(self) -> bool:
        return self._scan is not None and self._scan.in_string

    def push(self, text: str) -> list[Delta]:
        self._held += text
        out: list[Delta] = []
        while self._held and self._step(out):
            pass
        if self._fresh and self._call_open and not self._custom:
            out.append(CallDelta("".join(self._fresh)))
            self._fresh = []
        return out

    def _step(self, out: list[Delta]) -> bool:
        """Take something off the held text; False if more is needed."""
        if self._scan is not None:
            return self._object(self._scan, out)
        head = self._head
        start = self._held.find(head.begin) if head.begin else 0
        at = self._held.find(head.separator, max(start, 0)) if start >= 0 else -1
        if at < 0:
            if not head.begin and len(self._held) > _LONGEST_HEAD:
                self._held = self._held[-_LONGEST_HEAD:]
            return False
        name = head.name_of(self._held[start + len(head.begin) : at])
        self._held = self._held[at + len(head.separator) :]
        if name:
            self._open(name, out)
        self._scan = ObjectScan()
        self._begun = False
        return True

    def _open(self, name: str, out: list[Delta]) -> None:
        self._custom = is_custom(name, self._tools)
        self._opened = self._call_open = True
        out.append(CallOpen(name, self._custom))

    def _object(self, scan: ObjectScan, out: list[Delta]) -> bool:
        if not self._begun:
            brace = self._held.find("{")
            if brace < 0:
                return False
            lead = self._held[:brace]
            if not self._call_open and (name := _name_before_fence(lead)):
                self._open(name, out)  # an older form has the name behind the separator
                lead = ""
            if not self._call_open or _LEAD.fullmatch(lead) is None:
                self._scan = None
                return True
            self._begun = True
            self._held = self._held[brace:]
        for at, char in enumerate(self._held):
            scan.step(char)
            self._arguments.append(char)
            self._fresh.append(char)
            if scan.done:
                self._held = self._held[at + 1 :]
                self._close(out)
                return True
        self._held = ""
        return False

    def _close(self, out: list[Delta]) -> None:
        raw = "".join(self._arguments)
        if self._custom:
            out.append(CallDelta(free_text(raw)))
        elif self._fresh:
            out.append(CallDelta("".join(self._fresh)))
        out.append(CallClose())
        self._fresh, self._arguments = [], []
        self._scan = None
        self._call_open = False
        self._calls += 1

    def finish(self, closed: bool) -> list[Delta] | None:
        if not self._opened:
            return _listed(self._held, self._tools)
        out: list[Delta] = []
        if self._call_open and not self._arguments and closed and not self._held.strip():
            out += [CallDelta("" if self._custom else "{}"), CallClose()]
        return out


def _name_before_fence(lead: str) -> str:
    """The name in `NAME\\n```json\\n`, "" if it is something else."""
    name, _, fence = lead.partition("\n")
    return name.strip() if fence.strip().startswith("```") else ""


def _listed(text: str, tools: Sequence[Tool]) -> list[Delta] | None:
    """Calls in the form of a JSON array of name and arguments, which older models of some families write."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        return None
    out: list[Delta] = []
    for call in calls:
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False)
        custom = is_custom(call["name"], tools)
        out += [CallOpen(call["name"], custom), CallDelta(free_text(arguments) if custom else arguments), CallClose()]
    return out
