"""Reading segments from open files: each checked before a byte of it is used. Knows no folders; see disk.py."""

from __future__ import annotations

import os

import numpy as np

from statecache.errors import SegmentBad
from statecache.segment import Contents, RunningSum, decode_header, header_length

READ_BYTES = 2 << 20
"""Read at once: small enough to be in the cache still when it is summed up."""


class SegmentFiles:
    """name: of the tier, for errors. Each method raises SegmentBad."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: tuple[tuple[int, ...], Contents] | None = None

    def contents(self, key: bytes, descriptor: int) -> Contents:
        """The header of an open file. That of the file read last is remembered: its parts are usually what is read next."""
        try:
            info = os.fstat(descriptor)
            file = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
            last = self._last
            if last is not None and last[0] == file and last[1].key == key:
                return last[1]
            length = header_length(os.pread(descriptor, 8, 0))
            contents = decode_header(os.pread(descriptor, length, 8))
            size = info.st_size
        except (ValueError, OSError) as error:
            raise SegmentBad(self._name, key, str(error)) from None
        if contents.key != key:
            raise SegmentBad(self._name, key, f"holds segment {contents.key.hex()}")
        if contents.nbytes != size:
            raise SegmentBad(self._name, key, f"file has {size} bytes, its header says {contents.nbytes}")
        self._last = (file, contents)
        return contents

    def part(self, key: bytes, descriptor: int, part: str) -> tuple[int, int, int]:
        found = self.contents(key, descriptor).parts.get(part)
        if found is None:
            raise SegmentBad(self._name, key, f"no part {part!r}")
        return found

    def fill(self, key: bytes, descriptor: int, part: str, out: np.ndarray, offset: int, checksum: int) -> None:
        """Read a part into its place; what has arrived is summed up in another thread while the rest is read."""
        running = RunningSum()
        try:
            for first in range(0, out.nbytes, READ_BYTES):
                piece = out.data[first : first + READ_BYTES]
                view, at = piece, offset + first
                while len(view):
                    count = os.preadv(descriptor, [view], at)
                    if count == 0:
                        raise SegmentBad(self._name, key, f"part {part!r} ends early")
                    view, at = view[count:], at + count
                running.add(piece, last=first + READ_BYTES >= out.nbytes)
        except OSError as error:
            raise SegmentBad(self._name, key, str(error.strerror)) from None
        finally:
            found = running.total()
        if found != checksum:
            raise SegmentBad(self._name, key, f"checksum of part {part!r} differs")
