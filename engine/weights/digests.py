"""Content digests of tensors, remembered from load to load. Which tensors make a model's digest is fingerprint.py's business.

A file is known by device, inode, size, and times of change to the nanosecond; a changed byte changes the last two, unless
somebody set the machine's clock back to hide it. A file that has changed within the last seconds is not remembered: a clock
that ticks coarsely may give the next change the same time. What is remembered is checked on demand (`verify`).
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

log = logging.getLogger(__name__)

VERSION = 1
SETTLED_S = 3.0
"""Since the last change of a file, before it is remembered."""
KEPT_FILES = 4096
"""Files that are remembered, those of the newest loads."""


class Digests:
    """xxh3_128 of tensors.

    path: JSON file to remember them in; None remembers nothing. verify: compute all of them, and warn of one that differs.
    computed: tensors that were read. clock: Unix seconds.
    """

    def __init__(self, path: Path | None = None, *, verify: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._verify = verify
        self._clock = clock
        self._known = {} if path is None else _read(path)
        self._now: dict[Path, tuple[str, dict[str, str]]] = {}
        """Identity and digests of each file that was asked for."""
        self.computed = 0

    def content(self, file: Path, name: str, raw: torch.Tensor) -> bytes:
        """16 bytes for a tensor of a file. raw: its bytes, uint8 [nbytes], contiguous; not read if they are remembered."""
        if file not in self._now:
            self._now[file] = (_identity(file), {})
        identity, digests = self._now[file]
        known = self._known.get(identity, {}).get(name)
        if known is None or self._verify:
            self.computed += 1
            digest = xxhash.xxh3_128_hexdigest(raw.numpy().data)
            if known is not None and known != digest:
                log.warning("weights differ from what was remembered of the same file file=%s tensor=%s", file.name, name)
            known = digest
        digests[name] = known
        return bytes.fromhex(known)

    def save(self) -> None:
        """Remember what was asked for since the start. A place that cannot be written costs the next load its time, no more."""
        if self._path is None or not self.computed:
            return
        files = {k: v for k, v in self._known.items() if k not in {identity for identity, _ in self._now.values()}}
        for file, (identity, digests) in self._now.items():
            stat = file.stat()
            settled = self._clock() - max(stat.st_mtime, stat.st_ctime) >= SETTLED_S
            if settled and _identity(file) == identity:
                files[identity] = {**({} if self._verify else self._known.get(identity, {})), **digests}
        newest = dict(list(files.items())[-KEPT_FILES:])
        try:
            _write(self._path, {"version": VERSION, "files": newest})
        except OSError as error:
            log.warning("digests of weights not remembered reason=%s", error.strerror)


def _identity(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _read(path: Path) -> dict[str, dict[str, str]]:
    """What a file remembers; nothing if it is missing, of another version or damaged."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != VERSION:
            return {}
        return {
            str(identity): {str(name): bytes.fromhex(digest).hex() for name, digest in tensors.items() if len(digest) == 32}
            for identity, tensors in content["files"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("digests of weights cannot be read, computing them file=%s error=%s", path, type(error).__name__)
        return {}


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
