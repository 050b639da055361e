"""Restart, damage and crash: afterwards a checkpoint is whole or not there, and the bytes counted are the bytes on disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import statecache.tiers.disk as disk_module
from statecache.errors import TierFailed, TierFull
from statecache.segment import decode_header, encode_header, header_nbytes
from statecache.store import StateCache
from statecache.tiers.base import SegmentHeader
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import BoundaryKind
from tests.statecache.test_failures import best
from tests.statecache.world import NAMESPACE, OTHER_SALT, SALT, close_books, context, make, save


def open_disk(root: Path, budget: int = 1 << 24) -> DiskTier:
    return DiskTier(root, budget, reserve_bytes=0, fsync=False)


def restart(root: Path, **kwargs) -> StateCache:
    cache = make(tiers=[RamTier(1 << 20), open_disk(root)], **kwargs)
    cache.recover()
    return cache


def on_disk(root: Path) -> int:
    sizes = [p.stat().st_size for p in root.glob("??/*.safetensors")]
    return sum(-(-s // 4096) * 4096 for s in sizes)


def filled(root: Path) -> tuple[StateCache, np.ndarray]:
    """Checkpoints at 100, 1200 and 1500 (with logits) of one context, one beside it, all on disk too."""
    cache, tokens = restart(root), context(1, 1500)
    save(cache, tokens, 100, BoundaryKind.SYSTEM)
    save(cache, tokens, 1200)
    save(cache, tokens, 1500, BoundaryKind.PROMPT_END, logits=True)
    save(cache, np.concatenate([tokens[:700], context(2, 200)]), 900)
    save(cache, tokens, 300, salt=OTHER_SALT)
    assert cache.write_back() > 0
    assert cache.write_back() == 0
    close_books(cache)
    return cache, tokens


def test_checkpoints_survive_a_restart(tmp_path):
    before, tokens = filled(tmp_path)
    used = before.stats().tiers["disk"].used_bytes
    assert used == on_disk(tmp_path)
    after = restart(tmp_path)
    assert after.stats().tiers["disk"].used_bytes == used
    assert [(i.id, i.position, i.kind) for i in after.checkpoints()] == [
        (i.id, i.position, i.kind) for i in before.checkpoints()
    ]
    close_books(after)
    assert best(after, tokens) == 1500
    assert best(after, tokens[:1400]) == 1200
    assert best(after, np.concatenate([tokens[:700], context(2, 200), [1]])) == 900
    assert best(after, tokens[:400], OTHER_SALT) == 300
    assert best(after, tokens, b"c" * 32) == 0
    with after.match(tokens, SALT) as match:
        assert match.tier == "disk"
    assert save(after, tokens, 1450).checkpoint_id is not None
    close_books(after)


@pytest.mark.parametrize("position", [1, 63, 64, 65, 1023, 1024, 1025, 1100])
def test_any_position_restores_after_a_restart(tmp_path, position):
    tokens = context(3, 1101)
    first = restart(tmp_path)
    save(first, tokens, position)
    first.write_back()
    assert best(restart(tmp_path), tokens) == position


def test_another_namespace_finds_nothing_and_takes_the_room(tmp_path):
    _, tokens = filled(tmp_path)
    other = restart(tmp_path, namespace=b"m" * 32)
    assert best(other, tokens) == 0
    assert on_disk(tmp_path) == 0
    close_books(other)


def test_files_are_plain_safetensors(tmp_path):
    filled(tmp_path)
    parts = [load_file(p) for p in tmp_path.glob("??/*.safetensors")]
    assert {name for p in parts for name in p} == {"kv", "kv.tail", "state.delta", "state.conv", "logits"}


DAMAGE = {
    "truncated": lambda p: os.truncate(p, p.stat().st_size - 1),
    "emptied": lambda p: os.truncate(p, 0),
    "zeroed": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "grown": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "deleted": lambda p: p.unlink(),
    "last bit": lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("when", ["running", "restarted"])
def test_every_damaged_file_is_a_miss(tmp_path, damage, when):
    _, tokens = filled(tmp_path / "whole")
    names = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").glob("??/*.safetensors"))
    for i, name in enumerate(names):
        root = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", root)
        if when == "restarted":
            DAMAGE[damage](root / name)
        cache = restart(root)
        if when == "running":
            DAMAGE[damage](root / name)
        positions = (best(cache, tokens), best(cache, tokens[:400], OTHER_SALT))
        assert positions in {(1500, 300), (1200, 300), (900, 300), (100, 300), (0, 300), (1500, 0)}
        assert positions[0] == best(cache, tokens)  # what is bad is bad once
        for other in (tokens[:1400], tokens[:101], np.concatenate([tokens[:700], context(2, 200), [1]])):
            best(cache, other)
        close_books(cache)
        assert save(cache, tokens, 1500, logits=True).checkpoint_id is not None
        assert best(cache, tokens) == 1500


@pytest.mark.parametrize("what", ["state", "extent", "logits"])
def test_any_flipped_bit_of_a_file_is_noticed(tmp_path, what):
    """Every byte of one file, header fields and parts: never other bytes than those saved."""
    cache, tokens = restart(tmp_path), context(4, 70)
    save(cache, tokens, 70, logits=True)
    cache.write_back()
    first = {"state": b"s", "extent": b"x", "logits": b"l"}[what]
    path = next(p for p in tmp_path.glob("??/*.safetensors") if p.name.startswith(first.hex()))
    good = path.read_bytes()
    cache = restart(tmp_path)
    shelf = cache._kept.shelves[1]
    (record,) = cache._kept.records.values()
    for at in range(0, len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        with pytest.raises(Exception, match="segment"):
            shelf.read(record, shelf.path(record))
    path.write_bytes(good)
    assert best(cache, tokens) == 70


def _reheaded(path: Path, **changes: object) -> None:
    """The same parts under a header that is sound in itself but says something else."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    contents = decode_header(data[8 : 8 + length])
    sizes = {name: size for name, (_, size, _) in contents.parts.items()}
    sums = {name: checksum for name, (*_, checksum) in contents.parts.items()}
    path.write_bytes(encode_header(contents.key, replace(contents.header, **changes), sizes, sums) + data[8 + length :])


FOREIGN = {
    "older format": lambda p: p.write_bytes(p.read_bytes().replace(b"statecache-segment-1", b"statecache-segment-0")),
    "another namespace": lambda p: _reheaded(p, namespace=b"m" * 32),
    "another salt": lambda p: _reheaded(p, salt=b"c" * 32),
    "another position": lambda p: _reheaded(p, position=1),
    "other tokens": lambda p: _reheaded(p, tokens=bytes(len(decode_header(_head(p)).header.tokens))),
    "another parent": lambda p: _reheaded(p, parent=b"q" * 16),
    "no segment at all": lambda p: p.write_bytes(b"PK" + os.urandom(3000)),
}


def _head(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.parametrize("kind", ["x", "s"])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_segment_is_a_miss_and_is_told(tmp_path, foreign, kind, caplog):
    """Found at the start, or, put there while it runs, at the next read; quarantined with its reason where it is not sound."""
    for when in ("running", "restarted"):
        root = tmp_path / when
        _, tokens = filled(root)
        path = sorted(p for p in root.glob("??/*.safetensors") if p.name.startswith(kind.encode().hex()))[0]
        cache = restart(root) if when == "running" else None
        FOREIGN[foreign](path)
        cache = cache or restart(root)
        for asked, salt in ((tokens, SALT), (tokens[:1400], SALT), (tokens[:101], SALT), (tokens[:400], OTHER_SALT)):
            best(cache, asked, salt)
            assert best(cache, asked, salt) == best(cache, asked, salt)
        close_books(cache)
        if when == "running" and foreign != "another parent":  # whose parent it names is of no use to a reader
            assert cache.stats().tiers["disk"].quarantined == 1
            assert (root / "quarantine" / path.name).exists()
            assert (root / "quarantine" / path.name).with_suffix(".reason").read_text().strip()
            assert any("quarantined" in r.message for r in caplog.records)
        assert save(cache, tokens, 1500, logits=True).checkpoint_id is not None
        assert best(cache, tokens) == 1500


class Killed(BaseException):
    """Stands for kill −9: the directory is copied at that moment and only the copy is looked at."""


BUDGET = 32_768
OPERATIONS = ["name", "write", "fsync", "rename", "unlink"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_around_any_file_operation_leaves_only_whole_checkpoints(tmp_path, monkeypatch, operation, moment):
    tokens = context(5, 400)
    survivors: list[int] = []
    for nth in range(1, 60):
        root = tmp_path / "live" / str(nth)
        copy = tmp_path / "copy" / str(nth)
        calls = 0

        def strike(target, *, nth=nth, root=root, copy=copy):
            def wrapped(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == nth and moment == "before":
                    shutil.copytree(root, copy)
                    raise Killed
                result = target(*args, **kwargs)
                if calls == nth:
                    shutil.copytree(root, copy)
                    raise Killed
                return result

            return wrapped

        cache = make(tiers=[DiskTier(root, BUDGET, reserve_bytes=0, fsync=operation == "fsync")])
        with monkeypatch.context() as patch:
            targets = {"write": (DiskTier, "_write"), "name": (DiskTier, "_name"), "unlink": (Path, "unlink")}
            owner, name = targets.get(operation, (disk_module.os, operation))
            patch.setattr(owner, name, strike(getattr(owner, name)))
            try:
                for position in (100, 300, 390):
                    save(cache, tokens, position)
                for seed in range(3):  # the budget is small: this evicts
                    save(cache, context(50 + seed, 300), 299)
            except Killed:
                pass
        if not copy.exists():
            break
        tier = open_disk(copy, BUDGET)
        after = make(tiers=[tier])
        after.recover()
        close_books(after)
        assert tier.used_bytes == on_disk(copy)
        assert not list(copy.glob("tmp-*"))
        survivors.append(best(after, tokens))
        for seed in range(3):
            assert best(after, np.append(context(50 + seed, 300), 1)) in (0, 299)
        assert save(after, tokens, 390).checkpoint_id is not None
        close_books(after)
    assert survivors
    assert operation == "unlink" or {0, 100, 300} <= set(survivors)


def test_a_full_disk_shrinks_the_budget_is_told_once_and_is_no_error(tmp_path, monkeypatch, caplog):
    tier = DiskTier(tmp_path, 1 << 24, reserve_bytes=1 << 20, fsync=False)
    cache = make(tiers=[tier])
    for seed in range(4):
        assert save(cache, context(seed, 200), 199).checkpoint_id is not None
    used = tier.used_bytes

    class Nearly:
        """What this cache gives up becomes free; beside that only the reserve is left."""

        f_frsize = 4096

        @property
        def f_bavail(self):
            return ((1 << 20) + used - tier.used_bytes) // 4096

    monkeypatch.setattr(disk_module.os, "statvfs", lambda path: Nearly())
    assert tier.budget_bytes == used
    for seed in range(9, 14):
        assert save(cache, context(seed, 200), 199).checkpoint_id is not None  # something else went
    assert cache.stats().tiers["disk"].evictions > 0
    assert [r.getMessage().split(":")[0] for r in caplog.records if r.name == "statecache.tiers.disk"] == [
        f"the disk is full but for {1 << 20} bytes left to others"
    ]
    used = 1 << 22
    save(cache, context(20, 200), 199)
    assert sum("has room for saved states again" in r.getMessage() for r in caplog.records) == 1
    close_books(cache)


def test_no_space_during_a_write_takes_everything_back(tmp_path, monkeypatch):
    cache, tokens = make(tiers=[open_disk(tmp_path)]), context(7, 200)
    save(cache, tokens, 100)
    used = on_disk(tmp_path)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, "rename", full)
        assert save(cache, tokens, 199).checkpoint_id is None
        with pytest.raises(TierFull):
            cache._kept.shelves[0].tier.put(b"z" * 17, SegmentHeader("state", b"", b"", b"", b"", 0, 0, b""), {})
    assert (on_disk(tmp_path), list(tmp_path.glob("tmp-*"))) == (used, [])
    close_books(cache)
    assert best(cache, tokens) == 100
    assert save(cache, tokens, 199).checkpoint_id is not None


headers = st.builds(
    SegmentHeader,
    what=st.sampled_from(["extent", "state", "logits"]),
    namespace=st.binary(max_size=32),
    salt=st.binary(max_size=32),
    key=st.binary(max_size=16),
    parent=st.binary(max_size=16),
    start=st.integers(0, 2**40),
    position=st.integers(0, 2**40),
    tokens=st.binary(max_size=64),
    kind=st.text(max_size=5),
    item=st.integers(-1, 2**31),
)
part_sizes = st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.integers(0, 9999), max_size=4)


@given(header=headers, key=st.binary(max_size=17), sizes=part_sizes, fill=st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_a_header_says_what_was_written(header, key, sizes, fill):
    sums: dict[str, int] = dict.fromkeys(sizes, fill)
    head = encode_header(key, header, sizes, sums)
    assert len(head) == header_nbytes(len(key), header, sizes)
    assert len(head) % 8 == 0
    contents = decode_header(head[8:])
    assert (contents.key, contents.header) == (key, header)
    assert {n: (size, total) for n, (_, size, total) in contents.parts.items()} == {n: (sizes[n], fill) for n in sizes}
    assert contents.nbytes == len(head) + sum(sizes.values())


def test_headers_are_the_bytes_that_earlier_versions_wrote():
    """Compact JSON, and a digest over it with sorted keys, both as Python's own json has them."""
    header = SegmentHeader("state", b"n" * 32, b"s" * 32, b"k" * 16, b"", 64, 70, b"t" * 24, BoundaryKind.TURN, 3)
    sizes = {"state.layer.1.delta": 96, "kv.tail": 48, "empty": 0}
    head = encode_header(b"s" + b"i" * 16, header, sizes, {"state.layer.1.delta": 7, "kv.tail": 2**64 - 1, "empty": 0})
    text = head[8:].decode()
    table = json.loads(text)
    assert json.dumps(table, separators=(",", ":")) == text.rstrip(" ")
    meta = table.pop("__metadata__")
    digest = meta.pop("digest")
    signed = json.dumps([meta, table], sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(signed.encode()).hexdigest() == digest


def test_a_segment_is_whole_however_little_the_system_writes_at_once(tmp_path, monkeypatch):
    real, calls = os.writev, []

    def little(descriptor, buffers):
        calls.append(len(buffers))
        return real(descriptor, [bytes(buffers[0])[:7]])

    monkeypatch.setattr(disk_module.os, "writev", little)
    disk = open_disk(tmp_path)
    parts = {name: np.frombuffer(name.encode() * 9, np.uint8) for name in ("kv.tail", "state.a", "state.b")}
    key = b"s" + bytes(16)
    disk.put(key, SegmentHeader("state", NAMESPACE, SALT, b"", b"", 0, 3, bytes(12)), parts)
    assert len(calls) > 100
    assert {name: disk.read(key, name).tobytes() for name in parts} == {name: part.tobytes() for name, part in parts.items()}


def test_a_folder_that_somebody_deletes_is_made_again(tmp_path):
    disk = open_disk(tmp_path)
    header = SegmentHeader("state", NAMESPACE, SALT, b"", b"", 0, 3, bytes(12))
    first, second, third = (b"s" + bytes(15) + bytes([n]) for n in range(3))
    for key in (first, second):
        disk.put(key, header, {"kv.tail": np.ones(5, np.uint8)})
        shutil.rmtree(tmp_path / "73")
    disk.put(third, header, {"kv.tail": np.ones(5, np.uint8)}, sealed=False)
    disk.seal([third])
    assert disk.read(third, "kv.tail").tolist() == [1] * 5


def some_unsealed(disk: DiskTier, serial: int = 0) -> list[bytes]:
    """Put unsealed, what needs others first: logits, two states, two extents."""
    keys = [
        letter + bytes(14) + bytes([serial, n]) for letter, count in ((b"l", 1), (b"s", 2), (b"x", 2)) for n in range(count)
    ]
    for key in keys:
        what = {b"l": "logits", b"s": "state", b"x": "extent"}[key[:1]]
        header = SegmentHeader(what, NAMESPACE, SALT, b"", b"", 0, 3, bytes(12))  # pyright: ignore[reportArgumentType]
        disk.put(key, header, {"kv": np.ones(5, np.uint8)}, sealed=False)
    return keys


def test_what_is_sealed_together_is_sealed_before_what_needs_it_with_one_sync_for_each_folder(tmp_path, monkeypatch):
    disk = DiskTier(tmp_path, 1 << 24, reserve_bytes=0)
    done: list[tuple[str, str]] = []
    disk.seal(some_unsealed(disk))  # its folders are there now
    keys = some_unsealed(disk, 1)
    real = disk_module.os.rename

    def rename(source, target):
        done.append(("rename", Path(target).parent.name))
        real(source, target)

    monkeypatch.setattr(disk_module.os, "rename", rename)
    monkeypatch.setattr(DiskTier, "_sync_directory", lambda tier, folder: done.append(("sync", Path(folder).name)))
    disk.on_change = lambda key, header, nbytes: done.append(("told", key.hex()[:2]))
    disk.seal([*keys, keys[0], b"x" * 17])
    x, s, last = (letter.hex() for letter in (b"x", b"s", b"l"))
    assert done == [
        *[("rename", x), ("rename", x), ("sync", x), ("told", x), ("told", x)],
        *[("rename", s), ("rename", s), ("sync", s), ("told", s), ("told", s)],
        *[("rename", last), ("sync", last), ("told", last)],
    ]
    assert not disk.unsealed
    assert disk.used_bytes == on_disk(tmp_path)


@pytest.mark.parametrize("nth", range(1, 4))
def test_what_could_not_be_synced_is_not_sealed_and_can_be_sealed_later(tmp_path, monkeypatch, nth):
    disk = DiskTier(tmp_path, 1 << 24, reserve_bytes=0)
    disk.seal(some_unsealed(disk))
    keys = some_unsealed(disk, 1)
    real, calls, told = DiskTier._sync_directory, 0, []

    def sync(tier, folder):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise OSError(errno.EIO, "no sync")
        real(tier, folder)

    monkeypatch.setattr(DiskTier, "_sync_directory", sync)
    disk.on_change = lambda key, header, nbytes: told.append(key)
    with pytest.raises(TierFailed, match="no sync"):
        disk.seal(keys)
    in_order = [key for letter in (b"x", b"s", b"l") for key in keys if key[:1] == letter]
    sealed = {1: 0, 2: 2, 3: 4}[nth]
    assert told == in_order[:sealed]
    assert set(disk.unsealed) == set(in_order[sealed:])
    assert all(disk.read(key, "kv").tolist() == [1] * 5 for key in keys)
    assert disk.delete(keys[0])
    disk.seal(keys)
    assert [key for key in told if key != keys[0]] == [key for key in in_order if key != keys[0]]
    assert disk.used_bytes == on_disk(tmp_path)
    assert not list(tmp_path.glob("tmp-*"))


def test_files_in_the_folders_of_an_earlier_version_are_found_and_moved(tmp_path):
    before, tokens = filled(tmp_path)
    for path in list(tmp_path.glob("??/*.safetensors")):
        folder = tmp_path / path.name[2:4]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    after = restart(tmp_path)
    assert best(after, tokens) == 1500
    assert after.stats().tiers["disk"].used_bytes == before.stats().tiers["disk"].used_bytes == on_disk(tmp_path)
    assert {path.parent.name for path in tmp_path.glob("??/*.safetensors")} == {letter.hex() for letter in (b"x", b"s", b"l")}


@given(header=headers, at=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(deadline=None)
def test_a_changed_header_is_refused(header, at, bit):
    text = bytearray(encode_header(b"k", header, {"kv": 7}, {"kv": 99})[8:])
    good = decode_header(bytes(text))
    text[at % len(text)] ^= 1 << bit
    try:
        changed = decode_header(bytes(text))
    except ValueError:
        return
    assert changed == good  # only blanks may differ unnoticed
