"""Large JSON decoded in pieces is what msgspec makes of the whole, or the same error; members are counted as JSON has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from agentserve.errors import InvalidValue, MessageTooLarge
from agentserve.protocol import pieces
from agentserve.protocol.decode import decode, decode_frame, decode_input, peek
from agentserve.protocol.pieces import MAX_MEMBERS, MAX_VALUE_BYTES, MAX_VALUE_MEMBERS, check_members, decode_large, members
from tests.budget import examples


class Inner(Struct, frozen=True, tag="inner"):
    text: str


class Shape(Struct, frozen=True, kw_only=True, tag="shape"):
    """Every kind of member there is."""

    name: str | None = None
    other_name: str | UnsetType = msgspec.field(default=UNSET, name="otherName")
    short: Annotated[str, Meta(max_length=30)] = ""
    raw: Raw = Raw(b"null")
    raws: list[Raw] | None = None
    inner: Inner | str | None = None
    numbers: list[int] | None = None
    anything: Any = None


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 20)
        yield


SPECIAL = st.sampled_from(["\\", '"', "\n", "\U0001f600", "é", "日", "\u2028", "\x7f", "ab", "\\\\", '\\"', ","])
TEXTS = st.one_of(st.text(st.characters(codec="utf-8"), max_size=80), st.lists(SPECIAL, max_size=60).map("".join))


def outcome(work: Any) -> Any:
    """What comes of it; of an error only its kind."""
    try:
        return work()
    except msgspec.DecodeError as error:
        return type(error)


@settings(max_examples=examples(100, 3000))
@given(TEXTS, st.booleans())
def test_a_text_in_pieces_is_the_whole_text(text: str, ascii_only: bool) -> None:
    data = json.dumps(text, ensure_ascii=ascii_only).encode()
    assert decode_large(data, str) == text


@settings(max_examples=examples(100, 3000))
@given(
    st.lists(st.sampled_from([b"\\", b'"', b"u", b"d83d", b"\\ud83d", b"\\ude00", b"\xc3", b"\xa9", b"x", b"\n"]), max_size=40)
)
def test_what_is_no_text_is_refused_as_the_whole_is(parts: list[bytes]) -> None:
    data = b'"' + b"".join(parts) + b'"'
    assert outcome(lambda: decode_large(data, str)) == outcome(lambda: msgspec.json.decode(data, type=str))


VALUES = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-9, 9), TEXTS), lambda inner: st.lists(inner, max_size=4))
OBJECTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["shape", "other"])},
    optional={
        "name": st.one_of(TEXTS, VALUES),
        "otherName": TEXTS,
        "other_name": VALUES,
        "short": TEXTS,
        "raw": VALUES,
        "raws": st.lists(VALUES, max_size=5),
        "inner": st.one_of(TEXTS, st.fixed_dictionaries({"type": st.just("inner"), "text": TEXTS})),
        "numbers": st.lists(st.one_of(st.integers(0, 10**6), st.integers(0, 9), st.just("x")), max_size=20),
        "anything": VALUES,
        "not_known": VALUES,
    },
)


def shown(value: Any) -> Any:
    """Without what differs from one decode to the next: raw members as the text that they hold."""
    if not isinstance(value, Shape):
        return value
    raws = None if value.raws is None else [bytes(raw) for raw in value.raws]
    return (value.name, value.other_name, value.short, bytes(value.raw), raws, value.inner, value.numbers, value.anything)


@settings(max_examples=examples(100, 3000))
@given(OBJECTS)
def test_an_object_in_pieces_is_the_whole_object(value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    whole = outcome(lambda: msgspec.json.decode(data, type=Shape))
    assert shown(outcome(lambda: decode_large(data, Shape))) == shown(whole)
    assert shown(outcome(lambda: decode_large(data.decode(), Shape))) == shown(whole)


def commas(data: bytes) -> int:
    """Outside of strings, byte by byte."""
    count, inside, escaped = 0, False, False
    for byte in data:
        if escaped:
            escaped = False
        elif byte == ord("\\"):
            escaped = True
        elif byte == ord('"'):
            inside = not inside
        elif byte == ord(",") and not inside:
            count += 1
    return count


@settings(max_examples=examples(200, 5000))
@given(VALUES, st.integers(0, 400), st.integers(0, 9))
def test_members_are_the_commas_outside_of_strings(value: Any, end: int, most: int) -> None:
    """Also up to where a text ends too soon: a decoder gets that far before it sees."""
    data = json.dumps(value).encode()[:end]
    assert members(data, most) == (commas(data) if data.count(b",") > most else 0)


def test_commas_in_texts_are_no_members() -> None:
    check_members(b'{"input":"' + b"1," * (2 * MAX_MEMBERS) + b'"}')
    with pytest.raises(MessageTooLarge, match=f"{MAX_MEMBERS + 1} members"):
        check_members(b'{"input":[' + b"1," * (MAX_MEMBERS + 1) + b"1]}")


@pytest.mark.parametrize(
    ("member", "value", "told"),
    [
        ("metadata", {"a": "x" * MAX_VALUE_BYTES}, f"{MAX_VALUE_BYTES + 8} bytes"),
        ("tool_choice", [1] * (MAX_VALUE_MEMBERS + 2), f"{MAX_VALUE_MEMBERS + 1} members"),
        ("stream_id", "x" * MAX_VALUE_BYTES, f"{MAX_VALUE_BYTES + 2} bytes"),
    ],
)
def test_what_can_only_be_decoded_whole_is_bounded(member: str, value: Any, told: str) -> None:
    frame = json.dumps({"type": "response.create", member: value}, separators=(",", ":")).encode()
    with pytest.raises(InvalidValue, match=told) as refused:
        decode_frame(peek(frame), frame)
    assert refused.value.param == member


def test_no_call_sees_a_long_text_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message, its items and their parts are looked into by type; what makes values of them gets a piece of a text."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    text = 'a "long" text\n' * 1000
    items = [
        {"role": "user", "content": text},
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": text},
        {"type": "function_call_output", "call_id": "c", "output": text},
    ]
    sizes: list[int] = []
    real = msgspec.json.decode

    def spy(data: Any, *, type: Any = Any) -> Any:
        if type is not Raw and type != list[Raw] and not getattr(type, "__name__", "").startswith("Raw"):
            sizes.append(len(data) if isinstance(data, str) else memoryview(data).nbytes)
        return real(data, type=type)

    monkeypatch.setattr(msgspec.json, "decode", spy)
    frame = json.dumps({"type": "response.create", "instructions": text, "input": items}).encode()
    create = decode_frame(peek(frame), frame)
    found = decode_input(create.input, max_items=9)  # type: ignore[union-attr]
    assert [getattr(item, "arguments", None) or item.text for item in found] == [text] * 4  # type: ignore[union-attr]
    assert create.instructions == text  # type: ignore[union-attr]
    assert max(sizes) <= 1002


def test_a_fault_in_a_long_text_is_told_with_its_place() -> None:
    with pytest.raises(InvalidValue, match=r"not valid JSON: .* \(byte 1002\)"):
        decode(b'"' + b"x" * 1000 + b'\\q"', str)
