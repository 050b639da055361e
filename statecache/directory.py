"""Where durable checkpoints lie: `ROOT/NAMESPACE/`, one directory per namespace, claimed by one process at a time.

Processes that serve one model side by side have one each: `ROOT/NAMESPACE.N/` for all but the first.

Opens and removes directories; what is inside is tiers/disk.py's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from statecache.errors import TierFailed
from statecache.types import Layout

log = logging.getLogger(__name__)
ABOUT = "about.json"
IMPORTING = ".import-"
"""How names of directories begin that an import unpacks into, or that are being deleted; both are claimed too."""
CLAIM_WAIT_S = 20.0
"""A worker that was told to end may still be writing its last checkpoints when the next one starts."""


def folder_of(root: Path, namespace: bytes, worker: int = 0) -> Path:
    """worker: number of the process among those that serve the namespace."""
    return root / (namespace.hex()[:32] + (f".{worker}" if worker else ""))


@dataclass
class Claim:
    """A namespace's directory that only this process may write to."""

    path: Path
    descriptor: int

    def holds(self) -> bool:
        """Whether what is locked still lies there; not if the directory was deleted, emptied or replaced."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path / "lock"))
        except OSError:
            return False

    def release(self) -> None:
        os.close(self.descriptor)


def claim(path: Path, *, wait_s: float = CLAIM_WAIT_S, waiting: Callable[[], None] = lambda: None) -> Claim:
    """Make the directory if absent and lock it. waiting() is called while another process has it. Raises TierFailed."""
    until = time.monotonic() + wait_s
    while True:
        try:
            held = _claimed(path)
        except OSError as error:
            raise TierFailed(f"{path}: {error.strerror}") from error
        if held is not None:
            return held
        if time.monotonic() >= until:
            raise TierFailed(f"{path} is used by another process: a server that runs, or another `cache` command")
        waiting()
        time.sleep(0.1)


def _claimed(path: Path) -> Claim | None:
    """None if another process has it. Raises OSError."""
    tries = 100
    while True:
        tries -= 1
        try:
            path.mkdir(parents=True, exist_ok=True)
            held = Claim(path, os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except (FileNotFoundError, FileExistsError):  # deleted between two of these steps, or never to be made
            if not tries:
                raise
            continue
        try:
            fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if held.holds():
                return held
        except BlockingIOError:
            held.release()
            return None
        except BaseException:
            held.release()
            raise
        held.release()  # deleted since the lock was opened: what was locked lies nowhere


@dataclass(frozen=True)
class About:
    """What a directory says of itself, for tools that do not load the model."""

    path: Path
    namespace: bytes
    model: str
    layout: Layout
    used_at: float
    """Seconds since the epoch of its last start."""
    worker: int = 0

    @property
    def label(self) -> str:
        return label_of(self.model, self.worker)


def label_of(model: str, worker: int) -> str:
    """The model's name, and which of its workers where it is not the first."""
    return f"{model}/{worker}" if worker else model


def describe(path: Path, namespace: bytes, model: str, layout: Layout, worker: int = 0) -> None:
    """Write the description; its time says when it was last used. Raises OSError."""
    fields = {
        "namespace": namespace.hex(),
        "model": model,
        "worker": worker,
        "kv_token_bytes": layout.kv_token_bytes,
        "state": [list(component) for component in layout.state],
        "vocab_size": layout.vocab_size,
    }
    temporary = path / (ABOUT + ".new")
    temporary.write_text(json.dumps(fields, indent=1) + "\n")
    temporary.rename(path / ABOUT)


def about(path: Path) -> About | None:
    """None when this is no such directory, or its description cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        file = path / ABOUT
        fields = json.loads(file.read_text())
        state = tuple((str(name), int(size)) for name, size in fields["state"])
        layout = Layout(int(fields["kv_token_bytes"]), state, int(fields["vocab_size"]))
        namespace, worker = bytes.fromhex(fields["namespace"]), int(fields.get("worker", 0))
        return About(path, namespace, str(fields["model"]), layout, file.stat().st_mtime, worker)
    return None


def namespaces(root: Path) -> list[About]:
    """All under a root, last used first."""
    paths = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(IMPORTING)] if root.is_dir() else []
    found = [about(path) for path in paths]
    return sorted((a for a in found if a is not None), key=lambda a: a.used_at, reverse=True)


def size_of(path: Path) -> int:
    """Bytes of all files below."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def remove(path: Path) -> bool:
    """Delete a namespace's directory. False when a process uses it."""
    try:
        held = claim(path, wait_s=0.0)
    except TierFailed:
        return False
    with contextlib.suppress(OSError):  # at once: who makes it anew meanwhile must not lose what it writes there
        path = path.rename(path.with_name(IMPORTING + secrets.token_hex(8)))
    shutil.rmtree(path, ignore_errors=True)
    held.release()
    return True


def remove_abandoned(root: Path) -> int:
    """Delete what imports and deletions that were killed have left; bytes freed."""
    freed = 0
    for path in root.glob(IMPORTING + "*"):
        size = size_of(path)
        freed += size if remove(path) else 0
    return freed


def make_room(root: Path, keep: Path, budget_bytes: int, beside: Collection[str] = ()) -> int:
    """The part of a budget for all namespaces that is left for one of them, after the longest unused others were removed.

    Others are removed only while they take more than half of the budget. beside: labels of all workers that run at the same
    time, this one among them: what the unused leave is divided equally among these, whatever they have by now.
    """
    remove_abandoned(root)
    others = [(a.path, size_of(a.path)) for a in namespaces(root) if a.path != keep and a.label not in beside]
    total = sum(size for _, size in others)
    for path, size in reversed(others):
        if total * 2 <= budget_bytes:
            break
        if remove(path):
            log.info("saved states of an unused model removed bytes=%d", size)
            total -= size
    return max(0, budget_bytes - total) // max(1, len(beside))
