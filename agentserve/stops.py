"""Stop strings in the visible text of an answer: found across deltas, and kept out of it. Knows no tokens.

They are looked for here and not where tokens are sampled, because they are about what the client reads: a stop string inside
thinking or inside the arguments of a call stops nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Filter of one answer's text. found: the stop string that ended it, None while none has."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown of the text so far; what could still become a stop string is held back."""
        if not self._stops:
            return text
        text = self._held + text
        first = min(((at, -len(s), s) for s in self._stops if (at := text.find(s)) >= 0), default=None)
        if first is not None:
            self._held = ""
            self.found = first[2]
            return text[: first[0]]
        keep = max(_overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text has ended: what was held back became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
