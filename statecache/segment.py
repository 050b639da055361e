"""A segment as a file: safetensors with a self-describing, self-checking header. Encodes and decodes; opens nothing.

The metadata carries every field of SegmentHeader, the segment's key, one xxh3_64 per part, and a SHA-256 over all of that
together with the table of parts. Any safetensors reader can list and load the parts (all uint8).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import xxhash

from statecache.tiers.base import SegmentHeader

FORMAT = "statecache-segment-1"
MAX_HEADER_BYTES = 1 << 22
"""A length field beyond this is damage, not a header: 1,024 token ids take 8 KiB."""

_KINDS = ("extent", "state", "logits")


@dataclass(frozen=True, slots=True)
class Contents:
    """A decoded header. parts: name → (offset in the file, nbytes, xxh3_64). nbytes: of the whole file."""

    key: bytes
    header: SegmentHeader
    parts: dict[str, tuple[int, int, int]]
    nbytes: int


# Compact, as json.dumps(…, separators=(",", ":")) has it for ASCII, which is all that we write; a header costs a fifth so.
_plain = msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="sorted").encode


def encode_header(key: bytes, header: SegmentHeader, sizes: Mapping[str, int], sums: Mapping[str, int]) -> bytes:
    """Length field and JSON header, padded with blanks to 8 bytes. Its length depends on sizes only, not on sums."""
    meta, table = _fields(key, header, sizes, ",".join([f"{sums[name]:016x}" for name in sizes]))
    meta["digest"] = _digest(meta, table)
    text = _plain({"__metadata__": meta, **table})
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_nbytes(key_nbytes: int, header: SegmentHeader, sizes: Mapping[str, int]) -> int:
    """Length of what encode_header() gives for a key of so many bytes, without its sums. Added up: to make the text costs ten
    times as much."""
    names = header.namespace, header.salt, header.key, header.parent, header.tokens
    length = _BARE_NBYTES + len(header.what) + len(_plain(header.kind)) - 2 + 2 * (key_nbytes + sum(map(len, names)))
    length += len(str(header.start)) + len(str(header.position)) + len(str(header.item))
    end = 0
    for name, size in sizes.items():
        start, end = end, end + size
        length += _PART_NBYTES + len(_plain(name)) + len(str(size)) + len(str(start)) + len(str(end))
    length -= bool(sizes)  # sums have commas between them
    return 8 + length + -length % 8


def _fields(
    key: bytes, header: SegmentHeader, sizes: Mapping[str, int], sums: str
) -> tuple[dict[str, str], dict[str, dict[str, object]]]:
    """Metadata but for the digest, and the table of parts."""
    table: dict[str, dict[str, object]] = {}
    at = 0
    for name, size in sizes.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    meta = {
        "format": FORMAT,
        "segment": key.hex(),
        "what": header.what,
        "namespace": header.namespace.hex(),
        "salt": header.salt.hex(),
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "start": str(header.start),
        "position": str(header.position),
        "tokens": header.tokens.hex(),
        "kind": header.kind,
        "item": str(header.item),
        "sums": sums,
    }
    return meta, table


_BARE = SegmentHeader("extent", b"", b"", b"", b"", 0, 0, b"", item=0)
_BARE_NBYTES = len(_plain({"__metadata__": {**_fields(b"", _BARE, {}, "")[0], "digest": "0" * 64}})) - len("extent000")
_PART_NBYTES = len(',:{"dtype":"U8","shape":[],"data_offsets":[,]}') + len("0123456789abcdef,")
"""Of a header, and of a part in it with its sum, beside what depends on them."""


def part_sum(*pieces: np.ndarray) -> int:
    """Of bytes in one array, or in several that follow one another."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0].reshape(-1).data) if pieces[0].size else 0
    running = xxhash.xxh3_64()
    for piece in pieces:
        running.update(piece.reshape(-1).data)
    return running.intdigest() if any(piece.size for piece in pieces) else 0


class RunningSum:
    """part_sum() of bytes that arrive one piece after another, computed in a second thread. Use it from one thread.

    The thread is shared by all of them: summing is several times as fast as any disk, and it lets go of the interpreter.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._summed: Future[None] | None = None
        self._pieces = 0

    def add(self, piece: memoryview, *, last: bool) -> None:
        """The bytes must stay as they are until total(). last: nothing follows, so nothing is gained by handing it over."""
        self._pieces += 1
        if last and self._summed is None:
            self._hash.update(piece)
        else:
            self._summed = _summing().submit(self._hash.update, piece)

    def total(self) -> int:
        """Waits for the other thread."""
        if self._summed is not None:
            self._summed.result()
        return self._hash.intdigest() if self._pieces else 0


@cache
def _summing() -> ThreadPoolExecutor:
    """One worker, so that pieces are taken in order."""
    return ThreadPoolExecutor(1, thread_name_prefix="sum")


def header_length(first_8_bytes: bytes) -> int:
    """Bytes of the JSON header. Raises ValueError when that cannot be."""
    length = int.from_bytes(first_8_bytes, "little")
    if len(first_8_bytes) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        raise ValueError("no header")
    return length


def decode_header(text: bytes) -> Contents:
    """Raises ValueError, saying what is wrong, unless every field is exactly what was written."""
    try:
        table = json.loads(text)
        meta = table.pop("__metadata__")
        stated = meta.pop("digest")
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']!r}")
        if stated != _digest(meta, table):
            raise ValueError("header digest differs")
        what = meta["what"]
        if what not in _KINDS:
            raise ValueError(f"kind of segment {what!r}")
        header = SegmentHeader(
            what=what,
            namespace=bytes.fromhex(meta["namespace"]),
            salt=bytes.fromhex(meta["salt"]),
            key=bytes.fromhex(meta["key"]),
            parent=bytes.fromhex(meta["parent"]),
            start=int(meta["start"]),
            position=int(meta["position"]),
            tokens=bytes.fromhex(meta["tokens"]),
            kind=meta["kind"],
            item=int(meta["item"]),
        )
        base = 8 + len(text)
        sums = meta["sums"].split(",") if meta["sums"] else []
        parts: dict[str, tuple[int, int, int]] = {}
        end = 0
        for (name, entry), checksum in zip(table.items(), sums, strict=True):
            start, end = entry["data_offsets"]
            parts[name] = (base + start, end - start, int(checksum, 16))
        return Contents(bytes.fromhex(meta["segment"]), header, parts, base + end)
    except ValueError:
        raise
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"header field: {error!r}") from None


def _digest(meta: Mapping[str, str], table: Mapping[str, object]) -> str:
    return hashlib.sha256(_sorted([meta, table])).hexdigest()
