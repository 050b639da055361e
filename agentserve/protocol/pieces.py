"""Large JSON in calls that each take a few milliseconds.

A decoder holds the interpreter lock from its call to its end: for 8 MiB of escapes 48 ms, two million numbers 200 ms, 800,000
keys 780 ms (EPYC core of a virtual machine). Nobody else is served meanwhile, whichever thread it is on. Here members are
counted before anything is made of them, long texts are decoded a piece at a time, and what lies around them by itself.
"""

from __future__ import annotations

import functools
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from agentserve.errors import InvalidValue, MessageTooLarge

PIECE_BYTES = 64 << 10
"""Decoded in at most half a millisecond, whatever it says."""
MAX_MEMBERS = 1 << 18
"""Commas outside of strings in one message: 20,000 items have half as many. Each member costs up to a microsecond."""
MAX_VALUE_BYTES = 2 << 20
MAX_VALUE_MEMBERS = 1 << 14
"""Of a value that can only be decoded whole, such as the schema of one tool."""
_OTHERS = bytes(set(range(256)) - set(b'",'))
_LONGEST_UNIT = 12
"""Bytes of what must not be cut: a surrogate pair in two escapes."""


# ── how many members ─────────────────────────────────────────────────────────────────────────────────────────────


def check_members(message: bytes | str) -> None:
    """Raises MessageTooLarge for a message that is small on the wire but not in memory."""
    if len(message) <= MAX_MEMBERS:
        return
    message = message.encode("utf-8", "surrogatepass") if isinstance(message, str) else message
    if (count := members(message, MAX_MEMBERS)) > MAX_MEMBERS:
        raise MessageTooLarge(f"the message has {count} members of lists and objects, at most {MAX_MEMBERS} are accepted")


def members(data: bytes | Raw, most: int) -> int:
    """Commas outside of strings, for JSON as for anything else; not counted where there cannot be more than `most`."""
    view = memoryview(data)
    pieces = (bytes(view[at : at + PIECE_BYTES]) for at in range(0, view.nbytes, PIECE_BYTES))
    if view.nbytes <= most or sum(piece.count(b",") for piece in pieces) <= most:
        return 0
    count = at = 0
    inside = False
    while at < view.nbytes:
        piece = bytes(view[at : at + PIECE_BYTES])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last backslash escapes what comes next
            piece = bytes(view[at : at + len(piece) + 1])
        at += len(piece)
        # Without escaped backslashes and quotes, every quote begins or ends a string.
        runs = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS).split(b'"')
        count += sum(map(len, runs[inside::2]))
        inside ^= len(runs) % 2 == 0
    return count


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────


def is_large(data: bytes | str | Raw) -> bool:
    return (len(data) if isinstance(data, str) else memoryview(data).nbytes) > PIECE_BYTES


def decode_large(data: bytes | str | Raw, kind: Any, where: str = "") -> Any:
    """As `msgspec.json.decode(data, type=kind)`, in short calls where kind is a Struct, `str` or a list of Raw.

    where: path of the value. Raises as msgspec does, and InvalidValue for a member that is too large to be decoded whole.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if kind is str:
        return decode_text(data)
    if isinstance(kind, type) and issubclass(kind, Struct) and not kind.__struct_config__.forbid_unknown_fields:
        return _decode_struct(data, kind, where)
    return msgspec.json.decode(data, type=kind)


def decode_text(data: bytes | Raw) -> str:
    """A JSON string, a piece at a time. Raises as msgspec does."""
    view = memoryview(data)
    if view.nbytes < 2 or bytes(view[:1]) != b'"' or bytes(view[-1:]) != b'"':
        return msgspec.json.decode(data, type=str)
    view, parts, at = view[1:-1], [], 0
    try:
        while at < view.nbytes:
            text, at = _decode_piece(view, at)
            parts.append(text)
    except msgspec.DecodeError:
        msgspec.json.decode(data, type=Raw)  # tells the place within the whole, of all but what is no UTF-8
        raise
    return "".join(parts)


def _decode_piece(view: memoryview, at: int) -> tuple[str, int]:
    """Text of up to PIECE_BYTES from `at` on, and where the next piece begins.

    What is cut within an escape or a surrogate pair is no JSON string, so the cut moves back until it is one.
    """
    cut = min(at + PIECE_BYTES, view.nbytes)
    while at < cut < view.nbytes and view[cut] & 0xC0 == 0x80:  # within a character
        cut -= 1
    earliest = cut if cut == view.nbytes else cut - _LONGEST_UNIT
    while True:
        try:
            return msgspec.json.decode(b'"%b"' % view[at:cut], type=str), cut
        except msgspec.DecodeError:
            if cut <= earliest:
                raise
            cut -= 1


def _decode_struct(data: bytes | Raw, kind: type[Struct], where: str) -> Struct:
    """Long members by themselves, the rest as a small object without them."""
    raws = msgspec.json.decode(data, type=_raw_form(kind))
    taken: dict[str, Any] = {}
    left: list[bytes] = []
    for field in msgspec.structs.fields(raws):
        raw = getattr(raws, field.name)
        if raw is UNSET:
            continue
        value = bytes(raw) if not is_large(raw) else _placeholder(raw, field.name, kind, where, taken)
        left.append(b'"%b":%b' % (field.encode_name.encode(), value))
    whole = msgspec.json.decode(b"{" + b",".join(left) + b"}", type=kind)
    return msgspec.structs.replace(whole, **taken)


def _placeholder(raw: Raw, name: str, kind: type[Struct], where: str, taken: dict[str, Any]) -> bytes:
    """What stands for a large member while the rest is decoded; it is put into `taken` by its name."""
    accepted, begin = _plainly_accepted(kind).get(name, frozenset()), bytes(memoryview(raw)[:1])
    if Raw in accepted:
        taken[name] = raw
        return b"null"
    if str in accepted and begin == b'"':
        taken[name] = decode_text(raw)
        return b'""'
    if list[Raw] in accepted and begin == b"[":
        taken[name] = msgspec.json.decode(raw, type=list[Raw])
        return b"[]"
    path = f"{where}.{name}".removeprefix(".")
    if (size := memoryview(raw).nbytes) > MAX_VALUE_BYTES:
        raise InvalidValue(f"{size} bytes, at most {MAX_VALUE_BYTES} are accepted here", path)
    if (count := members(raw, MAX_VALUE_MEMBERS)) > MAX_VALUE_MEMBERS:
        raise InvalidValue(f"{count} members of lists and objects, at most {MAX_VALUE_MEMBERS} are accepted here", path)
    return bytes(raw)


@functools.cache
def _plainly_accepted(kind: type[Struct]) -> dict[str, frozenset[Any]]:
    """Types that each field takes without further conditions, by name."""
    return {field.name: frozenset(_alternatives(field.type)) for field in msgspec.structs.fields(kind)}


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


@functools.cache
def _raw_form(kind: type[Struct]) -> type[Struct]:
    """The same members, none of them looked into; names that `kind` does not know are passed over, as it does."""
    fields: list[Any] = [
        (f.name, Raw | UnsetType, msgspec.field(default=UNSET, name=f.encode_name)) for f in msgspec.structs.fields(kind)
    ]
    if (tag := kind.__struct_config__.tag_field) is not None:
        fields.append((tag, Raw | UnsetType, UNSET))
    return msgspec.defstruct(f"Raw{kind.__name__}", fields, kw_only=True)
