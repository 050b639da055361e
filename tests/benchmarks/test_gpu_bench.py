"""The GPU benchmarks at toy size on host memory: stages run, what is done is not done again, and the table is right."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.gpu import summary
from benchmarks.gpu.__main__ import MORE_TO_DO, main
from benchmarks.gpu.bench import ARMS, ASKED, DRAWN, HYBRID, TINY_SIZES, WHOLE, Bench, Sizes, one_lane
from benchmarks.gpu.calibration import parts
from benchmarks.gpu.checkpoint import make
from benchmarks.gpu.geometry import TINY
from benchmarks.gpu.ideal import Lru, hit_rates, uniform_like
from benchmarks.gpu.play import Player, Words
from benchmarks.gpu.results import Results
from benchmarks.routing.policies import SlotCache, replay
from benchmarks.routing.trace import Trace
from engine.device.host import HostDevice
from engine.device.tape import Lane, Tape
from engine.engine import Engine
from engine.errors import DeviceError
from engine.gpu.calibrate import synthetic_bank
from engine.kernels import cpu, plain
from engine.moe.cost import ASSUMED
from engine.moe.host_bank import Record


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _threads():
    """A bench sets the executor's threads for this process."""
    before = cpu.threads() if hasattr(cpu, "threads") else None
    yield
    if before is not None:
        cpu.set_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make(TINY, path, torch.device("cpu"))
    return path


def test_stages_run_and_are_not_run_again(directory, tmp_path, capsys):
    command = ["decode", "table", "--tiny", "--dir", str(directory), "--out", str(tmp_path), "--threads", "1"]
    command += ["--resident", "50", "--variants", "programmed", "--repeats", "1"]
    assert main(command) == 0
    first = lines_of(directory)
    assert [line["workload"]["batch"] for line in first] == [1, 2]
    assert "decode auto, tokens/s" in capsys.readouterr().out
    assert main(command) == 0
    assert lines_of(directory) == first
    assert "decode auto, tokens/s" in (tmp_path / "gpu_table.txt").read_text()
    assert [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()] == first
    for line in first:
        figures = line["figures"]
        assert figures["walked_right"] is True
        assert set(figures["arms"]) == set(ARMS)
        arms = figures["arms"]
        assert [arm for arm in arms if "wrong_guesses" in arms[arm]] == ["auto" + DRAWN]
        assert figures["hybrid_of_whole"]["n"] == 1
        assert arms["cpu"].get("fetched_of_misses", 0) == 0
        assert arms["fetch"].get("fetched_of_misses", 1) == 1
        assert figures["lru_hit_rate"] <= figures["belady_hit_rate"] <= 1


def test_some_arms_alone_are_a_measurement_of_their_own(directory, tmp_path, capsys):
    command = ["decode", "table", "--tiny", "--dir", str(directory), "--out", str(tmp_path), "--threads", "1", "--repeats", "1"]
    command += ["--resident", "50", "--variants", "programmed", "--batches", "1", "--arms", HYBRID, WHOLE]
    assert main(command) == 0
    (line,) = [line for line in lines_of(directory) if line["workload"].get("arms")]
    assert list(line["figures"]["arms"]) == [HYBRID, WHOLE]
    assert line["workload"]["arms"] == f"{HYBRID}; {WHOLE}"
    assert "hybrid ÷ whole experts, round by round, 1 at once" in capsys.readouterr().out


def test_parts_of_one_expert_are_timed_on_both_sides(capsys):
    made = synthetic_bank(Record(64, 64, torch.float32), 1 << 20)
    made.pin(HostDevice(), None, lambda fraction, what: None)
    found = parts(HostDevice(), plain, made, 0.01)
    assert list(found) == ["16", "32", "64"], "sixteens of rows alone"
    assert all(of[name] > 0 for of in found.values() for name in ("us", "us_beside_cpu", "cpu_us"))
    (first, *_) = summary.parts_lines(found)
    assert first.startswith("16 rows of one expert: ")


def test_out_of_time_leaves_the_rest_for_the_same_command(directory, tmp_path, capsys):
    command = ["suffix", "--tiny", "--dir", str(directory), "--threads", "1", "--resident", "50", "--repeats", "1"]
    command += ["--variants", "programmed"]
    assert main([*command, "--limit-s", "0"]) == MORE_TO_DO
    assert "out of time" in capsys.readouterr().out
    assert not [line for line in lines_of(directory) if line["stage"] == "suffix"]
    assert main(command) == 0
    (line,) = [line for line in lines_of(directory) if line["stage"] == "suffix"]
    assert set(line["figures"]) == {"cold 2", "cold 5", "restored 2", "restored 5"}


def test_a_stage_that_fails_is_named_and_the_next_engine_runs_its_own(directory, tmp_path, capsys, monkeypatch):
    real = Player.until

    def failing(self: Player, answer: Any, tokens: int) -> None:
        if self.engine.model.spec.slots == TINY.layers * TINY.experts // 4:
            raise DeviceError("the device is gone")
        real(self, answer, tokens)

    monkeypatch.setattr(Player, "until", failing)
    command = ["checkpoint", "decode", "--tiny", "--dir", str(tmp_path), "--threads", "1", "--repeats", "1", "--batches", "1"]
    assert main([*command, "--variants", "random", "--resident", "25", "100"]) == 1
    assert [line["workload"]["resident"] for line in lines_of(tmp_path)] == [100]
    out, err = capsys.readouterr()
    assert "failed: decode (random, 25%)" in out
    assert "the device is gone" in err


@pytest.mark.slow
def test_an_engine_leaves_no_slots_behind(directory):
    one, seen = bench(directory), []
    for share in (0.5, 1.0):
        with one.engine("random", share) as running:
            gc.collect()
            assert [memory() for memory in seen] == [None] * len(seen)
            seen.append(weakref.ref(running.pool.memory))
            Player(running.engine).run([1, 2, 3], 2)
            del running
    one.close()


def test_slots_shrink_by_a_quarter_and_grow_again(directory, capsys, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(Engine, "resize_experts", lambda self, slots: asked.append(slots), raising=False)
    command = ["resize", "--tiny", "--dir", str(directory), "--threads", "1", "--resident", "50", "--repeats", "2"]
    assert main([*command, "--variants", "programmed"]) == 0
    slots = TINY.layers * TINY.experts // 2
    assert asked == [slots * 3 // 4, slots] * 2 + [slots]
    (line,) = [line for line in lines_of(directory) if line["stage"] == "resize"]
    assert line["figures"]["walked_right"] is True
    assert line["figures"]["worst_gap_ms"]["n"] == 4


def test_an_unknown_stage_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        main(["decod", "--tiny"])
    assert "unknown stage 'decod'" in capsys.readouterr().err


@pytest.mark.slow
def test_every_stage_at_toy_size(tmp_path, capsys):
    assert main(["--tiny", "--dir", str(tmp_path), "--threads", "1", "--repeats", "1"]) == 0
    lines = lines_of(tmp_path)
    assert {line["stage"] for line in lines} >= {
        *("calibrate", "decode", "suffix", "alternate", "interleave", "restore", "save")
    }
    assert not [line for line in lines if line["figures"].get("walked_right") is False]
    assert all(line["figures"]["same_token"] for line in lines if line["stage"] == "restore")
    out = capsys.readouterr().out
    for row in ("a layer with all resident, µs", "session: first token, s", "longest gap during another's prefill, ms"):
        assert row in out


def bench(directory: Path, kernels: str = "plain", sizes: Sizes = TINY_SIZES) -> Bench:
    quiet = {"threads": 1, "tell": lambda line: None}
    return Bench(directory, TINY, rates=ASSUMED, sizes=sizes, host=True, kernels=kernels, **quiet)


@pytest.mark.slow
def test_variants_share_one_bank_that_outlives_engines(directory):
    one = bench(directory)
    with one.engine("random", 0.5):
        before = one.bank.bytes.clone()
    with one.engine("random", 1.0) as running:
        assert running.pool.resident
    assert torch.equal(one.bank.bytes, before)
    assert one.bank.pinned_rows == one.bank.rows == TINY.layers * TINY.experts
    pointer = one.bank.bytes.data_ptr()
    words = Words(TINY.vocab, TINY.states, programmed=True)
    for share in (1.0, 0.5):
        with one.engine("programmed", share) as running:
            prompt = words.take(4)
            answer = Player(running.engine).run(prompt, 6)
            assert words.right(prompt, answer.tokens)
            assert not words.right(prompt, [*answer.tokens[:-1], answer.tokens[-1] + 1])
    assert one.bank.bytes.data_ptr() == pointer
    assert torch.equal(one.bank.bytes, before)
    one.close()
    assert one.bank.pinned_rows == 0


@pytest.mark.slow
def test_the_walk_with_the_triton_kernels(directory, monkeypatch):
    config = pytest.importorskip("engine.kernels.triton.config")
    monkeypatch.setattr(config, "decode_splits", lambda batch: 2)  # the interpreter takes a moment for each block
    monkeypatch.setattr(config, "prefill_splits", lambda blocks: 2)
    one = bench(directory, "triton", replace(TINY_SIZES, max_rows=1, max_context=64, kv_tokens=128))
    with one.engine("programmed", 0.5) as running:
        answer = Player(running.engine).run([5, 6, 7], 3)
        fetches, _, _, misses = running.pool.totals()
    assert answer.tokens == [8, 9, 10]
    assert misses >= fetches > 0
    one.close()


def test_arms_switch_while_a_stream_decodes(directory):
    one = bench(directory)
    with one.engine("programmed", 0.5) as running:
        player, pool = Player(running.engine), running.pool
        stream = player.start([3], 70)
        player.until(stream, 2)
        moved = {}
        for arm in ("cpu", "fetch", "hybrid, no overlap", "auto" + ASKED, "auto" + DRAWN, "auto" + DRAWN + ASKED):
            running.arms.use(arm)
            before = pool.totals()
            player.until(stream, len(stream.tokens) + 1)  # the newest step may have been begun already
            used, guesses = running.arms.model.steps.used_ahead, running.engine.stats().guesses
            player.until(stream, len(stream.tokens) + 9)
            moved[arm] = tuple(b - a for a, b in zip(before, pool.totals(), strict=True))
            assert running.arms.device.overlap is ("no overlap" not in arm)
            assert (running.arms.model.steps.used_ahead == used) is (ASKED in arm)
            assert (running.engine.stats().guesses > guesses) is (arm == "auto" + DRAWN)
        player.stop()
    assert moved["cpu"][0] == 0
    assert moved["fetch"][1] == 0
    assert moved["fetch"][0] == moved["fetch"][3] > 0
    assert stream.tokens == [(4 + i) % TINY.states for i in range(len(stream.tokens))]
    one.close()


def test_one_lane_keeps_the_order_of_recording():
    tape, ran = Tape(), []
    tape.add(lambda: ran.append(1))
    tape.fork()
    tape.add(lambda: ran.append(2), Lane.SIDE)
    tape.add(lambda: ran.append(3))
    tape.join()
    flat = one_lane(tape)
    assert {entry.lane for entry in flat.entries} == {Lane.MAIN}
    for entry in flat.entries:
        assert entry.call is not None
        entry.call()
    assert ran == [1, 2, 3]


def test_a_line_that_was_cut_off_is_not_there(tmp_path):
    state = tmp_path / "results.jsonl"
    results = Results(state, None, 100.0, "tiny")
    results.add("decode", {"batch": 1}, {"x": 1})
    results.add("decode", {"batch": 2}, {"x": 2})
    text = state.read_text()
    state.write_text(text[:-20])
    again = Results(state, tmp_path / "out", 100.0, "tiny")
    assert again.find("decode", batch=1) == {"x": 1}
    assert again.find("decode", batch=2) is None
    again.add("decode", {"batch": 2}, {"x": 3})
    assert Results(state, None, 100.0, "tiny").find("decode", batch=2) == {"x": 3}
    assert len((tmp_path / "out" / "gpu.jsonl").read_text().splitlines()) == 2
    assert Results(state, None, 100.0, "tiny", again=True).lines == []


def test_nothing_begins_that_would_end_too_late(tmp_path):
    results = Results(tmp_path / "results.jsonl", None, 100.0, "tiny")
    assert results.room()
    results.add("decode", {}, {}, took_s=99.0)
    assert results.room()
    results.add("decode", {}, {}, took_s=101.0)
    assert not results.room()


RATES = {"hbm_mbs": 4000, "link_mbs": 60, "cpu_mbs": 70, "both_link_mbs": 50, "both_cpu_mbs": 60, "copy_mbs": 55_000}


def spread(value: float) -> dict[str, float]:
    return {"median": value, "p10": value, "p90": value, "n": 5}


def test_floors_are_bytes_over_bandwidth():
    figures = {"dense_bytes": 3000, "routed_bytes": 2000}
    assert summary.decode_floor_ms(figures, 1000, RATES) == pytest.approx(max(4000 / 4000, 1000 / 110) / 1000)
    assert summary.decode_floor_ms(figures, 0, RATES) == pytest.approx(5000 / 4000 / 1000)


def test_goals_and_ratios_of_the_table(tmp_path):
    results = Results(tmp_path / "results.jsonl", None, 100.0, "tiny")
    results.add("calibrate", {}, RATES)
    rates = {"fetch": 50.0, "cpu": 90.0, "hybrid": 112.0, "auto": 109.0}
    arms = {
        arm: {
            "tokens_per_s": spread(rate),
            "gap_ms": {"p50": 9.0, "p99": 11.0},
            "hit_rate": 0.25,
            "missed_bytes_per_token": 750.0,
        }
        for arm, rate in rates.items()
    }
    where = {"variant": "random", "resident": 25, "layers": 20}
    hits = {"lru_hit_rate": 0.25, "belady_hit_rate": 0.61}
    results.add("decode", {**where, "batch": 1}, {"arms": arms, "dense_bytes": 10, "routed_bytes": 1000, **hits})
    ttft = {"ttft_s": spread(0.3), "layers_by_way": {}}
    results.add("suffix", where, {"restored 64": ttft, "restored 1024": ttft})
    state = {"memory_gb_s": spread(43.9), "file_gb_s": spread(3.0)}
    results.add("restore", {**where, "context": 65536}, state)
    by_name = {row.what: row for row in summary.rows(results)}
    assert (by_name["decode auto, tokens/s"].goal, by_name["decode auto, tokens/s"].met) == ("≥ 110", False)
    assert by_name["decode hybrid, tokens/s"].met is None
    assert by_name["decode auto, ms between tokens"].spread == "p99 11.00"
    assert by_name["decode hybrid, tokens/s"].spread == "112.0 … 112.0; 25% hits (LRU 25%, optimum 61%)"
    assert (by_name["hybrid without fall-back ÷ fetch"].figure, by_name["hybrid without fall-back ÷ fetch"].met) == (
        "2.24",
        True,
    )
    assert (by_name["hybrid without fall-back ÷ cpu"].figure, by_name["hybrid without fall-back ÷ cpu"].met) == ("1.24", True)
    assert by_name["with fall-back ÷ better pure way, 1 at once"].met is True
    assert by_name["first token, restored 64 tokens, s"].met is False
    assert by_name["first token, restored 1024 tokens, s"].met is True
    assert summary.show(Console(quiet=True), results) == 3
    restored = by_name["restore 65536 tokens from memory, GB/s"]
    assert (restored.floor, restored.goal, restored.met) == ("55.0", "≥ 44.0", False)


rows = st.lists(st.permutations(range(6)).map(lambda p: p[:2]), min_size=12, max_size=40)


@settings(max_examples=25, deadline=None)
@given(rows=rows, slots=st.integers(4, 8), seed=st.integers(0, 9))
def test_the_fast_lru_misses_as_the_engines(rows, slots, seed):
    other = [Random(seed + i).sample(range(6), 2) for i in range(len(rows))]
    routes = np.array([rows, other], dtype=np.uint16).transpose(1, 0, 2)
    trace = Trace("both", 6, routes, np.ones(len(rows), dtype=bool))
    slow = replay(trace, SlotCache("lru", slots, 2, 6, (0, 1, 2)))
    assert np.array_equal(replay(trace, Lru(slots, 6)).misses, slow.misses)


def test_hit_rates_of_uniform_routes_are_the_residents_share():
    wide = replace(TINY, experts=64)
    rates = hit_rates(uniform_like(wide, 400), TINY.layers * 64 // 2)
    assert rates["lru_hit_rate"] == pytest.approx(0.5, abs=0.05)
    assert rates["belady_hit_rate"] > 0.6
