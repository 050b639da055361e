"""Looking after saved states from outside: list, check, tidy up, carry to another machine. No model is loaded.

What only reads may be used while a server runs; what changes files claims the directory first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from statecache.directory import ABOUT, IMPORTING, About, about, claim, folder_of, namespaces, remove_abandoned
from statecache.index.ledger import Ledger
from statecache.index.radix import RadixIndex
from statecache.keys import KEY_BYTES, KeyChain
from statecache.segment import Contents, decode_header, header_length, part_sum
from statecache.store import StateCache
from statecache.tiers.disk import DiskTier

Step = Callable[[int], None]
"""Told the bytes that were dealt with since the last call."""
SUFFIX = ".safetensors"
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Folder:
    """One namespace. checkpoints, extents, nbytes: as the files' names and sizes say. bad: files in its quarantine."""

    about: About
    checkpoints: int
    extents: int
    nbytes: int
    bad: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A segment that is not what it should be."""

    path: Path
    reason: str


def folders(root: Path) -> list[Folder]:
    """All namespaces under a root, last used first."""
    found: list[Folder] = []
    for described in namespaces(root):
        files = segment_files(described.path)
        names = [path.name[:2] for path in files]
        size = sum(map(_size, files))
        bad = sum(name.endswith(SUFFIX) for name in _names(described.path / "quarantine"))
        found.append(Folder(described, names.count(b"s".hex()), names.count(b"x".hex()), size, bad))
    return found


def choose(root: Path, name: str) -> About:
    """The namespace that a prefix of its digest, or a model's name, means. Raises LookupError with the choices."""
    every = namespaces(root)
    fits = [a for a in every if a.namespace.hex().startswith(name.lower()) or a.label == name]
    if len(fits) == 1:
        return fits[0]
    choices = ", ".join(f"{a.namespace.hex()[:8]} ({a.label})" for a in every) or "none"
    raise LookupError(f"{'several namespaces fit' if fits else 'no namespace fits'} {name!r}; there are: {choices}")


def segment_files(path: Path) -> list[Path]:
    folders = [path / name for name in _names(path) if len(name) == 2]
    return sorted(folder / name for folder in folders for name in _names(folder) if name.endswith(SUFFIX))


def segment_bytes(path: Path) -> int:
    """Of all segments of a namespace."""
    return sum(map(_size, segment_files(path)))


def read_header(path: Path) -> Contents:
    """Raises ValueError or OSError."""
    with path.open("rb", buffering=0) as file:
        contents = decode_header(os.pread(file.fileno(), header_length(os.pread(file.fileno(), 8, 0)), 8))
        size = os.fstat(file.fileno()).st_size
    if contents.nbytes != size:
        raise ValueError(f"file has {size} bytes, its header says {contents.nbytes}")
    if contents.key.hex() + SUFFIX != path.name:
        raise ValueError(f"holds segment {contents.key.hex()}")
    return contents


def headers(path: Path) -> Iterator[Contents]:
    """Of every sound segment of a namespace."""
    for file in segment_files(path):
        try:
            yield read_header(file)
        except (ValueError, OSError):
            continue


def check(file: Path, namespace: bytes) -> str:
    """Read all of one segment; why it is bad, or nothing. Raises FileNotFoundError."""
    try:
        contents = read_header(file)
        if contents.header.namespace != namespace:
            return "other namespace"
        with file.open("rb", buffering=0) as opened:
            for name, (offset, size, checksum) in contents.parts.items():
                part = np.fromfile(opened, dtype=np.uint8, count=size, offset=offset - opened.tell())
                if part.nbytes != size or part_sum(part) != checksum:
                    return f"checksum of part {name!r} differs"
    except FileNotFoundError:
        raise
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def verify(described: About, step: Step = lambda nbytes: None) -> list[Finding]:
    """Read every byte of a namespace; then look for checkpoints whose chain of blocks is broken.

    A server that runs writes and evicts meanwhile: what is gone at the end is no finding, and what came may have been needed.
    """
    findings: list[Finding] = []
    heads: list[tuple[Path, Contents]] = []
    listed = segment_files(described.path)

    def look(files: Iterable[Path]) -> None:
        for file in files:
            size = _size(file)
            with contextlib.suppress(FileNotFoundError):
                reason = check(file, described.namespace)
                if reason:
                    findings.append(Finding(file, reason))
                else:
                    heads.append((file, read_header(file)))
            step(size)

    look(listed)
    look(sorted(set(segment_files(described.path)) - set(listed)))
    order = {"extent": 0, "state": 1, "logits": 2}
    heads.sort(key=lambda head: (order[head[1].header.what], head[1].header.start))
    blocks: set[bytes] = set()
    states: set[bytes] = set()
    for file, contents in heads:
        header, name = contents.header, contents.key[1:]
        needed = header.parent if header.what == "extent" else header.key
        if needed and needed not in blocks:
            findings.append(Finding(file, "its blocks are missing"))
        elif header.what == "extent":
            blocks |= _blocks(contents)
        elif header.what == "state":
            states.add(name)
        elif name not in states:
            findings.append(Finding(file, "its state is missing"))
    return [finding for finding in findings if finding.path.exists()]


def set_aside(described: About, findings: list[Finding]) -> None:
    """Move bad segments to the quarantine. Raises TierFailed while a server runs."""
    held = claim(described.path, wait_s=0.0)
    try:
        tier = DiskTier(described.path, 1 << 62, reserve_bytes=0)
        for finding in findings:
            tier.set_aside(bytes.fromhex(finding.path.stem), finding.reason)
    finally:
        held.release()


def tidy(described: About, *, quarantine: bool = True) -> int:
    """Delete what no checkpoint needs: leftovers of crashes, segments without their chain, the quarantine. Bytes freed.

    Raises TierFailed while a server runs.
    """
    held = claim(described.path, wait_s=0.0)
    try:
        before = _total(described.path)
        cache, _ = _adopt(described)
        del cache
        if quarantine:
            shutil.rmtree(described.path / "quarantine", ignore_errors=True)
        return before - _total(described.path)
    finally:
        held.release()


def rebuild(described: About, ledger: Ledger) -> int:
    """Write the rows of a namespace again from its files; their number. Raises TierFailed, SQLAlchemyError."""
    held = claim(described.path, wait_s=0.0)
    try:
        _, tier = _adopt(described)
        ledger.forget_all()
        for key, nbytes in tier.sizes().items():
            ledger.note(key, tier.header(key), nbytes)
        ledger.flush()
        return len(tier.sizes())
    finally:
        held.release()


def export(described: About, target: Path, step: Step = lambda nbytes: None) -> int:
    """Write a namespace's sound segments to a tar file; their number. The file appears when it is complete.

    Raises ValueError when something else than a file is there, OSError.
    """
    if target.exists() and not target.is_file():
        raise ValueError(f"{target} is not a regular file")
    temporary = target.with_name(target.name + ".part")
    count = 0
    try:
        with tarfile.open(temporary, "w") as archive:
            archive.add(described.path / ABOUT, ABOUT)
            for file in segment_files(described.path):
                size = _size(file)
                try:
                    if not check(file, described.namespace):
                        archive.add(file, file.name)
                        count += 1
                except FileNotFoundError:  # a server that runs has evicted it
                    continue
                step(size)
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def import_(source: Path, root: Path, step: Step = lambda nbytes: None) -> tuple[About, int, int]:
    """Add an exported file's segments: (namespace, added, refused). Each is checked before it counts.

    Raises ValueError when the file is no export, TierFailed while a server uses that namespace, OSError.
    """
    staging = root / f"{IMPORTING}{os.getpid()}"
    added = refused = 0
    remove_abandoned(root)
    mine = claim(staging, wait_s=0.0)
    try:
        with tarfile.open(source, "r:") as archive:
            first = archive.next()
            if first is None or first.name != ABOUT:
                raise ValueError(f"{source} is not an export of saved states")
            _unpack(archive, first, staging / ABOUT)
            described = about(staging)
            if described is None:
                raise ValueError(f"{source}: its description cannot be read")
            folder = folder_of(root, described.namespace)
            held = claim(folder, wait_s=0.0)
            try:
                if not (folder / ABOUT).exists():
                    (staging / ABOUT).rename(folder / ABOUT)
                for member in archive:
                    name = Path(member.name).name
                    if not member.isfile() or not name.endswith(SUFFIX):
                        continue
                    _unpack(archive, member, staging / name)
                    if check(staging / name, described.namespace):
                        refused += 1
                    else:
                        place = folder / name[:2] / name
                        place.parent.mkdir(exist_ok=True)
                        (staging / name).rename(place)
                        added += 1
                    step(member.size)
            finally:
                held.release()
    except tarfile.TarError as error:
        raise ValueError(f"{source} is not an export of saved states, or is damaged: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        mine.release()
    found = about(folder)
    assert found is not None
    return found, added, refused


# ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _adopt(described: About) -> tuple[StateCache, DiskTier]:
    """What a start would find; the rest is deleted or set aside."""
    tier = DiskTier(described.path, 1 << 62, reserve_bytes=0)
    cache = StateCache(described.namespace, described.layout, tiers=[tier], index=RadixIndex())
    cache.recover()
    return cache, tier


def _blocks(contents: Contents) -> set[bytes]:
    """Names of an extent's blocks."""

    header = contents.header
    chain = KeyChain(header.namespace, header.salt, known=header.parent)
    chain.extend(header.tokens)
    names = chain.joined[len(header.parent) :]
    return {names[i : i + KEY_BYTES] for i in range(0, len(names), KEY_BYTES)}


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = archive.extractfile(member)
    if source is None:
        raise ValueError(f"{member.name} is not a file")
    with source, target.open("wb") as out:
        shutil.copyfileobj(source, out, _CHUNK)
        out.flush()
        os.fsync(out.fileno())


def _names(folder: Path) -> list[str]:
    """What lies there; nothing where it is no folder, or was deleted meanwhile, which glob would not survive."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _total(path: Path) -> int:
    return sum(_size(p) for p in path.rglob("*") if p.is_file())
