"""Halves of surrogate pairs in JSON escapes become U+FFFD, all else stays, and looking for them has an end."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentserve.errors import InvalidValue
from agentserve.protocol.decode import MAX_SURROGATES, decode

PIECES = st.sampled_from(["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", "\\n", "\\u00e9", "ud83d", "\\\\ud83d", "x", "é"])


class Text(msgspec.Struct):
    a: str


@given(st.lists(PIECES, max_size=12))
@example(["\\\\ud83d", "\\uDE00"])
@example(["\\\\", "\\\\", "\\ud83d"])
def test_what_is_mended_is_what_python_reads_with_its_halves_replaced(pieces: list[str]) -> None:
    text = '{"a":"' + "".join(pieces) + '"}'
    read = json.loads(text)["a"]
    mended = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in read)
    assert decode(text, Text).a == mended
    assert decode(text.encode(), Text).a == mended


def test_more_halves_than_a_cut_text_has_are_refused() -> None:
    few, many = ("\\ud83d" * n for n in (MAX_SURROGATES - 1, MAX_SURROGATES))
    assert decode(f'{{"a":"{few}"}}', Text).a == "\ufffd" * (MAX_SURROGATES - 1)
    with pytest.raises(InvalidValue, match="not valid JSON"):
        decode(f'{{"a":"{many}"}}', Text)
