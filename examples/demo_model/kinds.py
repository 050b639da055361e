"""What a kind of tool is: its possible names, arguments, requests, results and answers.

A kind is a recipe; tools.py makes concrete declarations from it. The vocabulary lives in kinds_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arg:
    """One argument. `mention` is appended to a request when an optional argument is used."""

    key: str
    names: str
    maker: str
    desc: str = ""
    type: str = "string"
    mention: str = ""

    @property
    def optional(self) -> bool:
        return bool(self.mention)


@dataclass(frozen=True)
class Kind:
    """A recipe for one tool. All phrases are in the language of grammar.py.

    imp: imperative requests ("check the weather in {city}").  ask: whole questions, without final mark.
    out: result fields, "key~synonym=maker" separated by ";" (makers as in values.make).
    text: results as plain text.  say: answers.  topic: what the call is about, for the thinking.
    follow: the argument that a follow-up ("and in Rome?") changes.
    """

    key: str
    names: str
    desc: str
    args: tuple[Arg, ...]
    imp: str
    ask: str
    out: tuple[tuple[str, tuple[str, ...], str], ...]
    text: str
    say: str
    topic: str
    follow: str = ""


def arg(key: str, names: str, maker: str, desc: str = "", type: str = "string", mention: str = "") -> Arg:
    if maker.startswith("int:") or maker == "number":
        type = "integer" if type == "string" else type
    if maker == "amount":
        type = "number"
    return Arg(key, names, maker, desc, type, mention)


def kind(
    key: str, names: str, desc: str, args: list[Arg], *, imp: str = "", ask: str = "", out: str = "",
    text: str = "", say: str, topic: str, follow: str = "",
) -> Kind:  # fmt: skip
    fields = []
    for item in filter(None, (part.strip() for part in out.split(";"))):
        left, _, maker = item.partition("=")
        names_ = left.strip().split("~")
        fields.append((names_[0], tuple(names_), maker.strip()))
    if not follow and args and not args[0].optional and args[0].type in ("string", "integer"):
        follow = args[0].key if sum(not a.optional for a in args) == 1 else ""
    return Kind(key, names, desc, tuple(args), imp, ask, tuple(fields), text, say, topic, follow)


@dataclass(frozen=True)
class Chain:
    """Two kinds where a field of the first result is an argument of the second call."""

    first: str
    field: str
    second: str
    arg: str
    imp: str = ""
    ask: str = ""
