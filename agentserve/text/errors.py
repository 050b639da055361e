"""Errors of the text package.

TextError
├── TemplateError    the chat template cannot be used, or refuses this context
├── TokenizerError   the tokenizer file cannot be used
└── TooManyTokens    a context is longer than any model here takes; the rest of it was not looked at
"""

from __future__ import annotations


class TextError(Exception):
    """Base of this package. Messages name fields, types and numbers, never content."""


class TemplateError(TextError):
    """The template cannot be rendered with opaque contents (at load), or raised by itself for this context (at a turn)."""


class TokenizerError(TextError):
    """tokenizer.json is missing, unreadable, or has a shape that cannot keep markers in contents as plain text."""


class TooManyTokens(TextError):
    """tokens: how many there are at least."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens or more")
        self.tokens = tokens
