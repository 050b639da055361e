"""Runs the same short life of saved states again and again and kills itself (SIGKILL) at one point later each time.

    python -m tests.statecache.crash_child PHASE ROOT

PHASE: save, oversized, unproven, evict or recover. ROOT/0, ROOT/1, … are left as the kills left them; the last one ran to its
end. Prints how many. A point lies before and after each file write (and in the middle of it), fsync, rename, unlink and SQL
commit. It forks, so that imports are paid once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
from sqlalchemy.engine.default import DefaultDialect

import statecache.tiers.disk as disk_module
from statecache.copies import SEALED_TOGETHER
from statecache.durable import DiskSettings, SavedStates, open_states
from statecache.tiers.disk import DiskTier
from statecache.types import Boundary, BoundaryKind
from tests.statecache.world import LAYOUT, NAMESPACE, SALT, context, save, truth

SMALL = 36_000
LITTLE = 8_000
"""Memory for about 260 tokens."""
CONTEXTS = [context(1, 400), context(2, 300), np.concatenate([context(1, 200), context(3, 200)])]


class Points:
    """Dies at the nth one."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def around(self, function):
        def wrapped(*args, **kwargs):
            self()
            result = function(*args, **kwargs)
            self()
            return result

        return wrapped

    def install(self) -> None:
        def write(_tier, path, buffers):
            self()
            data = b"".join(bytes(b) for b in buffers)
            with open(path, "xb", buffering=0) as file:
                file.write(data[: len(data) // 2])
                self()
                file.write(data[len(data) // 2 :])
                self()
                os.fsync(file.fileno())
                self()

        DiskTier._write = write  # pyright: ignore[reportAttributeAccessIssue]
        disk_module.os.rename = self.around(os.rename)
        DiskTier._sync_directory = self.around(DiskTier._sync_directory)
        Path.unlink = self.around(Path.unlink)
        Path.rename = self.around(Path.rename)
        DefaultDialect.do_commit = self.around(DefaultDialect.do_commit)


def opened(root: Path, budget: int = 1 << 24, ram: int = 1 << 20) -> SavedStates:
    url = f"sqlite:///{root / 'checkpoints.db'}"
    return open_states(NAMESPACE, LAYOUT, ram, DiskSettings(root, budget, 0, claim_wait_s=0.0, index_url=url))


def by_hand(states: SavedStates) -> SavedStates:
    """Without the writing thread, so that the same point is the same moment each time."""
    assert states.writer is not None
    states.writer.close(0.0)
    return states


def write(states: SavedStates, which: int, *positions: int, logits: bool = False) -> None:
    ids = [save(states.cache, CONTEXTS[which], p, logits=logits).checkpoint_id for p in positions]
    states.cache.want([i for i in reversed(ids) if i])
    settle(states)


def write_unproven(states: SavedStates, which: int, position: int) -> str:
    """Put what nobody has seen finite logits of, and bring it to the disk as far as it may come."""
    cache, tokens = states.cache, CONTEXTS[which]
    payload = truth(tokens, SALT, position, start=cache.kv_missing_from(tokens, SALT, position))
    placed = cache.put(tokens, SALT, Boundary(position, BoundaryKind.LADDER), payload, proven=False).checkpoint_id or ""
    cache.want([placed])
    settle(states)
    return placed


def settle(states: SavedStates) -> None:
    while states.cache.copy_next(SEALED_TOGETHER) is not None:
        pass
    if states.ledger is not None:
        states.ledger.flush()


def life(phase: str, root: Path, points: Points | None) -> None:
    """What is prepared is not killed."""
    if phase == "save":
        if points:
            points.install()
        states = opened(root)
        write(states, 0, 100, 390)
        write(states, 0, 400, logits=True)
        states.close(0.0, everything=False)
        return
    if phase == "oversized":
        if points:
            points.install()
        states = by_hand(opened(root, ram=LITTLE))
        for position in (100, 200, 290, 350, 400):
            write(states, 0, position, logits=position == 400)
        states.close(0.0, everything=False)
        return
    if phase == "unproven":
        if points:
            points.install()
        states = by_hand(opened(root, ram=LITTLE))
        ids = [write_unproven(states, 0, position) for position in (100, 200, 290, 350, 400)]
        write_unproven(states, 1, 150)
        states.cache.prove(ids)
        settle(states)
        write_unproven(states, 1, 290)
        states.close(0.0, everything=False)
        return
    states = opened(root, SMALL if phase == "evict" else 1 << 24)
    write(states, 0, 100, 390)
    write(states, 2, 399)
    if phase == "evict":
        if points:
            points.install()
        write(states, 1, 150, 290)
        write(states, 0, 399)
        assert states.cache.stats().tiers["disk"].evictions
        states.close(0.0, everything=False)
        return
    states.close(0.0, everything=False)
    folder = root / NAMESPACE.hex()[:32]
    segments = sorted(folder.glob("??/*.safetensors"))
    os.truncate(segments[0], 100)
    segments[-1].unlink()
    (folder / "tmp-1-1").write_bytes(b"half")
    if points:
        points.install()
    states = opened(root)
    write(states, 1, 290)
    states.close(0.0, everything=False)


def main() -> None:
    phase, base = sys.argv[1], Path(sys.argv[2])
    for nth in range(10_000):
        root = base / str(nth)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            life(phase, root, Points(nth))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                raise SystemExit(f"child failed at point {nth}")
            print(nth + 1)
            return


if __name__ == "__main__":
    main()
