"""Requests as hurried people type them: case, marks, short forms, typing mistakes, quotes. Values are masked and stay as they are."""

from __future__ import annotations

from random import Random

from examples.demo_model import values
from examples.demo_model.values import pick

SHORT = (
    ("please", "pls"), ("Please", "Pls"), ("you", "u"), ("what's", "whats"), ("What's", "Whats"), ("I'm", "Im"), ("it's", "its"), ("don't", "dont"), ("thanks", "thx"), ("are", "r"),
    ("because", "cuz"), ("I'd", "Id"), ("and", "&"), ("want to", "wanna"), ("going to", "gonna"), ("give me", "gimme"), ("tomorrow", "tmrw"), ("to", "2"), ("for", "4"),
)  # fmt: skip
QUOTES = ('"{}"', '"{}"', "'{}'", "“{}”", "`{}`", "‘{}’", "«{}»", "({})", "*{}*")
MARKS = set("\"'`“”‘’«»()*/\\")


def is_mask(char: str) -> bool:
    return 0xE000 <= ord(char) < 0xF000


def preposition(moment: str) -> str:
    """The word that belongs before a point in time: "at " 3pm, "on " Friday, nothing before tomorrow."""
    if moment[0].isdigit() or moment.startswith(("half", "quarter")) or moment in ("noon", "midnight", "sunset", "lunchtime"):
        return "at "
    if moment.startswith((*values.DAYS, "the ", "January", "March", "April", "June", "July", "August", "October", "December")):
        return "on "
    return ""


def _mistype(word: str, rng: Random) -> str:
    at = rng.randint(1, len(word) - 2)
    r = rng.random()
    if r < 0.4:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if r < 0.7:
        return word[:at] + word[at + 1 :]
    return word[:at] + word[at] + word[at:]


def sloppy(text: str, rng: Random) -> str:
    """One or two such habits on a masked text."""
    for _ in range(pick(rng, (1, 1, 2))):
        r = rng.random()
        if r < 0.25:
            text = text.lower()
        elif r < 0.29:
            text = text.upper()
        elif r < 0.45:
            text = text.rstrip(".?!") + pick(rng, ("", "", "", "??", "!!", "...", " ?", "!", "?!", " :)", " ..", "."))
        elif r < 0.68:
            for long, short in rng.sample(SHORT, 6):
                text = f" {text} ".replace(f" {long} ", f" {short} ")[1:-1]
        elif r < 0.75:
            text = text.replace("'", "")
        elif r < 0.8:
            text = text.replace(", ", " ")
        elif r < 0.84:
            text = text.replace(" ", "  ", 1) if rng.random() < 0.5 else " " + text + " "
        else:
            parts = text.split(" ")
            able = [i for i, part in enumerate(parts) if len(part) > 3 and part.isascii() and part.isalpha()]
            for index in rng.sample(able, min(len(able), pick(rng, (1, 1, 2)))):
                parts[index] = _mistype(parts[index], rng)
            text = " ".join(parts)
    return text


def unmask(text: str, marks: dict[str, str], quotable: set[str], rng: Random) -> str:
    """Put the values back, some of those that may be quoted in quotes."""
    out: list[str] = []
    for at, char in enumerate(text):
        value = marks.get(char)
        if value is None:
            out.append(char)
            continue
        around = text[max(at - 1, 0) : at] + text[at + 1 : at + 2]
        if (
            char in quotable
            and rng.random() < 0.07
            and not MARKS & set(around + value)
            and " and " not in value
            and "\n" not in value
        ):
            value = pick(rng, QUOTES).format(value)
        out.append(value)
    return "".join(out)
