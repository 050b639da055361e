"""Files in one directory per namespace: what survives a restart.

A segment becomes a temporary file, fsync, rename, fsync of the directory, and only then counts; so a crash leaves either a
whole segment or a temporary file, which the next start deletes. One that is not sealed yet keeps its temporary name, so that it
ends with the process. There is a folder for each kind of segment: of several that are sealed together the extents are renamed
and their folder is synced, then the states, then the logits. Every read checks the header's digest and the part's checksum. A
file that turns out bad is moved to `quarantine/`, where the newest few stay to be looked at.

Threads: one may put and seal while others read and delete.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from statecache.errors import SegmentBad, TierFailed, TierFull
from statecache.quarantine import Quarantine
from statecache.segment import encode_header, header_nbytes, part_sum
from statecache.tiers.base import Part, SegmentHeader, Take, nbytes_of, ordinary, pieces_of
from statecache.tiers.segment_files import SegmentFiles
from statecache.types import TierName

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_KEY_BYTES = 17
"""Of every key that the store uses."""
_KINDS = ("extent", "state", "logits")
"""In the order in which they are sealed: each needs those before it."""
_ALLOCATION = 4096
"""Files are charged in whole blocks of common file systems."""
_BUFFERS = 1024
"""Most that one system call writes; every system that is supported takes as many."""
ROOM_AGAIN = 8
"""Segments like the one that is written; so many must fit before a full disk counts as better."""


class DiskTier:
    """root: directory of this namespace, made if absent; nobody else may write there.

    reserve_bytes: free space left to others; when the disk gets that full the budget shrinks, so that the store evicts.
    take: memory for what is read. fsync: False only where losing the newest segments in a power cut is acceptable.
    """

    extent_blocks = 16
    stays = False

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        *,
        reserve_bytes: int = 1 << 30,
        name: TierName = "disk",
        fsync: bool = True,
        take: Take = ordinary,
    ) -> None:
        self.name: TierName = name
        self._root = root
        self._budget = budget_bytes
        self._reserve = reserve_bytes
        self._fsync = fsync
        self._take = take
        self._sizes: dict[bytes, int] = {}
        self._used = 0
        self._counts = threading.Lock()
        self.on_change: Callable[[bytes, SegmentHeader | None, int], None] = lambda key, header, nbytes: None
        """Told of each segment that was written and sealed (bytes charged) or is gone (None)."""
        self._unsealed: dict[bytes, tuple[str, SegmentHeader]] = {}
        """Where it lies meanwhile."""
        self._serial = itertools.count()
        self._folders: set[str] = set()
        """Those that are there, as far as is known."""
        self._segments = SegmentFiles(name)
        self._crowded = False
        self._quarantine = Quarantine(root / "quarantine")
        self._quarantine.make()
        self._scan()

    @property
    def budget_bytes(self) -> int:
        try:
            info = os.statvfs(self._root)
        except OSError:
            return min(self._budget, self._used)
        return max(0, min(self._budget, self._used + info.f_bavail * info.f_frsize - self._reserve))

    @budget_bytes.setter
    def budget_bytes(self, value: int) -> None:
        """A smaller budget takes effect at the next eviction."""
        self._budget = value

    @property
    def used_bytes(self) -> int:
        return self._used

    def cost(self, header: SegmentHeader, parts: Mapping[str, int]) -> int:
        return _charged(header_nbytes(_KEY_BYTES, header, parts) + sum(parts.values()))

    @property
    def unsealed(self) -> Collection[bytes]:
        return self._unsealed.keys()

    def put(self, key: bytes, header: SegmentHeader, parts: Mapping[str, Part], *, sealed: bool = True) -> int:
        arrays = {name: pieces_of(part) for name, part in parts.items()}
        sizes = {name: nbytes_of(pieces) for name, pieces in arrays.items()}
        head = encode_header(key, header, sizes, {name: part_sum(*pieces) for name, pieces in arrays.items()})
        cost = _charged(len(head) + sum(sizes.values()))
        budget = self.budget_bytes
        free = budget - self._used + self._sizes.get(key, 0)
        if cost > free:
            raise TierFull(self.name, cost, free)
        self._look_for_room(budget, cost, free - cost)
        temporary = f"{self._root}/tmp-{os.getpid()}-{next(self._serial)}"
        try:
            self._write(temporary, [head, *[a.data for pieces in arrays.values() for a in pieces if a.size]])
        except OSError as error:
            _discard(temporary)
            raise self._failure(error, cost) from error
        with self._counts:
            self._used += cost - self._sizes.get(key, 0)
            self._sizes[key] = cost
            earlier = self._unsealed.get(key)
            self._unsealed[key] = (temporary, header)
        if earlier is not None:
            _discard(earlier[0])
        if sealed:
            try:
                self._seal([key])
            except OSError as error:
                _discard(self._forget(key)[0])
                raise self._failure(error, cost) from error
        return cost

    def seal(self, keys: Iterable[bytes]) -> None:
        try:
            self._seal(keys)
        except OSError as error:
            raise TierFailed(f"tier {self.name}: {error.strerror}") from error

    def header(self, key: bytes) -> SegmentHeader:
        with self._open(key) as file:
            return self._segments.contents(key, file.fileno()).header

    def read(self, key: bytes, part: str) -> np.ndarray:
        with self._open(key) as file:
            offset, size, checksum = self._segments.part(key, file.fileno(), part)
            array = self._take(size)
            self._segments.fill(key, file.fileno(), part, array, offset, checksum)
        array.flags.writeable = False
        return array

    def read_into(self, key: bytes, part: str, out: np.ndarray, offset: int = 0) -> None:
        flat = out.reshape(-1)
        with self._open(key) as file:
            at, size, checksum = self._segments.part(key, file.fileno(), part)
            if size < offset + flat.nbytes:
                raise SegmentBad(self.name, key, f"part {part!r} has {size} bytes, need {offset + flat.nbytes}")
            if offset == 0 and flat.nbytes == size:
                self._segments.fill(key, file.fileno(), part, flat, at, checksum)
                return
            whole = np.empty(size, dtype=np.uint8)  # a checksum covers the whole part
            self._segments.fill(key, file.fileno(), part, whole, at, checksum)
        np.copyto(flat, whole[offset : offset + flat.nbytes])

    def delete(self, key: bytes) -> int:
        path, size = self._forget(key)
        if size:
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:  # read-only now; the next start finds it again
                log.warning("segment not deleted tier=%s reason=%s", self.name, error.strerror)
            self.on_change(key, None, 0)
        return size

    def set_aside(self, key: bytes, reason: str) -> None:
        """Move a bad segment to the quarantine, with the reason in a file beside it."""
        path, size = self._forget(key)
        if size:
            self._quarantine.take(Path(path), reason, file_name(key))
            self.on_change(key, None, 0)

    @property
    def root(self) -> Path:
        return self._root

    def reopen(self) -> set[bytes]:
        """After the directory was made again: the keys of segments that are counted and not there. Raises TierFailed."""
        try:
            self._quarantine.make()
            return {key for key in self.keys() if not os.path.exists(self._path(key))}
        except OSError as error:
            raise TierFailed(f"tier {self.name}: {error.strerror}") from error

    def sizes(self) -> dict[bytes, int]:
        """Bytes charged for each segment that is here."""
        return dict(self._sizes)

    def keys(self) -> Iterator[bytes]:
        return iter(list(self._sizes))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_for_room(self, budget: int, cost: int, left: int) -> None:
        """Say once when it is the disk, and not its budget, that takes no more, and once when it has room again."""
        crowded = budget < self._budget and left < cost
        if crowded and not self._crowded:
            log.warning(
                "the disk is full but for %d bytes left to others: older saved states are given up for new ones kept=%d",
                self._reserve,
                self._used,
            )
            self._crowded = True
        elif self._crowded and left > ROOM_AGAIN * cost:
            log.warning("the disk has room for saved states again")
            self._crowded = False

    def _seal(self, keys: Iterable[bytes]) -> None:
        """Raises OSError."""
        waiting = [(key, self._unsealed[key][1]) for key in dict.fromkeys(keys) if key in self._unsealed]
        for what in _KINDS:
            renamed = [(key, header) for key, header in waiting if header.what == what and self._rename(key)]
            for folder in {self._folder(key) for key, _ in renamed}:
                self._sync_directory(folder)
            for key, header in renamed:
                with self._counts:
                    size = self._sizes.get(key, 0) if self._unsealed.pop(key, None) is not None else 0
                if size:
                    self.on_change(key, header, size)

    def _rename(self, key: bytes) -> bool:
        """To the name of a sealed segment; it does not count as one before its folder is synced. False: it is gone."""
        with self._counts:  # so that it is not deleted under one name while it gets the other
            waiting = self._unsealed.get(key)
            if waiting is None:
                return False
            path = self._name(key)
            self._make_folder(key)
            try:
                os.rename(waiting[0], path)
            except FileNotFoundError:  # somebody has deleted a folder that was there
                self._folders.clear()
                self._make_folder(key)
                os.rename(waiting[0], path)
            self._unsealed[key] = (path, waiting[1])
            return True

    def _make_folder(self, key: bytes) -> None:
        folder = self._folder(key)
        if folder in self._folders:
            return
        path = Path(folder)
        if not path.exists():
            path.mkdir()
            self._sync_directory(str(self._root))
        self._folders.add(folder)

    def _folder(self, key: bytes) -> str:
        return f"{self._root}/{file_name(key)[:2]}"

    def _name(self, key: bytes) -> str:
        """Of a sealed segment."""
        name = file_name(key)
        return f"{self._root}/{name[:2]}/{name}"

    def _path(self, key: bytes) -> str:
        waiting = self._unsealed.get(key)
        return self._name(key) if waiting is None else waiting[0]

    def _forget(self, key: bytes) -> tuple[str, int]:
        """(where its file is, bytes it was charged)"""
        with self._counts:
            path = self._path(key)
            self._unsealed.pop(key, None)
            size = self._sizes.pop(key, 0)
            self._used -= size
        return path, size

    def _failure(self, error: OSError, cost: int) -> TierFull | TierFailed:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TierFull(self.name, cost, 0)
        return TierFailed(f"tier {self.name}: {error.strerror}")

    def _scan(self) -> None:
        """Count what an earlier process left, by names and sizes: opening every file is for those who need headers.

        Temporary files go, what has no segment's name is set aside. What lies in another folder than its own was put there by
        an earlier version, and moves.
        """
        for leftover in self._root.glob("tmp-*"):
            leftover.unlink(missing_ok=True)
        for entry in self._files():
            try:
                key = bytes.fromhex(entry.name.removesuffix(_SUFFIX))
                if file_name(key) != entry.name:
                    raise ValueError("not the name of a segment")
                size = entry.stat().st_size
                if self._name(key) != entry.path:
                    self._make_folder(key)
                    os.rename(entry.path, self._name(key))
            except ValueError as error:
                self._quarantine.take(Path(entry.path), str(error), entry.name)
            except OSError as error:
                log.warning("segment not counted file=%s reason=%s", entry.name, error.strerror)
            else:
                self._sizes[key] = _charged(size)
        self._used = sum(self._sizes.values())

    def _files(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._root) as entries:
            folders = [f.path for f in entries if len(f.name) == 2 and f.is_dir()]
        for folder in folders:
            with os.scandir(folder) as files:
                yield from [f for f in files if f.name.endswith(_SUFFIX)]  # all of them now: some may move

    def _write(self, path: str, buffers: list[bytes | memoryview]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            left = [memoryview(buffer) for buffer in buffers]
            while left:
                count = os.writev(descriptor, left[:_BUFFERS])
                while left and count >= len(left[0]):
                    count -= len(left.pop(0))
                if count:
                    left[0] = left[0][count:]
            if self._fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _sync_directory(self, directory: str) -> None:
        if not self._fsync:
            return
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _open(self, key: bytes):
        try:
            try:
                return open(self._path(key), "rb", buffering=0)
            except FileNotFoundError:  # perhaps it was sealed in between
                return open(self._name(key), "rb", buffering=0)
        except OSError as error:
            reason = "missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
            raise SegmentBad(self.name, key, reason) from None


def file_name(key: bytes) -> str:
    """Of a sealed segment; its first two digits are the name of its folder, one for each kind of segment."""
    return key.hex() + _SUFFIX


def _discard(temporary: str) -> None:
    """A file system that has become read-only refuses this too, even where there is no such file; the next start does it."""
    with contextlib.suppress(OSError):
        Path(temporary).unlink()


def _charged(nbytes: int) -> int:
    return -(-nbytes // _ALLOCATION) * _ALLOCATION
