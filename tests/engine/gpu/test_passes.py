"""Prefill passes: streamed through a ring, fetched by union, shared with the CPU; the numbers are the reference's each way, in
every order of the lanes, and slots never hold what their owner is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SeqSlice, StateCut
from engine.gpu.prefill import plan_chunks
from engine.gpu.stream import Streamer, expert_counts
from engine.moe.cost import ASSUMED, Rates, ring_slots
from engine.moe.dispatch import fetch_table
from tests.engine.checkpoints import Lane, pools, step
from tests.engine.gpu.models import (
    DEVICES,
    PAGES,
    TYPES,
    check_slots,
    close,
    device_pools,
    directory,
    offloaded,
    reference,
    tokens,
)

STREAMS = replace(ASSUMED, copy_mbs=10**9, gpu_gflops=1)
"""A machine whose copy engine costs nothing: every pass streams."""
FETCHES = replace(ASSUMED, copy_mbs=1, cpu_mbs=1, both_cpu_mbs=1)
SHARES = replace(
    ASSUMED, copy_mbs=1, both_cpu_mbs=20_000, both_link_mbs=20_000, link_mbs=20_000, cpu_mbs=20_000, cpu_tokens=1000
)
WAYS: dict[str, Rates] = {"stream": STREAMS, "union": FETCHES, "shared": SHARES}
PARTS = [tokens(33, 2), tokens(1, 3), tokens(60, 4), tokens(1, 5), tokens(2, 6)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [4, 7, 15])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_the_references_each_way(model_type, way, slots, device, tmp_path_factory):
    want = reference(model_type, tmp_path_factory)
    state, lane = pools(want.spec), Lane(PAGES, 1)
    with offloaded(directory(model_type, tmp_path_factory), device, slots=slots, host_seed=slots) as model:
        experts, passes = model.experts, model.expert_pass
        assert experts is not None
        assert passes is not None
        experts.split.rates = WAYS[way]
        own, mine = device_pools(model), Lane(PAGES, 1)
        for part in PARTS:
            (expected,) = step(want, state, [(lane, part)])
            (got,) = step(model, own, [(mine, part)])
            assert close(got, expected, 1e-4 if device == "host" else 1e-2)
            check_slots(experts)
            assert not experts.state.pull().lent
        assert (passes.ways["stream"] > 0) == (way == "stream" and ring_slots(slots, experts.layers, 8, 8) >= 2)
        executor = experts.executor_state()
        assert executor is not None
        assert way != "shared" or executor.served > 0


@pytest.mark.parametrize("seed", range(8))
def test_streaming_is_right_in_every_order_of_the_lanes(seed, tmp_path_factory):
    want = reference("qwen3_5_moe", tmp_path_factory)
    state, lane = pools(want.spec), Lane(PAGES, 1)
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), slots=8, host_seed=seed) as model:
        assert model.experts is not None
        model.experts.split.rates = STREAMS
        own, mine = device_pools(model), Lane(PAGES, 1)
        for part in PARTS:
            assert close(step(model, own, [(mine, part)])[0], step(want, state, [(lane, part)])[0], 1e-4)
            check_slots(model.experts)


@pytest.mark.parametrize("way", WAYS)
def test_a_hostile_prefill_between_decode_steps_leaves_no_stale_slot(way, tmp_path_factory):
    want = reference("qwen3_5_moe", tmp_path_factory)
    state, first, second = pools(want.spec), Lane(PAGES[:4], 0), Lane(PAGES[4:], 1)
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), slots=6, slot_policy="lru", host_seed=3) as model:
        assert model.experts is not None
        model.experts.split.rates = WAYS[way]
        own, mine, other = device_pools(model), Lane(PAGES[:4], 0), Lane(PAGES[4:], 1)
        for turn in range(5):
            one, many = tokens(1, turn), tokens(9, 50 + turn)
            assert close(step(model, own, [(mine, one)])[0], step(want, state, [(first, one)])[0], 1e-4)
            assert close(step(model, own, [(other, many)])[0], step(want, state, [(second, many)])[0], 1e-4)
            check_slots(model.experts)


def test_unpinned_experts_are_computed_on_the_cpu_in_passes_of_any_length(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("engine.gpu.experts.HANDOFF_TOKENS", 16)
    monkeypatch.setattr("engine.gpu.experts_pass.HANDOFF_TOKENS", 16)
    want = reference("qwen3_moe", tmp_path_factory)
    state, lane, where = pools(want.spec), Lane(PAGES, 1), directory("qwen3_moe", tmp_path_factory)
    with offloaded(where, slots=8, pin_bytes=9 * 24_576) as model:
        assert model.experts is not None
        assert model.experts.state.pinned_ids == 9
        model.experts.split.rates = FETCHES
        own, mine = device_pools(model), Lane(PAGES, 1)
        for part in PARTS:
            assert close(step(model, own, [(mine, part)])[0], step(want, state, [(lane, part)])[0], 1e-4)
            check_slots(model.experts)
            assert all(owner < 9 for owner in model.experts.state.pull().id_of_slot)


def test_decode_steps_while_a_ring_is_out_hit_residents_and_change_no_owner(tmp_path_factory):
    want = reference("qwen3_5_moe", tmp_path_factory)
    state, lane = pools(want.spec), Lane(PAGES, 0)
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), slots=12, host_seed=1) as model:
        experts, passes = model.experts, model.expert_pass
        assert experts is not None
        assert passes is not None
        experts.split.rates = STREAMS
        own, mine = device_pools(model), Lane(PAGES, 0)
        for turn in range(3):
            assert close(step(model, own, [(mine, tokens(1, turn))])[0], step(want, state, [(lane, tokens(1, turn))])[0], 1e-4)
        passes.begin(64)
        assert passes.streaming
        before = experts.state.pull()
        for turn in range(3, 9):
            assert close(step(model, own, [(mine, tokens(1, turn))])[0], step(want, state, [(lane, tokens(1, turn))])[0], 1e-4)
        after = experts.state.pull()
        assert after.id_of_slot == before.id_of_slot
        assert after.lent == before.lent != set()
        passes.end()
        check_slots(experts)
        step(model, own, [(mine, tokens(1, 9))])
        assert experts.state.pull().lent == set()


def test_hot_streamed_experts_stay_in_exchange_for_colder_residents(tmp_path_factory):
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), slots=12, slot_policy="lru", host_seed=2) as model:
        experts = model.experts
        assert experts is not None
        experts.set_table(fetch_table(-1, 8))
        own, lane = device_pools(model), Lane(PAGES, 0)
        for turn in range(8):
            step(model, own, [(lane, tokens(1, turn))])
        slots = experts.state.pull()
        stream = Streamer(experts, slots, range(experts.layers))
        seen: set[int] = set()
        for where in stream.parts(0):
            seen |= set(where)
        assert seen == set(range(8))
        hot = stream._streamed[0][-1]
        counts = [3] * 8
        counts[hot] = 50
        before = experts.state.pull()
        assert stream.keep_hot(0, counts) == 1
        after = experts.state.pull()
        assert after.slot_for_id[hot] >= 0 > before.slot_for_id[hot]
        assert len([s for s in after.id_of_slot if s >= 0]) == len([s for s in before.id_of_slot if s >= 0])
        check_slots(experts)
        for where in stream.parts(1):
            assert all(slot not in after.slot_for_id[:8] for e, slot in where.items())
        stream.close()
        check_slots(experts)
        assert not experts.state.pull().lent


def test_counts_of_experts_leave_padding_out():
    ids = torch.tensor([[0, 3], [3, -1], [-1, -1]], dtype=torch.int32)
    assert expert_counts(ids, 5).tolist() == [1, 0, 0, 2, 0]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_chunks_cover_every_token_once_and_cuts_end_segments(data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    chunk = data.draw(st.integers(1, 50))
    seqs, start = [], 0
    for length in lengths:
        offsets = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)))
        cuts = tuple(StateCut(offset, 100 * start + offset) for offset in offsets)
        context = data.draw(st.integers(0, 9))
        seqs.append(SeqSlice(start, length, context, torch.zeros(1, dtype=torch.int32), 0, context == 0, cuts))
        start += length
    seen: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(seqs))}
    found_cuts: list[tuple[int, int, int]] = []
    at = 0
    for part in plan_chunks(seqs, chunk):
        assert part.first == at
        assert 0 < part.length <= chunk
        at += part.length
        assert sum(segment.length for segment in part.whole) == part.length
        assert sum(segment.length for each in part.rounds for segment in each) == part.length
        for each in part.rounds:
            assert len({segment.seq for segment in each}) == len(each)
            for segment in each:
                flat = part.first + segment.start
                offset = flat - seqs[segment.seq].start
                assert segment.context == seqs[segment.seq].context + offset
                seen[segment.seq].append((offset, offset + segment.length))
                if segment.cut >= 0:
                    found_cuts.append((segment.seq, offset + segment.length, segment.cut))
    assert at == start
    for index, seq in enumerate(seqs):
        edges = [0, *(end for _, end in seen[index])]
        assert [begin for begin, _ in seen[index]] == edges[:-1]
        assert edges[-1] == seq.length
    assert sorted(found_cuts) == sorted((i, c.offset, c.dest_row) for i, seq in enumerate(seqs) for c in seq.cuts)
