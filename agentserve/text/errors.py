"""Errors of the text package.

TextError
├── TemplateError        the chat template cannot be used, or refuses this context
├── TokenizerError       the tokenizer file cannot be used
└── UnsupportedContent   a content type that this server does not take (images …)
"""

from __future__ import annotations


class TextError(Exception):
    """Base of this package. Messages name fields, types and numbers, never content."""


class TemplateError(TextError):
    """The template cannot be rendered with opaque contents (at load), or raised by itself for this context (at a turn)."""


class TokenizerError(TextError):
    """tokenizer.json is missing, unreadable, or has a shape that cannot keep markers in contents as plain text."""


class UnsupportedContent(TextError):
    """A content part that is not text. The client must leave it out."""

    def __init__(self, param: str, got: str) -> None:
        super().__init__(f"{param}: content of type {got!r} is not supported, only text is")
        self.param = param
