"""The engine on real architectures: transformers' greedy tokens on the fast backend, bitwise equality on the exact one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.runner import load_model
from engine.types import StateSnapshot
from tests.engine.checkpoints import make, save
from tests.engine.helpers import Log, prompt, release_all, request, run

ARCHITECTURES = ("qwen3_moe", "qwen3_5_moe")
NEW = 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    model = make(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    return save(make("qwen3_5_moe"), tmp_path_factory.mktemp("hybrid"))


SIZES = {
    "threads": 1,
    "page_size": 16,
    "chunk_tokens": 64,
    "kv_tokens": 2048,
    "snapshot_rows": 16,
    "max_rows": 6,
    "poison_freed": True,
}


def settings(directory: Path, **changes) -> EngineConfig:
    return EngineConfig(model_dir=directory, **(SIZES | changes))


def golden(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers, one whole forward pass per token (no cache)."""
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("slots", ["auto", 5])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_greedy_tokens_are_those_of_transformers(checkpoint, backend, slots):
    directory, model = checkpoint
    engine = Engine.load(settings(directory, backend=backend, slots=slots))
    prompts = {str(n): prompt(n, n) for n in (5, 64, 100)}
    for id, ids in prompts.items():
        engine.submit(request(id, ids, NEW))
    log = run(engine)
    for id, ids in prompts.items():
        assert log.tokens[id] == golden(model, ids, NEW)
    stats = engine.stats()
    assert (stats.slot_misses > 0) == (slots != "auto")
    release_all(engine)


def test_loading_tells_progress_and_describes_the_model(hybrid):
    told: list[tuple[float, str]] = []
    engine = Engine.load(settings(hybrid), lambda fraction, what: told.append((fraction, what)))
    assert [fraction for fraction, _ in told] == sorted(fraction for fraction, _ in told)
    assert told[-1] == (1.0, "ready")
    assert (engine.info.model_type, engine.info.dtype, engine.info.max_context) == ("qwen3_5_moe", "float32", 512)
    assert len(engine.info.weights_digest) == 64
    assert engine.layout.kv_token_bytes == 2 * 2 * 32 * 4
    assert [c.name for c in engine.layout.state] == ["layer.0.delta", "layer.0.conv", "layer.2.delta", "layer.2.conv"]


@pytest.fixture(scope="module")
def exact(hybrid):
    """The loaded model, shared; engines on it are fresh."""
    return load_model(settings(hybrid, backend="exact"))


def fresh(exact, hybrid: Path, **changes) -> Engine:
    return Engine(exact.model, settings(hybrid, backend="exact", **changes), exact.weights_digest)


def end_state(engine: Engine, log: Log, id: str) -> StateSnapshot:
    """The state that `id` was left in, as bytes."""
    return engine.copy_out(log.cuts[id][-1].hold)


def same_bits(a: StateSnapshot, b: StateSnapshot) -> bool:
    rows = [np.concatenate([run.rows for run in s.kv]) for s in (a, b)]
    state = a.state.keys() == b.state.keys() and all(np.array_equal(a.state[name], b.state[name]) for name in a.state)
    return a.position == b.position and np.array_equal(*rows) and state


def test_restore_then_decode_at_every_position_is_bitwise_the_cold_run(exact, hybrid):
    """Positions 1…256, each in a fresh engine: the same next tokens and the same bytes of state three tokens later."""
    cold = fresh(exact, hybrid, snapshot_rows=300)
    cold.submit(request("cold", prompt(0, 1), 260, cuts=(1,)))
    for position in range(2, 260):
        cold.declare_cut("cold", position)
    log = run(cold)
    tokens = prompt(0, 1) + log.tokens["cold"]
    for position in range(1, 257):
        warm = fresh(exact, hybrid, kv_tokens=272, max_rows=1, snapshot_rows=1)
        snapshot = cold.copy_out(log.hold_at("cold", position))
        warm.submit(request("warm", tokens[: position + 1], 3, restore=snapshot))
        warm_log = run(warm)
        assert warm_log.progress["warm"] == [position + 1], "restored, not computed again"
        assert warm_log.tokens["warm"] == tokens[position + 1 : position + 4]
        assert same_bits(end_state(warm, warm_log, "warm"), cold.copy_out(log.hold_at("cold", position + 3)))


def test_cuts_inside_a_prefill_chunk_hold_what_decoding_to_there_would(exact, hybrid):
    ids = prompt(1, 150)
    engine = fresh(exact, hybrid, snapshot_rows=200)
    engine.submit(request("a", ids, 0, cuts=tuple(range(1, 151))))
    log = run(engine)
    for position in range(1, 151):
        alone = fresh(exact, hybrid, kv_tokens=272, max_rows=1, snapshot_rows=1)
        restore = engine.copy_out(log.hold_at("a", position - 1)) if position > 1 else None
        alone.submit(request("b", ids[:position], 0, restore=restore))
        assert same_bits(end_state(alone, run(alone), "b"), engine.copy_out(log.hold_at("a", position)))


@pytest.mark.parametrize(("chunk", "edges", "page"), [(8, (), 16), (64, (1, 2, 63), 4), (512, (), 64), (50, (49,), 7)])
def test_any_chunking_and_page_size_is_bitwise_the_same(exact, hybrid, chunk, edges, page):
    ids = prompt(1, 100)
    states, tokens = [], []
    for changes, extra in (({}, ()), ({"chunk_tokens": chunk, "page_size": page}, edges)):
        engine = fresh(exact, hybrid, **changes)
        engine.submit(request("a", ids, 4, edges=extra))
        log = run(engine)
        states.append(end_state(engine, log, "a"))
        tokens.append(log.tokens["a"])
    assert tokens[0] == tokens[1]
    assert same_bits(*states)


def test_batched_is_bitwise_alone(exact, hybrid):
    prompts = {str(n): prompt(n, n) for n in (3, 37, 64, 91)}
    together = fresh(exact, hybrid)
    for id, ids in prompts.items():
        together.submit(request(id, ids, 6))
    log = run(together)
    for id, ids in prompts.items():
        alone = fresh(exact, hybrid)
        alone.submit(request(id, ids, 6))
        alone_log = run(alone)
        assert log.tokens[id] == alone_log.tokens[id]
        assert same_bits(end_state(together, log, id), end_state(alone, alone_log, id))


@pytest.mark.parametrize("backend", ["cpu", "exact", "reference"])
def test_device_and_host_restore_go_on_alike(hybrid, backend):
    engine = Engine.load(settings(hybrid, backend=backend))
    ids = prompt(2, 90)
    engine.submit(request("a", ids, 5, cuts=(70, 90)))
    log = run(engine)
    for position in (70, 90):
        hold = log.hold_at("a", position)
        engine.submit(request(f"d{position}", ids, 5, restore=hold))
        run(engine, log)
        engine.submit(request(f"h{position}", ids, 5, restore=engine.copy_out(hold)))
        run(engine, log)
        assert log.tokens[f"d{position}"] == log.tokens[f"h{position}"] == log.tokens["a"]
        assert same_bits(end_state(engine, log, f"d{position}"), end_state(engine, log, f"h{position}"))
    release_all(engine)


RESTARTED = """
import json, sys
from pathlib import Path
import numpy as np
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import KvRun, StateSnapshot
from tests.engine.helpers import request, run

directory, saved, sizes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
tokens = json.loads((saved / "tokens.json").read_text())
engine = Engine.load(EngineConfig(model_dir=directory, backend="exact", **sizes))
for file in sorted(saved.glob("*.npz")):
    position = int(file.stem)
    parts = dict(np.load(file))
    kv = (KvRun(0, parts.pop("kv")),)
    snapshot = StateSnapshot(position, kv, parts)
    engine.submit(request(file.stem, tokens[: position + 1], 4, restore=snapshot, hold_at_end=False))
log = run(engine)
assert all(len(steps) == 1 for steps in log.progress.values())
print(json.dumps({"tokens": log.tokens, "digest": engine.info.weights_digest}))
"""


def test_a_dozen_positions_go_on_in_another_process(exact, hybrid, tmp_path):
    cold = fresh(exact, hybrid, snapshot_rows=300)
    cold.submit(request("cold", prompt(3, 20), 250, cuts=tuple(range(1, 21))))
    positions = (21, 31, 32, 47, 63, 64, 65, 100, 127, 128, 200, 256)
    for position in positions:
        cold.declare_cut("cold", position)
    log = run(cold)
    tokens = prompt(3, 20) + log.tokens["cold"]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    for position in positions:
        snapshot = cold.copy_out(log.hold_at("cold", position))
        np.savez(tmp_path / f"{position}.npz", kv=snapshot.kv[0].rows, **snapshot.state)
    command = [sys.executable, "-W", "error", "-c", RESTARTED, str(hybrid), str(tmp_path), json.dumps(SIZES)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["digest"] == exact.weights_digest
    assert answer["tokens"] == {str(p): tokens[p + 1 : p + 5] for p in positions}


def test_cuts_in_decode_on_the_fast_backend_hold_the_state_there(hybrid):
    """Two requests decode together, one is cut; what is restored from each cut goes on like the run that it came from."""
    engine = Engine.load(settings(hybrid, backend="cpu", snapshot_rows=40))
    ids = prompt(4, 40)
    engine.submit(request("a", ids, 24))
    engine.submit(request("b", prompt(5, 33), 24, hold_at_end=False))
    positions = (41, 47, 48, 49, 55)
    for position in positions:
        engine.declare_cut("a", position)
    log = run(engine)
    full = ids + log.tokens["a"]
    end = end_state(engine, log, "a")
    for position in positions:
        id = f"from{position}"
        engine.submit(request(id, full[: position + 1], 63 - position, restore=log.hold_at("a", position)))
        run(engine, log)
        assert log.tokens[id] == full[position + 1 : 64]
        got = end_state(engine, log, id)
        assert got.position == end.position == 63
        np.testing.assert_allclose(got.kv[0].rows.view(np.float32), end.kv[0].rows.view(np.float32), atol=1e-5)
        for name in end.state:
            np.testing.assert_allclose(got.state[name].view(np.float32), end.state[name].view(np.float32), atol=1e-5)
