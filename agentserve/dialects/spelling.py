"""Markers that are tokens, as characters that no text can have: lone surrogates, which no UTF-8 decodes to."""

from __future__ import annotations

import re

from agentserve.dialects.base import Dialect
from agentserve.text.tokenizer import Tokenizer

_FIRST = 0xD800
_SIGN = re.compile("[\ud800-\udbff]")


def has_sign(text: str) -> bool:
    """Part of this text is a marker that is a token."""
    return _SIGN.search(text) is not None


class Spelling:
    """How the markers of a dialect look under one tokenizer."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer) -> None:
        tokens = [text for text in dict.fromkeys(dialect.markers.all) if text in tokenizer.markers]
        self._sign = {text: chr(_FIRST + i) for i, text in enumerate(sorted(tokens, key=len, reverse=True))}
        self._text = {sign: text for text, sign in self._sign.items()}
        self._outer = {sign: text for sign, text in self._text.items() if text not in dialect.markers.inner}
        self._by_id = {tokenizer.markers[text].id: sign for text, sign in self._sign.items()}

    def sign_of(self, token_id: int) -> str | None:
        return self._by_id.get(token_id)

    def spell(self, text: str) -> str:
        """A tag as parsers see it."""
        for marker, sign in self._sign.items():
            text = text.replace(marker, sign)
        return text

    def inside(self, text: str) -> str:
        """Text of a block of calls: markers that mean nothing there are text."""
        return _SIGN.sub(lambda match: self._outer.get(match[0], match[0]), text) if self._outer else text

    def plain(self, text: str) -> str:
        """Text with its markers spelled out again."""
        return _SIGN.sub(lambda match: self._text[match[0]], text) if self._text else text
