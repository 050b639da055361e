"""The offloaded engine computes what the reference does: whatever is resident, wherever an expert runs, in whatever order the
two lanes of the device run."""

from __future__ import annotations

import pytest
import torch

from engine.batch import ForwardBatch, SeqSlice, StateCut
from engine.errors import DeviceError
from engine.gpu.model import GpuModel, device_errors
from engine.gpu.steps import graph_sizes
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

EVERY = {"qwen3_moe": 16, "qwen3_5_moe": 24}
"""Experts of all MoE layers."""
RESIDENT = ["two a layer", "half", "all but one", "all"]
PARTS = [tokens(1, 1), tokens(19, 2), tokens(1, 3), tokens(1, 4), tokens(7, 5), tokens(1, 6), tokens(1, 7)]


def slots(model_type: str, resident: str) -> int:
    every = EVERY[model_type]
    return {"two a layer": every // 4, "half": every // 2, "all but one": every - 1, "all": every}[resident]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("fetches", "taken"), [(-1, 0), (1, 0), (0, 0), (0, 16), (1, 16)])
@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_the_references_whatever_is_resident(model_type, resident, fetches, taken, device, tmp_path_factory):
    where = directory(model_type, tmp_path_factory)
    want, state, lane = (
        reference(model_type, tmp_path_factory),
        pools(reference(model_type, tmp_path_factory).spec),
        Lane(PAGES, 1),
    )
    with offloaded(where, device, slots=slots(model_type, resident), host_seed=fetches + 5) as model:
        experts = model.experts
        assert experts is not None
        experts.set_table(fetch_table(fetches, 8), taken)
        own, mine = device_pools(model), Lane(PAGES, 1)
        for part in PARTS:
            (expected,) = step(want, state, [(lane, part)])
            (got,) = step(model, own, [(mine, part)])
            assert close(got, expected, 1e-4 if device == "host" else 1e-2)
            if resident != "all":
                check_slots(experts)
        fetched, on_cpu, hits, misses = experts.totals()
        if resident == "all":
            assert (fetched, on_cpu, hits, misses) == (0, 0, 0, 0)
        else:
            assert fetched + on_cpu == misses > 0
            executor = experts.executor_state()
            assert executor is not None
            assert (executor.served > 0) == (on_cpu > 0)
        if resident == "two a layer":
            assert (on_cpu > 0) == (fetches >= 0)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_the_two_lanes_does_not_matter(seed, tmp_path_factory):
    want = reference("qwen3_5_moe", tmp_path_factory)
    state, lane = pools(want.spec), Lane(PAGES, 1)
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), slots=7, host_seed=seed) as model:
        own, mine = device_pools(model), Lane(PAGES, 1)
        for part in PARTS:
            assert close(step(model, own, [(mine, part)])[0], step(want, state, [(lane, part)])[0], 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", TYPES)
def test_batches_of_decoding_and_prefilling_sequences_with_cuts(model_type, device, tmp_path_factory):
    want = reference(model_type, tmp_path_factory)
    cuts = [[StateCut(1, 5)], [StateCut(3, 6), StateCut(40, 7)], [], [StateCut(2, 8)], []]
    counts = (1, 40, 1, 2, 1)
    results = []
    with offloaded(directory(model_type, tmp_path_factory), device, slots=6) as model:
        for runner in (want, model):
            own = device_pools(runner, pages=48, rows=12) if runner is model else pools(runner.spec, pages=48, rows=12)
            lanes = [Lane(range(8 * i, 8 * i + 8), i) for i in range(5)]
            logits = step(runner, own, [(lane, tokens(11 + 3 * i, i)) for i, lane in enumerate(lanes)])
            work = [(lane, tokens(n, 9 + i)) for i, (lane, n) in enumerate(zip(lanes, counts, strict=True))]
            logits += step(runner, own, work, cuts if runner.spec.delta_layers else ())
            kept = [pool[[0, 1, 2, 3, 4, 5, 6, 7, 8]].float().cpu() for pool in (*own.delta, *own.conv)]
            results.append((torch.cat([part.cpu() for part in logits]), kept))
    assert close(results[1][0], results[0][0], 1e-4 if device == "host" else 1e-2)
    for got, expected in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4 if device == "host" else 2e-2)


def test_one_graph_serves_every_step_of_a_size_and_padding_changes_nothing(tmp_path_factory):
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), slots=8) as model:
        own = device_pools(model)
        lanes = [Lane(PAGES[:3], 0), Lane(PAGES[3:6], 1), Lane(PAGES[6:], 2)]
        step(model, own, [(lane, tokens(5, i)) for i, lane in enumerate(lanes)])
        before = [pool[[3, 4, 5, 6, 7]].clone() for pool in (*own.delta, *own.conv)]
        for turn in range(4):
            step(model, own, [(lane, tokens(1, turn)) for lane in lanes])
        assert [rows for rows, _ in model.steps.graphs] == [4]
        after = [pool[[3, 4, 5, 6, 7]] for pool in (*own.delta, *own.conv)]
        for was, now in zip(before, after, strict=True):
            assert torch.equal(was.nan_to_num(7.0), now.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
def test_a_decode_step_tells_the_best_token_of_each_row(device, tmp_path_factory):
    """The second of the sequences has lost its state: it is NaN."""
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), device, slots=8) as model:
        own, lanes = device_pools(model), [Lane([i], i) for i in range(3)]
        step(model, own, [(lane, tokens(5, i)) for i, lane in enumerate(lanes)])
        own.delta[0][1] = float("nan")
        slices = tuple(SeqSlice(i, 1, 5, torch.tensor([i], dtype=torch.int32), i, False) for i in range(3))
        batch = ForwardBatch(torch.tensor(tokens(3, 9)), torch.tensor([5, 5, 5]), slices, torch.arange(3))
        got = model.forward(batch, own, own)
        assert got.guesses == [int(got.rows[0].argmax()), -1, int(got.rows[2].argmax())]


def test_bf16_stays_within_its_rounding(tmp_path_factory):
    where = directory("qwen3_moe", tmp_path_factory, torch.bfloat16)
    want = reference("qwen3_moe", tmp_path_factory, torch.bfloat16)
    part = tokens(60, 8)
    (expected,) = step(want, pools(want.spec), [(Lane(PAGES, 0), part)])
    with offloaded(where, slots=5) as model:
        assert model.spec.dtype == torch.bfloat16
        (got,) = step(model, device_pools(model), [(Lane(PAGES, 0), part)])
    assert ((got - expected).abs().mean() / expected.abs().max()).item() < 0.02


def test_a_hostile_sequence_never_hits_what_another_layer_overwrote(tmp_path_factory):
    """Decode uses an expert of every layer, a prefill takes every slot, decode comes back to its old experts."""
    want = reference("qwen3_5_moe", tmp_path_factory)
    state, first, second = pools(want.spec), Lane(PAGES[:4], 0), Lane(PAGES[4:], 1)
    with offloaded(directory("qwen3_5_moe", tmp_path_factory), slots=4, slot_policy="lru") as model:
        own, mine, other = device_pools(model), Lane(PAGES[:4], 0), Lane(PAGES[4:], 1)
        for turn in range(6):
            one, many = tokens(1, turn), tokens(9, 50 + turn)
            assert close(step(model, own, [(mine, one)])[0], step(want, state, [(first, one)])[0], 1e-4)
            check_slots(model.experts)
            assert close(step(model, own, [(other, many)])[0], step(want, state, [(second, many)])[0], 1e-4)
            check_slots(model.experts)


@pytest.mark.parametrize(("rows", "sizes"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16))])
def test_graph_sizes_end_at_the_most_rows(rows, sizes):
    assert graph_sizes(rows) == sizes


def test_a_batch_of_more_rows_than_the_largest_graph_runs_in_parts(tmp_path_factory):
    want = reference("qwen3_moe", tmp_path_factory)
    state, lanes = pools(want.spec), [Lane([i], i) for i in range(5)]
    with offloaded(directory("qwen3_moe", tmp_path_factory), slots=8, max_rows=2) as model:
        assert isinstance(model, GpuModel)
        own, mine = device_pools(model), [Lane([i], i) for i in range(5)]
        for turn in range(2):
            work = [tokens(1, 10 * turn + i) for i in range(5)]
            expected = step(want, state, list(zip(lanes, work, strict=True)))
            got = step(model, own, list(zip(mine, work, strict=True)))
            assert close(torch.cat(got), torch.cat(expected), 1e-4)


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered\nmore", "CUDA driver error: 700"])
def test_an_error_of_the_device_is_a_device_error(text):
    with pytest.raises(DeviceError, match="board: CUDA"), device_errors("board"):
        raise RuntimeError(text)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), torch.OutOfMemoryError("CUDA out of memory")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised, device_errors("board"):
        raise error
    assert raised.value is error
