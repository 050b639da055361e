"""Digests of weights: remembered for as long as a file is the same, and never believed for another."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from engine.weights.digests import SETTLED_S, Digests
from tests.engine.checkpoints import load, make, save

RAW = torch.arange(64, dtype=torch.uint8)
OTHER = RAW + 1


def later() -> float:
    return time.time() + SETTLED_S + 1


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(64))
    return file


def remembered(tmp_path: Path, weights: Path, clock=later, **options) -> Digests:
    digests = Digests(tmp_path / "state" / "weights.json", clock=clock, **options)
    digests.content(weights, "a", RAW)
    digests.save()
    return digests


def test_what_was_computed_once_is_not_read_again(tmp_path, weights):
    want = Digests().content(weights, "a", RAW)
    remembered(tmp_path, weights)
    again = Digests(tmp_path / "state" / "weights.json")
    assert again.content(weights, "a", OTHER) == want  # so it was not looked at
    assert again.content(weights, "b", OTHER) == Digests().content(weights, "b", OTHER) != want
    assert again.computed == 1


@pytest.mark.parametrize("change", ["content", "size", "another file in its place"])
def test_a_changed_file_is_computed(tmp_path, weights, change):
    remembered(tmp_path, weights)
    before = weights.stat()
    if change == "another file in its place":
        weights.rename(tmp_path / "old")
    weights.write_bytes(bytes(65 if change == "size" else 64))
    moved_ns = 1000 if change == "content" else 0  # else as a copy that keeps times does
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + moved_ns))
    assert remembered(tmp_path, weights).computed == 1


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path, weights):
    remembered(tmp_path, weights, clock=time.time)
    assert remembered(tmp_path, weights).computed == 1
    assert remembered(tmp_path, weights).computed == 0


def test_on_demand_everything_is_computed_and_a_difference_told(tmp_path, weights, caplog):
    remembered(tmp_path, weights)
    digests = Digests(tmp_path / "state" / "weights.json", verify=True, clock=later)
    assert digests.content(weights, "a", OTHER) == Digests().content(weights, "a", OTHER)
    assert "differ from what was remembered" in caplog.text
    digests.save()
    assert Digests(tmp_path / "state" / "weights.json").content(weights, "a", RAW) == Digests().content(weights, "a", OTHER)


@pytest.mark.parametrize("damage", ["{", "[]", '{"version": 1, "files": {"x": {"a": "zz"}}}', '{"version": 9, "files": {}}'])
def test_a_damaged_memory_is_replaced(tmp_path, weights, damage):
    path = tmp_path / "state" / "weights.json"
    path.parent.mkdir()
    path.write_text(damage)
    assert remembered(tmp_path, weights).computed == 1
    assert remembered(tmp_path, weights).computed == 0
    assert [p.name for p in path.parent.iterdir()] == ["weights.json"]


def test_a_place_that_cannot_be_written_costs_only_time(tmp_path, weights, caplog):
    (tmp_path / "state").write_text("a file where a directory should be")
    remembered(tmp_path, weights)
    assert "not remembered" in caplog.text


def test_a_second_load_computes_nothing_and_finds_the_same_digest(tmp_path, monkeypatch):
    directory = save(make("qwen3_moe"), tmp_path / "model")
    for file in directory.glob("*.safetensors"):
        os.utime(file, (1_000_000_000, 1_000_000_000))
    path = tmp_path / "weights.json"
    monkeypatch.setattr("engine.weights.digests.SETTLED_S", -1e9)
    want = load(directory).weights_digest
    assert load(directory, digests=path).weights_digest == want
    names = {name for tensors in json.loads(path.read_text())["files"].values() for name in tensors}
    assert "model.embed_tokens.weight" in names
    monkeypatch.setattr("xxhash.xxh3_128_hexdigest", lambda data: pytest.fail("a remembered tensor was read"))
    assert load(directory, digests=path).weights_digest == want
