"""A tiny phrase language: ``[a|b|]`` is a choice, ``{x}`` a slot, ``|`` at the top level a choice too.

Used for requests, tool names, descriptions, results and answers. Holds no vocabulary; see kinds_*.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random

# A parsed phrase: alternatives, each a list of parts; a part is text, (slot name,) or a nested choice.
Part = str | tuple[str] | list
Choice = list[list[Part]]


class PhraseError(ValueError):
    """A phrase has unbalanced brackets or an empty slot name. A mistake in the source, so nobody recovers."""

    def __init__(self, phrase: str, position: int, reason: str) -> None:
        super().__init__(f"{reason} at character {position} of {phrase!r}")


@cache
def parse(phrase: str) -> Choice:
    """Parse a phrase once. Raises PhraseError on unbalanced brackets."""
    choice, end = _alternatives(phrase, 0, nested=False)
    if end != len(phrase):
        raise PhraseError(phrase, end, "unexpected ]")
    return choice


def _alternatives(phrase: str, start: int, nested: bool) -> tuple[Choice, int]:
    alternatives: Choice = [[]]
    text: list[str] = []
    position = start

    def flush() -> None:
        if text:
            alternatives[-1].append("".join(text))
            text.clear()

    while position < len(phrase):
        char = phrase[position]
        if char == "[":
            flush()
            inner, position = _alternatives(phrase, position + 1, nested=True)
            alternatives[-1].append(inner)
        elif char == "]":
            if not nested:
                break
            flush()
            return alternatives, position + 1
        elif char == "|":
            flush()
            alternatives.append([])
            position += 1
        elif char == "{":
            flush()
            end = phrase.find("}", position)
            if end < position + 2:
                raise PhraseError(phrase, position, "bad slot")
            alternatives[-1].append((phrase[position + 1 : end],))
            position = end + 1
        elif char == "\\":
            text.append(phrase[position + 1])
            position += 2
        else:
            text.append(char)
            position += 1
    if nested:
        raise PhraseError(phrase, start, "missing ]")
    flush()
    return alternatives, position


def expand(phrase: str, rng: Random, slots: Mapping[str, object] | None = None) -> str:
    """One random reading of the phrase. Raises KeyError for a slot that `slots` lacks."""
    out: list[str] = []
    _expand(parse(phrase), rng, slots or {}, out)
    return "".join(out)


def _expand(choice: Choice, rng: Random, slots: Mapping[str, object], out: list[str]) -> None:
    parts = choice[0] if len(choice) == 1 else choice[int(rng.random() * len(choice))]
    for part in parts:
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, tuple):
            value = slots[part[0]]
            out.append(value if isinstance(value, str) else str(value))
        else:
            _expand(part, rng, slots, out)


def slot_names(phrase: str) -> set[str]:
    """Every slot that some reading of the phrase uses."""
    names: set[str] = set()

    def visit(choice: Choice) -> None:
        for alternative in choice:
            for part in alternative:
                if isinstance(part, tuple):
                    names.add(part[0])
                elif isinstance(part, list):
                    visit(part)

    visit(parse(phrase))
    return names
