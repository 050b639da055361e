"""Calibration measures with the executor and kernels that serve, keeps what it finds, and a model takes it from there."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device.host import HostDevice
from engine.errors import DeviceError
from engine.gpu import calibrate, load
from engine.gpu.direct import CALLS, LEAST_ROWS, DirectReads, fitted, rate_and_cost
from engine.gpu.experts import Reads
from engine.kernels import cpu, plain
from engine.moe import profile
from engine.moe.cost import ASSUMED, Rates
from engine.moe.host_bank import Record
from tests.engine.gpu.models import directory, offloaded

RECORD = Record(64, 32, torch.float32)


def bank(pinned: bool = True):
    made = calibrate.synthetic_bank(RECORD, 1 << 20)
    if pinned:
        made.pin(HostDevice(), None, lambda fraction, what: None)
    return made


def test_everything_is_measured_on_host_memory():
    device, told = HostDevice(), []
    rates = calibrate.measure(device, plain, bank(), device, 0.01, told.append)
    fixed = ("copy_ns", "merge_ns", "direct_ns")
    assert all(getattr(rates, field.name) > 0 for field in fields(Rates) if field.name not in fixed)
    assert told == [
        "the link alone",
        "the device's memory",
        "the CPU alone",
        "link and CPU together",
        "parts of experts",
        "matrix products",
    ]


def test_without_a_device_the_cpu_is_measured_and_the_rest_assumed():
    rates = calibrate.cpu_only(RECORD, HostDevice(), 0.01, 1 << 20)
    assert rates.link_mbs == ASSUMED.link_mbs
    assert (rates.cpu_mbs, rates.handoff_ns) != (ASSUMED.cpu_mbs, ASSUMED.handoff_ns)


def test_nothing_pinned_is_an_error():
    with pytest.raises(DeviceError, match="no expert is pinned"):
        calibrate.measure(HostDevice(), plain, bank(pinned=False), HostDevice(), 0.01)


def test_a_request_reads_the_experts_that_it_names():
    side = calibrate.CpuSide(bank(), HostDevice())
    try:
        side.ask(2, 5)
        side.wait()
        busy, read = side.done()
    finally:
        side.close()
    assert read in (5 * 3 * 64 * 32 * 4, 5 * RECORD.nbytes)
    assert busy > 0


def test_a_request_leaves_out_what_the_device_takes():
    side = calibrate.CpuSide(bank(), HostDevice())
    try:
        side.request_ns(1, 4, 0.0, taken=8)
        _, read = side.done()
    finally:
        side.close()
    assert read in (3 * 4 * 3 * 64 * 24 * 4, 3 * 4 * RECORD.nbytes * 24 // 32)


def test_every_call_reads_the_last_rows_of_an_expert_of_its_own():
    made, read = bank(), []
    record = RECORD.views(made.bytes)

    def bank_experts(x, ids, weights, counts, shares, gate_up, down, inner, out):
        first = 2 * RECORD.inter * RECORD.hidden * 4
        at = (gate_up.data_ptr() - made.bytes.data_ptr()) // RECORD.nbytes
        assert gate_up.data_ptr() == record.gate_up[at].data_ptr()
        assert down.data_ptr() == gate_up.data_ptr() + first
        assert int(counts[1]) == int((ids >= 0).sum()) == 1
        read.append((at, int(shares[0])))

    reads = DirectReads(HostDevice(), SimpleNamespace(bank_experts=bank_experts), made, 8)  # type: ignore[arg-type]
    read.clear()
    reads.use(16)
    reads.replay()
    assert read == [(row, 16) for row in range(min(CALLS, made.rows))]
    assert reads.nbytes(16) == len(read) * RECORD.nbytes // 2


@given(rate=st.integers(100, 10**5), fixed=st.integers(0, 10**5), inter=st.sampled_from([32, 64, 96, 512, 768, 1000, 2048]))
def test_rate_and_cost_follow_from_two_times(rate, fixed, inter):
    few, many = fitted(inter)
    assert 0 < few < many <= inter
    assert few % LEAST_ROWS == many % LEAST_ROWS == 0
    seen = {rows: fixed + 6_000_000 * rows // inter * 1000 // rate for rows in (few, many)}
    got_rate, got_fixed = rate_and_cost(6_000_000, inter, seen)
    assert got_rate == pytest.approx(rate, rel=0.02)
    assert got_fixed == pytest.approx(fixed, abs=max(20, 0.03 * seen[many]))


@pytest.mark.parametrize("seen", [{64: 100, 256: 100}, {64: 200, 256: 100}, {64: 10, 256: 10_000}])
def test_times_that_no_rate_explains_are_all_put_down_to_the_larger_part(seen):
    assert rate_and_cost(1 << 20, 512, seen) == ((1 << 19) * 1000 // seen[256], 0)


class Machine:
    """Answers in the time of reading, or of multiplying `free` tokens: what is more."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked: list[tuple[int, int]] = []

    def request_ns(self, tokens: int, experts: int, seconds: float, rows: int = 0) -> int:
        self.asked.append((tokens, rows))
        return 1000 * max(1, -(-tokens // self.free))


@pytest.mark.parametrize(("free", "found"), [(1, 1), (4, 4), (32, 32), (100, 64), (10_000, calibrate.MOST_TOKENS)])
def test_tokens_are_doubled_until_a_pass_takes_longer(free, found):
    machine = Machine(free)
    assert calibrate.tokens_for_free(machine, 0.01) == found  # type: ignore[arg-type]
    assert all(rows > 16 for _, rows in machine.asked), "up to 16 tokens are multiplied as a decode step's"


def test_rows_of_a_request_that_choose_nothing_read_nothing():
    side = calibrate.CpuSide(bank(), HostDevice())
    try:
        side.ask(2, 5, rows=40)
        side.wait()
        assert int(side.box.request[2]) == 40
        assert side.done()[1] in (5 * 3 * 64 * 32 * 4, 5 * RECORD.nbytes)
    finally:
        side.close()


def test_rates_belong_to_an_instruction_set(monkeypatch):
    if not cpu.available():
        pytest.skip("no C++ library")
    keys = set()
    for name in cpu.isas():
        monkeypatch.setattr(cpu, "isa", lambda name=name: name)
        keys.add(profile.machine_key("board", 4))
    assert len(keys) == len(cpu.isas())


def test_rates_are_found_again_for_the_same_machine_and_record_alone(tmp_path):
    path = tmp_path / "state" / "rates.json"
    profile.save(path, "here", "bf16 1x1", ASSUMED)
    profile.save(path, "here", "f32 1x1", {"cpu_mbs": 7})
    profile.save(path, "there", "bf16 1x1", ASSUMED.refitted(1, 1))
    assert profile.load(path, "here", "bf16 1x1") == ASSUMED
    assert profile.load(path, "there", "bf16 1x1") == ASSUMED.refitted(1, 1)
    assert profile.load(path, "here", "f32 1x1") is None, "not all of it was measured"
    assert profile.load(path, "elsewhere", "bf16 1x1") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99, "machines": {}}', '{"version": 1, "machines": {"here": 3}}'])
def test_a_broken_file_is_no_file_and_is_written_anew(text, tmp_path, caplog):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert profile.load(path, "here", "bf16 1x1") is None
    assert "not used" in caplog.text
    profile.save(path, "here", "bf16 1x1", ASSUMED)
    assert profile.load(path, "here", "bf16 1x1") == ASSUMED


def test_a_model_measures_at_its_first_start_and_reads_at_its_second(tmp_path, tmp_path_factory, monkeypatch, caplog):
    monkeypatch.setattr(load, "QUICK_SECONDS", 0.01)
    where, path = directory("qwen3_moe", tmp_path_factory), tmp_path / "rates.json"
    with caplog.at_level(logging.INFO, logger="engine.runner"), offloaded(where, slots=6, rates=path) as model:
        assert model.experts is not None
        first = model.experts.split.rates
    assert first != ASSUMED
    assert "rates, measured: link" in caplog.text
    monkeypatch.setattr(calibrate, "measure", lambda *args: pytest.fail("measured again"))
    with offloaded(where, slots=6, rates=path) as model:
        assert model.experts is not None
        assert model.experts.split.rates == first


def test_the_mode_decides_what_is_fetched(tmp_path_factory):
    with offloaded(directory("qwen3_moe", tmp_path_factory), slots=6, expert_mode="fetch") as model:
        experts = model.experts
        assert experts is not None
        experts.use_table(1)
        assert experts.table.tolist() == list(range(len(experts.table)))
        experts.use_mode("cpu")
        experts.use_table(1)
        assert not experts.table.any()
        experts.use_mode("hybrid", ASSUMED)
        experts.use_table(1)
        want = experts.split.table("hybrid", 1)
        pairs = list(zip(experts.table.tolist(), experts.shares.tolist(), strict=True))
        assert pairs == [want[min(m, len(want) - 1)] for m in range(len(experts.table))]
        assert experts.use_table(1, fetching=False) is Reads.NOTHING
        assert not experts.table.any()
        assert experts.reads == (Reads.NOTHING, Reads.WHOLE)
        experts.use_mode("hybrid", replace(ASSUMED, direct_mbs=ASSUMED.link_mbs))
        assert experts.reads == tuple(Reads)
        experts.set_table((0, 1), taken=16)
        assert experts.use_table(1) is Reads.PARTS
        experts.set_table((0, 1))
        assert experts.use_table(1) is Reads.WHOLE


def test_a_setting_keeps_experts_whole(tmp_path_factory):
    with offloaded(directory("qwen3_moe", tmp_path_factory), slots=6, divide_experts=False) as model:
        experts = model.experts
        assert experts is not None
        assert experts.divisible == 0
        experts.use_mode("hybrid", replace(ASSUMED, direct_mbs=ASSUMED.link_mbs))
        assert experts.reads == (Reads.NOTHING, Reads.WHOLE)
        experts.set_table((0,), taken=16)
        assert experts.use_table(1) is Reads.NOTHING
