"""Why llguidance refuses a grammar, without the strings of whoever wrote it, since those are part of a prompt."""

from __future__ import annotations

import re

_PLACE = re.compile(r"(?:at )?\d+\(\d+\): ")
_QUOTED = re.compile(r"[\"'`(\[{<\\/]|(?<=failed to compile JSON schema)")
"""Where the library's own words end: behind it is a quotation, or a schema inside a grammar, whose values are not quoted."""


def stated(reason: str) -> str:
    """The kind of the mistake and its place, in one line, of what `LLMatcher.validate_grammar` says."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    # Of a regular expression, the whole expression stands above the one line that says what is wrong with it.
    said = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
    said = said or (lines[0] if lines else "")
    place = _PLACE.match(said)
    start = place.end() if place else 0
    words = _QUOTED.split(said[start:], maxsplit=1)[0].rstrip(" :,")
    return (said[:start] + words).rstrip(" :") or "refused"
