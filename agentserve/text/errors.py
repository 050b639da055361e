"""Errors of the text package.

TextError
├── TemplateError    the chat template cannot be used, or refuses this context
└── TokenizerError   the tokenizer file cannot be used
"""

from __future__ import annotations


class TextError(Exception):
    """Base of this package. Messages name fields, types and numbers, never content."""


class TemplateError(TextError):
    """The template cannot be rendered with opaque contents (at load), or raised by itself for this context (at a turn)."""


class TokenizerError(TextError):
    """tokenizer.json is missing, unreadable, or has a shape that cannot keep markers in contents as plain text."""
