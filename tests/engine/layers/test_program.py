"""The recorded step against the eager one: same model, same batch, same state afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import StateCut
from engine.kernels import cpu
from engine.layers.program import Limits
from engine.models import registry
from engine.runner import FIRST_LIMITS, CpuModel
from tests.engine.checkpoints import Lane, load, make, pools, save, step

TYPES = sorted(set(registry.MODELS) - {"qwen3_5_moe_text"})

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the C++ library")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(model_type, dtype) → (recorded model, eager model) over the same weights."""
    made = {}

    def get(model_type: str, dtype: torch.dtype = torch.float32):
        if (model_type, dtype) not in made:
            directory = save(make(model_type, dtype=dtype), tmp_path_factory.mktemp(model_type))
            native, eager = load(directory).model, load(directory).model
            assert isinstance(eager, CpuModel)
            eager._native = False
            made[model_type, dtype] = native, eager
        return made[model_type, dtype]

    return get


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_mixed_batch_with_cuts_gives_the_same_logits_and_state(pair, model_type, dtype):
    results = []
    for model in pair(model_type, dtype):
        state = pools(model.spec, pages=40, rows=12)
        lanes = [Lane(range(8 * i, 8 * i + 8), i) for i in range(4)]
        logits = step(model, state, [(lane, tokens(20 + 9 * i, i)) for i, lane in enumerate(lanes)])
        cuts = [[StateCut(1, 5)], [StateCut(3, 6), StateCut(40, 7)], [], [StateCut(2, 8)]]
        work = [(lane, tokens(count, 9 + i)) for i, (lane, count) in enumerate(zip(lanes, (1, 40, 17, 2), strict=True))]
        logits += step(model, state, work, cuts if model.spec.delta_layers else ())
        rows = [0, 1, 2, 3, 5, 6, 7, 8]
        results.append((torch.cat(logits), [pool[rows].float() for pool in (*state.delta, *state.conv)]))
    for native, eager in zip((results[0][0], *results[0][1]), (results[1][0], *results[1][1]), strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(native, eager, rtol=2e-4, atol=2e-4)
        else:  # one token routed otherwise is a large difference in few places
            assert (native - eager).abs().mean() <= 0.02 * eager.abs().max()


def test_a_batch_that_outgrows_the_recording_is_recorded_again(pair):
    recorded, eager = pair("qwen3_5_moe")
    native = CpuModel(recorded._decoder)
    assert FIRST_LIMITS.rows < 100
    state, other = pools(native.spec), pools(native.spec)
    small, big = Lane(range(8), 0), Lane(range(8), 0)
    step(native, state, [(small, tokens(3, 1))])
    first = native._step
    step(native, state, [(small, tokens(5, 2))])
    assert native._step is first
    step(native, state, [(small, tokens(110, 3))])
    assert native._step is not first
    got = step(native, state, [(small, tokens(4, 4))])[0]
    for count, seed in ((3, 1), (5, 2), (110, 3)):
        step(eager, other, [(big, tokens(count, seed))])
    torch.testing.assert_close(got, step(eager, other, [(big, tokens(4, 4))])[0], rtol=2e-4, atol=2e-4)


def test_other_pools_are_not_written_through_an_old_recording(pair):
    native, _ = pair("qwen3_moe")
    first, second = pools(native.spec), pools(native.spec)
    step(native, first, [(Lane(range(8), 0), tokens(9, 1))])
    before = [t.clone() for t in (*first.k, *first.v)]
    step(native, second, [(Lane(range(8), 0), tokens(9, 2))])
    for was, now in zip(before, (*first.k, *first.v), strict=True):
        assert torch.equal(was.nan_to_num(7.0), now.nan_to_num(7.0))
    assert not second.k[0][0, :9].isnan().any()


def test_logits_belong_to_the_caller(pair):
    native, _ = pair("qwen3_moe")
    state, lane = pools(native.spec), Lane(range(8), 0)
    kept = step(native, state, [(lane, tokens(4, 1))])[0]
    before = kept.clone()
    step(native, state, [(lane, tokens(4, 2))])
    assert torch.equal(kept, before)


sizes = st.builds(Limits, *(st.integers(0, 5000) for _ in range(5)))


@settings(max_examples=50)
@given(have=sizes, want=sizes)
def test_grown_limits_hold_both_and_stay_within_twice(have, want):
    grown = have.grown(want)
    assert grown.hold(have)
    assert grown.hold(want)
    for name in ("rows", "seqs", "pages", "cuts", "positions"):
        largest = max(getattr(have, name), getattr(want, name))
        assert getattr(grown, name) < max(2, 2 * largest)
        if largest:
            assert not replace(grown, **{name: largest - 1}).hold(replace(want, **{name: largest}))
