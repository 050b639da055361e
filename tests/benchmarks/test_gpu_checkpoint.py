"""The benchmarks' checkpoints at tiny size: what is shared, what a stopped run leaves, and that one walks its trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import checkpoint, files
from benchmarks.gpu.checkpoint import VARIANTS, make
from benchmarks.gpu.geometry import HALF_QWEN36, TINY
from benchmarks.routing.record import Watch
from benchmarks.routing.trace import load
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Request, SamplingParams, TokenEvent
from engine.weights.reader import CheckpointReader

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make(TINY, path, CPU)
    return path


def walk(path: Path, backend, start: int, count: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after the single prompt token `start`, and routes [tokens, layers, top_k] of all that was computed."""
    engine = Engine.load(
        EngineConfig(model_dir=path, backend=backend, threads=1, slots=1 << 10, kv_tokens=1024, snapshot_rows=1, page_size=16)
    )
    watch = Watch(engine)
    sampling = SamplingParams(max_tokens=count, temperature=0.0)
    engine.submit(Request("walk", np.array([start], dtype=np.int32), sampling, hold_at_end=False))
    out = []
    while engine.has_work:
        out += [event.token_id for event in engine.step() if isinstance(event, TokenEvent)]
    return out, np.stack([np.concatenate(layer) for layer in watch.routes], axis=1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_decoding_walks_the_trace_with_every_route_as_programmed(directory, backend):
    trace = load(directory / checkpoint.ROUTES)
    start = 7
    tokens, routes = walk(directory / "programmed", backend, start, TINY.states + 5)
    states = [(start + i) % TINY.states for i in range(TINY.states + 5)]
    assert tokens == [(s + 1) % TINY.states for s in states]
    assert np.array_equal(routes, trace.routes[states]), "expert for expert, in the order of their scores"


def test_the_random_variant_routes_evenly(directory):
    _, routes = walk(directory / "random", "cpu", 7, 60)
    used = np.bincount(routes.ravel(), minlength=TINY.experts)
    assert (used > 0).all()


def test_both_variants_use_the_same_expert_files(directory):
    for i in range(TINY.layers):
        name = f"experts-{i:02d}.safetensors"
        inodes = {(directory / place / name).stat().st_ino for place in ("shared", *VARIANTS)}
        assert len(inodes) == 1
    own = {name: CheckpointReader(directory / name) for name in VARIANTS}
    differ = {name for name in own["random"].names() if not torch.equal(own["random"].raw(name), own["programmed"].raw(name))}
    parts = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "o_proj.weight", "out_proj.weight")
    assert differ == {name for name in own["random"].names() if name.endswith(parts)}


def test_a_stopped_run_goes_on_and_leaves_no_half_file(tmp_path, monkeypatch):
    real, written = files.write, []

    def failing(path, tensors):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        return real(path, tensors)

    monkeypatch.setattr(checkpoint, "write", failing)
    monkeypatch.setattr(checkpoint, "THREADS", 1)
    with pytest.raises(KeyboardInterrupt):
        make(TINY, tmp_path, CPU)
    stamps = {path: path.stat().st_mtime_ns for path in written}
    monkeypatch.undo()
    make(TINY, tmp_path, CPU)
    assert {path: path.stat().st_mtime_ns for path in written} == stamps
    assert not list(tmp_path.rglob("*.part"))
    walk(tmp_path / "programmed", "cpu", 0, 3)


def test_large_tensors_are_made_and_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    planned = files.normal(1, 1.0, CPU, 7, 3, 5)
    pieces = list(planned.pieces())
    assert [len(piece) for piece in pieces] == [3, 3, 1]
    ones = files.whole(lambda: torch.ones(4, 3), 4, 3, dtype=torch.float32)
    files.write(tmp_path / "model.safetensors", {"a": planned, "b": ones, "c": planned})
    reader = CheckpointReader(tmp_path)
    for name in ("a", "c"):
        assert torch.equal(reader.tensor(name), torch.cat(pieces))
    assert torch.equal(reader.tensor("b"), torch.ones(4, 3))


def test_pieces_of_another_size_leave_no_file(tmp_path):
    short = files.Planned(torch.bfloat16, (4, 2), lambda: iter([torch.ones(3, 2, dtype=torch.bfloat16)]))
    with pytest.raises(ValueError, match="x: 12 bytes were made of 16"):
        files.write(tmp_path / "model.safetensors", {"x": short})
    assert not (tmp_path / "model.safetensors").exists()


def test_another_shape_in_the_same_place_is_refused(directory):
    with pytest.raises(ValueError, match="another shape"):
        make(HALF_QWEN36, directory, CPU)


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match=r"are to be written, 0\.0 GB are free"):
        make(TINY, tmp_path, CPU)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_files_go_where_there_is_room_and_stay_where_they_are(tmp_path, monkeypatch):
    memory, small, large = tmp_path / "memory", tmp_path / "small", tmp_path / "large"
    free = {memory: 10**9, small: 10**3, large: 10**9}
    for place in free:
        place.mkdir()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free[path]}))
    monkeypatch.setattr(checkpoint, "_available", lambda: 10**9)
    where = partial(checkpoint.place_for, TINY, None, memory, (small, large))
    assert where().is_relative_to(memory)
    monkeypatch.setattr(checkpoint, "_available", lambda: 0)
    assert where().is_relative_to(large)
    where().mkdir(parents=True)
    free[large] = 0
    assert where().is_relative_to(large)
    where().rmdir()
    with pytest.raises(OSError, match=r"none of .*small, .*large has room; name a --dir"):
        where()
    assert checkpoint.place_for(TINY, small, memory, (large,)) == small


def test_half_of_qwen36_is_what_was_published():
    assert 32.1e9 < HALF_QWEN36.bank_bytes < 32.3e9
    assert HALF_QWEN36.kinds()[:4] == ["linear_attention"] * 3 + ["full_attention"]
    assert checkpoint.file_bytes(HALF_QWEN36) < 40e9
