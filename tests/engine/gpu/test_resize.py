"""Expert slots and KV pages trade memory while the engine serves: no token changes, no state is lost, nothing stale is read.

On the host device what has no memory is NaN, and so is what was just mapped.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.errors import InvalidRequest, OutOfDeviceMemory, OutOfPages, Unsupported
from engine.gpu.experts import ExpertPool
from engine.moe.cost import ASSUMED
from tests.engine.checkpoints import make, save
from tests.engine.gpu.models import DEVICES, TYPES, check_slots, engine_on, golden
from tests.engine.helpers import Log, prompt, release_all, request, run

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
"""On a device memory moves in pieces of 2 MiB: there an expert takes 1.5, a page of one layer a quarter."""
SLOTS = 12


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(model type, device) → directory and transformers' model."""

    @cache
    def made(model_type: str, device: str) -> tuple[Path, torch.nn.Module]:
        model = make(model_type, **(WIDE if device == "cuda" else {}))
        return save(model, tmp_path_factory.mktemp(model_type)), model

    return made


def pool_of(engine: Engine) -> ExpertPool:
    pool = engine.model.experts  # type: ignore[attr-defined]
    assert isinstance(pool, ExpertPool)
    return pool


def sizes(engine: Engine) -> tuple[int, int]:
    """Slots and pages, as everybody who counts them sees them."""
    memory, pool = engine.memory, pool_of(engine)
    assert memory is not None
    assert (memory.slots, memory.pages) == (pool.slots, engine.room.total_pages)
    assert pool.state.id_of_slot[pool.slots :].eq(-3).all()
    return memory.slots, memory.pages


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", TYPES)
def test_slots_shrink_by_a_quarter_and_grow_again_while_a_stream_decodes(checkpoints, model_type, device):
    directory, model = checkpoints(model_type, device)
    ids = prompt(5, 20)
    with engine_on(directory, device, slots=SLOTS, kv_tokens=640) as engine:
        graphs = dict(engine.model.steps.graphs)  # type: ignore[attr-defined]
        engine.submit(request("a", ids, 36))
        log, seen = Log(), set()
        for turn in range(6):
            for _ in range(4):
                log.add(engine.step())
                engine.check()
            engine.resize_experts(SLOTS if turn % 2 else SLOTS * 3 // 4)
            seen.add(sizes(engine))
            check_slots(pool_of(engine))
        run(engine, log)
        assert log.tokens["a"] == golden(model, ids, 36)
        assert {slots for slots, _ in seen} == {SLOTS, SLOTS * 3 // 4}
        assert len({pages for _, pages in seen}) == 2
        assert engine.model.steps.graphs == graphs  # type: ignore[attr-defined]
        release_all(engine)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", TYPES)
def test_states_move_with_their_pages_and_are_restored(checkpoints, model_type, device):
    directory, model = checkpoints(model_type, device)
    names = ("held", "waiting", "loading", "behind")
    prompts = {name: prompt(n, 70) for n, name in enumerate(names)}
    with engine_on(directory, device, slots=SLOTS, kv_tokens=640, max_rows=2, restore_bytes=4096) as engine:
        engine.resize_experts(2)
        assert sizes(engine)[1] > 55
        engine.submit(request("filler", prompt(9, 500), 0, cuts=(500,)))
        filler = run(engine).hold_at("filler", 500)
        holds = {}
        for name, ids in prompts.items():
            engine.submit(request(name, ids, 0, cuts=(60,), hold_at_end=False))
            holds[name] = run(engine).hold_at(name, 60)
        assert engine.store.get(holds["behind"]).pages.min() >= 40
        before = {name: engine.copy_out(hold) for name, hold in holds.items()}
        for name in ("loading", "behind"):
            engine.release(holds[name])
            engine.submit(request(name, prompts[name], 4, restore=before[name]))
        log = Log()
        log.add(engine.step())
        assert all(seq.loading is not None for seq in engine.scheduler.running)
        engine.submit(request("waiting", prompts["waiting"], 4, restore=holds["waiting"]))
        log.add(engine.step())
        assert [seq.id for seq in engine.scheduler.waiting] == ["waiting"]
        engine.release(filler)
        engine.resize_experts(SLOTS)
        assert sizes(engine)[0] == SLOTS
        assert sizes(engine)[1] < 45
        engine.check()
        for name in ("held", "waiting"):
            assert np.array_equal(engine.copy_out(holds[name]).kv[0].rows, before[name].kv[0].rows)
        run(engine, log)
        engine.submit(request("held", prompts["held"], 4, restore=holds["held"]))
        run(engine, log)
        for name, ids in prompts.items():
            assert log.tokens[name] == golden(model, ids, 4)
        release_all(engine)


@pytest.mark.parametrize(("model_type", "seed"), [(TYPES[0], 0), (TYPES[0], 1), (TYPES[1], 2)])
def test_any_sequence_of_turns_and_sizes_reads_only_what_is_there(checkpoints, model_type, seed):
    """Streamed passes, decode steps and restores between sizes from 2 slots to all, in every order of the two lanes."""
    directory, model = checkpoints(model_type, "host")
    rng = random.Random(seed)
    with engine_on(directory, slots=SLOTS, kv_tokens=640, max_context=256, host_seed=seed) as engine:
        pool_of(engine).split.rates = replace(ASSUMED, copy_mbs=10**9, gpu_gflops=1)  # passes stream where they can
        prompts, log = {}, Log()
        for turn in range(24):
            match rng.choice(["prompt", "step", "step", "resize", "resize", "again"]):
                case "prompt":
                    name = str(turn)
                    prompts[name] = prompt(turn, rng.choice([3, 30, 60]))
                    engine.submit(request(name, prompts[name], 6, cuts=(2,)))
                case "again" if engine.store.holds and prompts:
                    name = rng.choice([*prompts])
                    for cut in log.cuts[name]:
                        if cut.position == 2:
                            prompts[f"{turn} again"] = prompts[name]
                            engine.submit(request(f"{turn} again", prompts[name], 6, restore=cut.hold))
                case "resize":
                    engine.resize_experts(rng.randint(2, SLOTS))
                case _:
                    for _ in range(rng.randint(1, 6)):
                        log.add(engine.step())
                        engine.check()
            if engine.passes.open is None:
                check_slots(pool_of(engine))
                sizes(engine)
        run(engine, log)
        for name, ids in prompts.items():
            assert log.tokens[name] == golden(model, ids, 6)
        release_all(engine)


def test_a_pass_that_is_open_comes_to_its_end_first(checkpoints):
    directory, model = checkpoints("qwen3_moe", "host")
    with engine_on(directory, slots=SLOTS, kv_tokens=640) as engine:
        engine.submit(request("short", prompt(8, 3), 20))
        log = Log()
        for _ in range(3):
            log.add(engine.step())
        engine.submit(request("long", prompt(9, 60), 3))
        while engine.passes.open is None:
            log.add(engine.step())
        engine.resize_experts(4)
        assert sizes(engine)[0] == SLOTS
        while engine.passes.open is not None:
            log.add(engine.step())
        log.add(engine.step())
        assert sizes(engine)[0] == 4
        run(engine, log)
        assert log.tokens["long"] == golden(model, prompt(9, 60), 3)
        assert log.tokens["short"] == golden(model, prompt(8, 3), 20)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_is_not_there_leaves_the_old_size_and_says_so(checkpoints, device, monkeypatch):
    directory, model = checkpoints("qwen3_moe", device)
    with engine_on(directory, device, slots=SLOTS, kv_tokens=640, max_context=512, max_rows=1) as engine:
        pool, memory = pool_of(engine), engine._boundary.memory  # type: ignore[union-attr]
        engine.resize_experts(4)
        was = sizes(engine)
        with monkeypatch.context() as patch:

            def refuse(nbytes: int) -> int:
                raise OutOfDeviceMemory("a piece of elastic memory", nbytes, 0)

            patch.setattr(memory._virtual, "create", refuse)
            with pytest.raises(OutOfDeviceMemory, match=r"0\.00 GB are free"):
                engine.resize_experts(SLOTS)
        assert sizes(engine) == was
        assert "0.00 GB are free" in engine.memory.trouble  # type: ignore[union-attr]
        engine.submit(request("a", prompt(1, 40), 6))
        assert run(engine).tokens["a"] == golden(model, prompt(1, 40), 6)
        check_slots(pool)
        engine.resize_experts(SLOTS)
        assert sizes(engine)[0] == SLOTS
        assert engine.memory.trouble == ""  # type: ignore[union-attr]


def test_pages_that_are_held_are_asked_back_and_refused_where_nobody_gives_them(checkpoints):
    directory, _ = checkpoints("qwen3_moe", "host")
    with engine_on(directory, slots=SLOTS, kv_tokens=640, max_context=256) as engine:
        engine.resize_experts(2)
        _, pages = sizes(engine)
        holds = []
        while engine.room.free_pages >= 10:
            name = str(len(holds))
            engine.submit(request(name, prompt(len(holds), 150), 0, cuts=(150,)))
            holds.append(run(engine).hold_at(name, 150))
        with pytest.raises(OutOfPages, match=r"need \d+ KV pages, 0 free"):
            engine.resize_experts(SLOTS)
        assert sizes(engine) == (2, pages)

        def reclaim(missing: int) -> int:
            assert missing > 0
            engine.release(holds.pop())
            return 1

        engine.set_reclaim(reclaim)
        engine.resize_experts(SLOTS)
        assert sizes(engine) == (SLOTS, 40)
        assert holds, "more was released than had to be"
        release_all(engine)


def test_sizes_that_cannot_be_are_refused_by_number(checkpoints, tmp_path_factory):
    directory, _ = checkpoints("qwen3_moe", "host")
    with engine_on(directory, slots=SLOTS) as engine:
        for slots in (1, SLOTS + 1):
            with pytest.raises(InvalidRequest, match=f"slots: got {slots}, accepted: 2 to {SLOTS}"):
                engine.resize_experts(slots)
    with engine_on(directory) as engine, pytest.raises(Unsupported, match="every expert is on the device"):
        engine.resize_experts(4)


@pytest.mark.parametrize("device", DEVICES)
def test_without_virtual_memory_slots_are_left_unused_and_the_reason_is_named(checkpoints, device, caplog):
    directory, model = checkpoints("qwen3_moe", device)
    with engine_on(directory, device, slots=SLOTS, kv_tokens=640, elastic="off") as engine:
        assert engine.memory is not None
        assert engine.memory.fixed == "engine.elastic is off"
        engine.submit(request("a", prompt(5, 20), 20))
        log = Log()
        for slots in (5, SLOTS, 8):
            for _ in range(4):
                log.add(engine.step())
            engine.resize_experts(slots)
            assert sizes(engine) == (slots, 40)
            check_slots(pool_of(engine))
        run(engine, log)
        assert log.tokens["a"] == golden(model, prompt(5, 20), 20)


def test_another_program_gets_memory_and_gives_it_back(checkpoints, monkeypatch):
    reserve = 8 * 24576  # bytes of so many experts
    monkeypatch.setattr("engine.elastic.controller.WINDOW_NS", 0)
    monkeypatch.setattr("engine.elastic.controller.RESERVE_BYTES", reserve)
    directory, model = checkpoints("qwen3_moe", "host")
    with engine_on(directory, slots=SLOTS, kv_tokens=640) as engine:
        device = engine.model.device  # type: ignore[attr-defined]
        free = device.free_bytes()
        assert pool_of(engine).bank.record.nbytes * 8 == reserve
        engine.submit(request("a", prompt(1, 20), 24))
        log = Log()
        for _ in range(3):
            log.add(engine.step())
        assert sizes(engine) == (SLOTS, 40)
        device.others_bytes = free - reserve // 4
        for _ in range(3):
            log.add(engine.step())
        assert sizes(engine) == (SLOTS - 6, 40)
        assert device.free_bytes() == reserve
        assert engine.memory.lent_bytes == 6 * reserve // 8  # type: ignore[union-attr]
        check_slots(pool_of(engine))
        device.others_bytes = 0
        for _ in range(5):
            log.add(engine.step())
        assert sizes(engine)[0] == SLOTS
        assert engine.memory.lent_bytes == 0  # type: ignore[union-attr]
        run(engine, log)
        assert log.tokens["a"] == golden(model, prompt(1, 20), 24)


def test_the_border_moves_by_itself_when_a_wish_lasts(checkpoints, monkeypatch):
    monkeypatch.setattr("engine.elastic.controller.WINDOW_NS", 0)
    directory, model = checkpoints("qwen3_moe", "host")
    seen: list[Any] = []

    def wish(bounds: Any, now: Any, experts: int, what: Any, costs: Any) -> int:
        seen.append((now.slots, what, costs))
        return 2 if len(seen) > 2 else 0

    monkeypatch.setattr("engine.elastic.controller.wish", wish)
    with engine_on(directory, slots=SLOTS, kv_tokens=640) as engine:
        controller = engine._controller
        assert controller is not None
        assert not controller._trade, "sizes that were set stay"
        controller._trade = True
        engine.submit(request("a", prompt(1, 20), 12))
        log = run(engine)
        assert sizes(engine)[0] == SLOTS - 2 * (1 + (len(seen) - 5) // 6)
        assert sum(what.hits + what.misses for _, what, _ in seen) > 0
        assert all(costs.miss_ns > 0 and costs.page_ns > 0 for _, _, costs in seen)
        assert log.tokens["a"] == golden(model, prompt(1, 20), 12)
