"""Directories of namespaces while several processes claim, remove and list them."""

from __future__ import annotations

import fcntl
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from statecache import admin
from statecache.directory import claim, remove, remove_abandoned
from statecache.errors import TierFailed


def test_a_directory_that_is_removed_while_it_is_claimed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = tmp_path / "ns", fcntl.flock

    def after_a_removal(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        assert remove(path)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_a_removal)
    held = claim(path, wait_s=0.0)
    assert held.holds()
    with pytest.raises(TierFailed, match="is used by another process"):
        claim(path, wait_s=0.0)
    held.release()


def test_who_makes_a_directory_anew_while_it_is_removed_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rmtree = tmp_path / "ns", shutil.rmtree
    claim(path, wait_s=0.0).release()
    (path / "old").write_text("x")
    newer = []

    def beside_another(folder: Path, ignore_errors: bool) -> None:
        newer.append(claim(path, wait_s=0.0))
        (path / "new").write_text("x")
        rmtree(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", beside_another)
    assert remove(path)
    assert newer[0].holds()
    assert sorted(file.name for file in path.iterdir()) == ["lock", "new"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["ns"]
    newer[0].release()


def test_a_removal_that_was_killed_is_ended_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path / "ns", wait_s=0.0).release()
    (tmp_path / "ns" / "old").write_text("xyz")
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert remove(tmp_path / "ns")
    assert remove_abandoned(tmp_path) == 3
    assert not list(tmp_path.iterdir())


def test_of_many_that_claim_and_remove_at_once_each_holds_what_it_claimed(tmp_path: Path) -> None:
    gate, path = Barrier(6), tmp_path / "ns"

    def use(number: int) -> int:
        gate.wait()
        if number % 2:
            remove(path)
            return 0
        held = claim(path, wait_s=60.0)
        (path / "mine").write_text(str(number))
        assert held.holds()
        assert (path / "mine").read_text() == str(number)
        held.release()
        return 1

    with ThreadPoolExecutor(6) as threads:
        for _ in range(20):
            assert sum(threads.map(use, range(6))) == 3


def test_a_path_that_can_be_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierFailed, match=f"^{tmp_path}/file: File exists"):
        claim(tmp_path / "file", wait_s=0.0)


def test_folders_that_go_while_they_are_listed_are_listed_without_them(tmp_path: Path) -> None:
    for name in ("aa", "bb"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.safetensors").touch()
    (tmp_path / "cc").symlink_to(tmp_path / "gone")  # it is in the list and no more there
    (tmp_path / "dd").touch()
    assert [file.name for file in admin.segment_files(tmp_path)] == ["aa.safetensors", "bb.safetensors"]
    assert admin.segment_files(tmp_path / "gone") == []
