"""Kill −9 at every point of a save, an eviction and a recovery; and power cuts: recorded operations with unsynced ones lost.

Afterwards each checkpoint is exact or missing, the bytes counted are the bytes on disk, index and files agree, and what was
acknowledged before is still there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import statecache.tiers.disk as disk_module
from statecache.index import queries
from statecache.index.connect import connect
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from tests.statecache.crash_child import CONTEXTS, opened
from tests.statecache.test_disk import on_disk, open_disk
from tests.statecache.test_failures import best
from tests.statecache.world import NAMESPACE, close_books, context, make, save

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["save", "oversized", "unproven", "evict", "recover"])
def test_a_kill_at_any_point_leaves_only_whole_checkpoints(tmp_path: Path, phase: str) -> None:
    command = [sys.executable, "-m", "tests.statecache.crash_child", phase, str(tmp_path)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    count = int(ran.stdout)
    assert count > 40
    found: list[tuple[int, ...]] = []
    for nth in range(count):
        root = tmp_path / str(nth)
        folder = root / NAMESPACE.hex()[:32]
        states = opened(root)
        close_books(states.cache)
        assert not list(folder.glob("tmp-*"))
        assert states.cache.stats().tiers["disk"].used_bytes == on_disk(folder)
        found.append(tuple(best(states.cache, tokens) for tokens in CONTEXTS))
        assert states.ledger is not None
        assert states.ledger.flush()
        engine = connect(f"sqlite:///{root / 'checkpoints.db'}")
        with engine.connect() as connection:
            rows = queries.known(connection, NAMESPACE)
        engine.dispose()
        assert rows.keys() == {bytes.fromhex(p.stem) for p in folder.glob("??/*.safetensors")}
        assert save(states.cache, CONTEXTS[0], 395).checkpoint_id
        states.close(0.0)
        shutil.rmtree(root)
    if phase == "unproven":
        assert {one for _, one, _ in found} == {0}, "what nothing proved is never found"
        assert {zero for zero, *_ in found} >= {0, 350}
    if phase in ("save", "oversized", "unproven"):  # more is there the later it was killed
        assert found == sorted(found)
        assert found[0] == (0, 0, 0)
        assert found[-1][0] == (350 if phase == "unproven" else 400)
    elif phase == "evict":
        assert found[-1][0] == 399
        assert {one for _, one, _ in found} >= {0, 150}, "it came, and went for what came after it"
    else:
        assert found[-1][1] == 290


class Recorder:
    """Operations on files as they were asked for, in order."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.log: list[tuple[str, str, str | bytes]] = []
        real_unlink, real_mkdir, real_rename = Path.unlink, Path.mkdir, os.rename

        def name(path: Path | str) -> str:
            return str(Path(path).relative_to(root))

        def write(_tier: DiskTier, path: str, buffers) -> None:
            data = b"".join(bytes(b) for b in buffers)
            Path(path).write_bytes(data)
            self.log += [("write", name(path), data), ("fsync", name(path), "")]

        def rename(source, target) -> None:
            real_rename(source, target)
            self.log.append(("rename", name(source), name(target)))

        def sync(_tier: DiskTier, directory: str) -> None:
            self.log.append(("fsync directory", name(directory), ""))

        def unlink(path: Path, missing_ok: bool = False) -> None:
            real_unlink(path, missing_ok=missing_ok)
            self.log.append(("unlink", name(path), ""))

        def mkdir(path: Path, *args, **kwargs) -> None:
            real_mkdir(path, *args, **kwargs)
            if path.is_relative_to(root) and path != root:
                self.log.append(("mkdir", name(path), ""))

        monkeypatch.setattr(DiskTier, "_write", write)
        monkeypatch.setattr(DiskTier, "_sync_directory", sync)
        monkeypatch.setattr(disk_module.os, "rename", rename)
        monkeypatch.setattr(Path, "unlink", unlink)
        monkeypatch.setattr(Path, "mkdir", mkdir)

    def after_power_cut(self, upto: int, target: Path, *, entries: str, data: str) -> None:
        """What a disk may hold after the first `upto` operations.

        entries "kept": directory changes reached the disk though nobody synced them; "lost": they did not; "states": only those
        of the states' folder did.
        data: what an unsynced file then holds, "kept", "zeros" or "nothing".
        """
        volatile: dict[str, list] = {}
        durable: dict[str, list] = {}
        for what, name, more in self.log[:upto]:
            if what == "write":
                volatile[name] = [more, False]  # shared by reference with what is durable: the file, not its name
            elif what == "fsync":
                volatile[name][1] = True
            elif what == "rename":
                volatile[str(more)] = volatile.pop(name)
            elif what == "unlink":
                volatile.pop(name, None)
            elif what == "fsync directory":
                inside = {n for n in durable.keys() | volatile.keys() if str(Path(n).parent) == name}
                for n in inside:
                    durable.pop(n, None)
                    if n in volatile:
                        durable[n] = volatile[n]
        for name in volatile.keys() | durable.keys():
            reached = volatile if entries == "kept" or (entries == "states" and is_state(name)) else durable
            if name not in reached:
                continue
            content, synced = reached[name]
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            lost = {"kept": content, "zeros": bytes(len(content)), "nothing": b""}[data]
            path.write_bytes(content if synced else lost)


def is_state(name: str) -> bool:
    return name.startswith(b"s".hex() + "/")


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("entries", ["kept", "lost", "states"])
@pytest.mark.parametrize("data", ["kept", "zeros", "nothing"])
def test_a_power_cut_at_any_point_leaves_only_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: str, data: str, together: int
) -> None:
    """together: so many are sealed at once."""
    root = tmp_path / "live"
    tokens, others = context(5, 400), [context(50 + n, 300) for n in range(3)]
    acknowledged: dict[int, int] = {}
    with monkeypatch.context() as patch:
        tier = DiskTier(root, 1 << 20, reserve_bytes=0)
        recorder = Recorder(root, patch)
        cache = make(tiers=[RamTier(1 << 20), tier], write_behind=True)
        positions = [100, 300, 390]
        for some in (positions[at : at + together] for at in range(0, 3, together)):
            cache.want([save(cache, tokens, position).checkpoint_id or "" for position in some])
            assert cache.copy_next(together)
            acknowledged[len(recorder.log)] = some[-1]
        tier.budget_bytes = tier.used_bytes + 4096
        for other in others:  # evicts
            cache.want([save(cache, other, 299).checkpoint_id or ""])
            cache.copy_next()
        assert cache.stats().tiers["disk"].evictions > 0
    first_eviction = next(i for i, (what, *_) in enumerate(recorder.log) if what == "unlink")
    seen = set()
    for upto in range(len(recorder.log) + 1):
        target = tmp_path / "after"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        recorder.after_power_cut(upto, target, entries=entries, data=data)
        states = {path.name for path in target.glob("??/*") if is_state(str(path.relative_to(target)))}
        disk = open_disk(target, 1 << 20)
        after = make(tiers=[disk])
        after.recover()
        close_books(after)
        assert disk.used_bytes == on_disk(target)
        if entries == "states":
            left = {path.name for path in target.glob("??/*") if is_state(str(path.relative_to(target)))}
            assert left == states, "no state is sealed before the blocks that it needs"
        got = best(after, tokens)
        seen.add(got)
        if upto <= first_eviction:
            assert got >= max((p for at, p in acknowledged.items() if at <= upto), default=0)
        for other in others:
            assert best(after, np.append(other, 1)) in (0, 299)
    assert {0, *acknowledged.values()} <= seen
