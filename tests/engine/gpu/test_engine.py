"""Whole requests on the offloaded engine: transformers' greedy tokens, cuts, restores, sampling from logits on the device."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import DeviceError, OutOfDeviceMemory, Unsupported
from engine.gpu.experts import Reads
from engine.gpu.model import GpuModel
from engine.moe.cost import ASSUMED
from engine.types import SamplingParams
from tests.engine.checkpoints import make, save
from tests.engine.gpu.models import DEVICES, TYPES, check_slots, engine_on, golden
from tests.engine.helpers import Log, prompt, release_all, request, run

NEW = 12


@pytest.fixture(scope="module", params=TYPES)
def checkpoint(request, tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    model = make(request.param)
    return save(model, tmp_path_factory.mktemp(request.param)), model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", ["auto", 5])
def test_greedy_tokens_are_those_of_transformers(checkpoint, slots, device):
    directory, model = checkpoint
    prompts = {str(n): prompt(n, n) for n in (1, 5, 64, 100)}
    with engine_on(directory, device, slots=slots) as engine:
        for id, ids in prompts.items():
            engine.submit(request(id, ids, NEW))
        log = run(engine)
        for id, ids in prompts.items():
            assert log.tokens[id] == golden(model, ids, NEW)
        assert (engine.stats().slot_misses > 0) == (slots != "auto")
        if slots != "auto":
            check_slots(engine.model.experts)  # type: ignore[attr-defined]
        release_all(engine)
        assert engine.info.backend == "cuda"


@pytest.mark.parametrize("device", DEVICES)
def test_states_come_back_from_holds_and_from_the_host(checkpoint, device):
    directory, model = checkpoint
    ids = prompt(3, 90)
    with engine_on(directory, device, slots=6) as engine:
        engine.submit(request("cold", ids, NEW, cuts=(1, 37, 64, 89, 90)))
        log = run(engine)
        want = golden(model, ids, NEW)
        assert log.tokens["cold"] == want
        for position in (1, 37, 64, 89, 90):
            hold = log.hold_at("cold", position)
            snapshot = engine.copy_out(hold)
            engine.submit(request(f"held {position}", ids, NEW, restore=hold))
            engine.submit(request(f"copied {position}", ids, NEW, restore=snapshot))
            again = run(engine)
            assert again.tokens[f"held {position}"] == want
            assert again.tokens[f"copied {position}"] == want
            rows = np.concatenate([run_.rows for run_ in snapshot.kv])
            assert rows.shape == (position, engine.layout.kv_token_bytes)
            for hold in [cut.hold for cuts in again.cuts.values() for cut in cuts]:
                engine.release(hold)
        release_all(engine)


def test_tokens_are_drawn_from_logits_on_the_device(checkpoint):
    directory, _ = checkpoint
    sampling = SamplingParams(
        max_tokens=NEW, temperature=0.8, top_p=0.9, top_k=20, seed=7, logprobs=2, repetition_penalty=1.1, presence_penalty=0.2
    )
    drawn = []
    for backend in ("cuda", "reference"):
        with engine_on(directory) if backend == "cuda" else reference_engine(directory) as engine:
            engine.submit(request("a", prompt(4, 20), sampling=sampling))
            drawn.append(run(engine).tokens["a"])
    assert drawn[0] == drawn[1]


@contextmanager
def reference_engine(directory: Path):
    yield Engine.load(EngineConfig(model_dir=directory, backend="reference", page_size=16, kv_tokens=2048, snapshot_rows=16))


@pytest.mark.parametrize("device", DEVICES)
def test_rehearsed_prompts_leave_nothing_that_a_request_could_see(checkpoint, device):
    directory, model = checkpoint
    ids = prompt(3, 90)
    with engine_on(directory, device, slots=6, pass_tokens=48, rehearse_tokens=48) as engine:
        offloaded = engine.model
        assert isinstance(offloaded, GpuModel)
        before = dict(offloaded.expert_pass.ways)  # type: ignore[union-attr]
        offloaded.rehearse(engine.store.kv, engine.store.states, 4096)
        assert offloaded.expert_pass.ways != before  # type: ignore[union-attr]
        engine.submit(request("a", ids, NEW))
        assert run(engine).tokens["a"] == golden(model, ids, NEW)
        check_slots(offloaded.experts)  # type: ignore[arg-type]
        release_all(engine)


def test_a_failed_executor_ends_the_requests_and_says_why(checkpoint, monkeypatch):
    directory, _ = checkpoint
    monkeypatch.setattr("engine.gpu.decode.WAIT_LIMIT_US", 200_000)
    with engine_on(directory, slots=5) as engine:
        experts = engine.model.experts  # type: ignore[attr-defined]
        experts.set_table((0,))
        experts.inject_fault(1, 3)
        engine.submit(request("a", prompt(1, 4), NEW))
        with pytest.raises(DeviceError, match="thread has ended; request 3"):
            run(engine)
        (end,) = [event for event in engine.step() if event.request_id == "a"]
        assert (end.reason, end.error) == ("error", "the forward pass failed")  # type: ignore[union-attr]
        engine.check()


def test_what_was_decided_is_said_in_a_line_each(checkpoint, caplog):
    directory, _ = checkpoint
    with caplog.at_level("INFO", logger="engine.runner"), engine_on(directory, slots=5):
        lines = [record.getMessage() for record in caplog.records if record.name == "engine.runner"]
    assert [line.split(":")[0] for line in lines] == ["device", "weights", "state", "experts", "rates, assumed"]
    assert "KV for 2048 tokens" in lines[2]
    assert "5 of " in lines[3]


def test_a_device_that_is_too_small_is_an_error_with_numbers(checkpoint):
    directory, _ = checkpoint
    with pytest.raises(OutOfDeviceMemory, match=r"needs 0\.\d+ GB of device memory, 0\.00 GB are free"):
        Engine.load(EngineConfig(model_dir=directory, backend="cuda", host_device=True, vram_bytes=100_000))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_the_backend_is_refused_by_name(checkpoint):
    directory, _ = checkpoint
    with pytest.raises(Unsupported, match="no CUDA device"):
        Engine.load(EngineConfig(model_dir=directory, backend="cuda"))


def test_a_stream_goes_on_at_the_edges_of_a_streamed_pass(checkpoint):
    directory, model = checkpoint
    ids = prompt(9, 60)
    with engine_on(directory, slots=12, host_seed=4) as engine:
        experts = engine.model.experts  # type: ignore[attr-defined]
        experts.split.rates = replace(ASSUMED, copy_mbs=10**9, gpu_gflops=1)
        engine.submit(request("short", prompt(8, 3), 30))
        log = Log()
        for _ in range(3):
            log.add(engine.step())
        engine.submit(request("long", ids, 4))
        before = len(log.tokens["short"])
        while not log.progress["long"]:
            log.add(engine.step())
            engine.check()
        assert len(log.tokens["short"]) - before >= 3
        run(engine, log)
        assert log.tokens["short"] == golden(model, prompt(8, 3), 30)
        assert log.tokens["long"] == golden(model, ids, 4)
        assert engine.model.expert_pass.ways["stream"] > 0  # type: ignore[attr-defined]
        check_slots(experts)


def test_graphs_are_captured_before_the_first_request_and_touch_no_state(checkpoint):
    directory, _ = checkpoint
    with engine_on(directory, slots=6) as engine:
        model = engine.model
        assert sorted(model.steps.graphs) == [(rows, reads) for rows in (1, 2, 4, 6) for reads in (Reads.NOTHING, Reads.WHOLE)]  # type: ignore[attr-defined]
        assert all(bool(pool.isnan().all()) for pool in (*engine.store.kv.k, *engine.store.states.delta))
        assert model.experts.totals() == (0, 0, 0, 0)  # type: ignore[attr-defined]
