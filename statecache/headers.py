"""Keys and headers of a checkpoint's segments: made when they are written, compared with what is wanted when they are read."""

from __future__ import annotations

from statecache.checkpoint import Path, Record
from statecache.errors import SegmentBad
from statecache.tiers.base import SegmentHeader
from statecache.types import BLOCK_TOKENS


def segment_keys(record: Record) -> tuple[bytes, bytes]:
    """(state, logits)"""
    name = bytes.fromhex(record.id)
    return b"s" + name, b"l" + name


def extent_header(path: Path, first: int, end: int) -> SegmentHeader:
    """Of blocks [first, end)."""
    return SegmentHeader(
        "extent",
        path.namespace,
        path.salt,
        path.key(end - 1),
        path.key(first - 1),
        first * BLOCK_TOKENS,
        end * BLOCK_TOKENS,
        path.block_ids(first, end),
    )


def state_header(path: Path, what: str, record: Record) -> SegmentHeader:
    """what: state or logits."""
    key, start = path.key(path.blocks - 1), path.blocks * BLOCK_TOKENS
    ids = path.ids[4 * start :]
    assert what in ("state", "logits")
    return SegmentHeader(what, path.namespace, path.salt, key, key, start, path.position, ids, record.kind, record.item)


def check_header(tier: str, key: bytes, header: SegmentHeader, path: Path, start: int, end: int, what: str) -> None:
    """Raises SegmentBad unless the segment is this path's [start, end) under its namespace and salt."""
    if header.what != what:
        raise SegmentBad(tier, key, f"is {header.what}, not {what}")
    if header.namespace != path.namespace:
        raise SegmentBad(tier, key, "other namespace")
    if header.salt != path.salt:
        raise SegmentBad(tier, key, "other salt")
    if header.start != start or (header.position < end if what == "extent" else header.position != end):
        raise SegmentBad(tier, key, f"covers [{header.start}, {header.position}), not [{start}, {end})")
    if header.tokens[: 4 * (end - start)] != path.ids[4 * start : 4 * end]:
        raise SegmentBad(tier, key, "other token ids")
