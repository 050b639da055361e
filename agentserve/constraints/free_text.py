"""A client's grammar of a custom tool's text → terminals, one of which is the whole text.

As one terminal the text is matched as one piece: then nothing in it can be taken for what the tool dialect writes behind it,
and it can stand inside a JSON string, where a newline is written `\\n` and a quotation mark `\\"`. For that, what is said of
single characters is rewritten. A terminal cannot refer to itself, so a grammar whose rules do is refused. Control characters
without a short escape cannot be written (see lark.JSON_OPTIONS).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_SHORT = {char: json.dumps(char)[1:-1] for char in '"\\\n\r\t\b\f'}
_PLAIN = r'[^"\\\x00-\x1f]'
_KNOWN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\\[])*\]", re.DOTALL)
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*")(?P<anycase>i?)"""
    r"""|/(?P<regex>(?!/)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+)/(?P<flags>[imslux]*)"""
    r"""|(?P<alias>->\s*\w+)|(?P<name>[?!]?[A-Za-z_]\w*)|(?P<odd>[~&%@]|<\[)""",
    re.VERBOSE,
)
_IMPORT = re.compile(r"^\s*%import\s+common\.(\w+)\s*$|^\s*%import\s+common\s*\(([\w\s,]+)\)\s*$", re.MULTILINE)
_COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "DIGIT": "/[0-9]/",
    "INT": "/[0-9]+/",
    "LETTER": "/[a-zA-Z]/",
    "WORD": "/[a-zA-Z]+/",
}


class NotOnePiece(ValueError):
    """What cannot be rewritten; the text says which part."""


def terminals(grammar: str, prefix: str, *, in_json: bool) -> str:
    """The rules of a grammar in llguidance's Lark notation as terminals; `{prefix}R_START` is the text. Raises NotOnePiece.

    prefix: capitals that begin every name. in_json: the text stands inside a JSON string.
    """
    imported: list[str] = []

    def take(found: re.Match[str]) -> str:
        for name in (found[1] or found[2]).split(","):
            if name.strip() not in _COMMON:
                raise NotOnePiece(f"'%import common.{name.strip()[:32]}'")
            imported.append(f"{name.strip()}: {_COMMON[name.strip()]}")
        return ""

    def one(found: re.Match[str]) -> str:
        if found["comment"] is not None or found["alias"] is not None:
            return ""
        if found["name"] is not None:
            name = found["name"].lstrip("?!")
            return prefix + (name if name.isupper() else f"R_{name.upper()}")
        if found["odd"] is not None:
            raise NotOnePiece(f"'{found[0]}'")
        if not in_json:
            return found[0]
        if found["string"] is not None:
            text = json.loads(found["string"])
            return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False) + found["anycase"]
        return f"/{quoted_regex(found['regex'], dot_all='s' in found['flags'])}/{found['flags'].replace('s', '')}"

    rest = _IMPORT.sub(take, grammar)
    try:
        return _TOKEN.sub(one, "\n".join([rest, *imported]))
    except json.JSONDecodeError:
        raise NotOnePiece("a string with an escape that JSON does not have") from None


def quoted_regex(pattern: str, *, dot_all: bool = False) -> str:
    """A regular expression, as it stands between slashes. Raises NotOnePiece."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            step, written = _escape(pattern[at : at + 4])
            out.append(written)
            at += step
        elif char == "[":
            found = _CLASS.match(pattern, at)
            if found is None:
                raise NotOnePiece("a class of characters inside another")
            out.append(_set(found[0]))
            at = found.end()
        elif char == ".":
            out.append(_set(r"[\s\S]" if dot_all else r"[^\n]"))
            at += 1
        elif pattern.startswith("(?", at) and not pattern.startswith("(?:", at):
            raise NotOnePiece("'(?'")
        elif char in _SHORT:
            out.append(_exactly(char))
            at += 1
        elif char in "^$":
            raise NotOnePiece(f"'{char}'")
        else:
            out.append(char)
            at += 1
    return "".join(out)


def _escape(text: str) -> tuple[int, str]:
    """Length of an escape, and what it becomes."""
    kind = text[1:2]
    if kind == "x" and re.fullmatch(r"\\x[0-9a-fA-F]{2}", text):
        return 4, _exactly(chr(int(text[2:], 16)))
    if kind in "dDwWsS" and kind:
        return 2, _set(f"[\\{kind}]")
    if kind in _KNOWN_ESCAPES:
        return 2, _exactly(_KNOWN_ESCAPES[kind])
    if kind and not kind.isalnum():
        return 2, _exactly(kind)
    raise NotOnePiece(f"'\\{kind}'")


def _exactly(char: str) -> str:
    if char in _SHORT:
        return re.escape(_SHORT[char])
    if char < " ":
        raise NotOnePiece(f"the character {ord(char)}")
    return re.escape(char).replace("/", "\\/")


def _set(source: str) -> str:
    """A class of characters: those that stand for themselves, and the escapes of the others in it."""
    try:
        has: Callable[[str], object] = re.compile(source).fullmatch
    except re.error:
        raise NotOnePiece("a class of characters") from None
    plain = f"[{source}&&{_PLAIN}]"
    return f"(?:{'|'.join([plain, *(re.escape(short) for char, short in _SHORT.items() if has(char))])})"
