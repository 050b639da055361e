"""The reference and the exact backend, to the bit: a token's logits and state depend on its prefix and on nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import StateCut
from engine.errors import Unsupported
from engine.kernels import cpu
from engine.models import registry
from tests.budget import examples
from tests.engine.checkpoints import Lane, Pools, load, make, pools, save, step

TYPES = sorted(set(registry.MODELS) - {"qwen3_5_moe_text"})
PROMPT = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(4)).tolist()
LENGTH = len(PROMPT)


@pytest.fixture(scope="module", params=["reference", "exact"])
def loaded(request, tmp_path_factory):
    backend, made = request.param, {}

    def get(model_type: str, slots: int | str = "auto"):
        if model_type not in made:
            directory = save(make(model_type, num_experts_per_tok=3), tmp_path_factory.mktemp(model_type))
            model = load(directory, backend=backend).model
            made[model_type] = directory, model, step(model, pools(model.spec), [(Lane(range(8), 0), PROMPT)])[0]
        directory, model, want = made[model_type]
        return (model if slots == "auto" else load(directory, backend=backend, slots=slots).model), want

    return get


def row_state(state: Pools, row: int) -> list[torch.Tensor]:
    return [t[row].clone() for t in (*state.delta, *state.conv)]


@pytest.mark.parametrize("model_type", TYPES)
@settings(max_examples=examples(3, 8), deadline=None)
@given(edges=st.sets(st.integers(1, LENGTH - 1), max_size=6), pages=st.permutations(range(8)))
def test_any_chunking_gives_the_same_bits(loaded, model_type, edges, pages):
    model, want = loaded(model_type)
    state, lane = pools(model.spec), Lane(pages, 3)
    bounds = [0, *sorted(edges), LENGTH]
    parts = [step(model, state, [(lane, PROMPT[a:b])])[0] for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), want)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_batch_gives_the_same_bits_as_alone(loaded, model_type):
    model, want = loaded(model_type)
    state, lane, other = pools(model.spec), Lane(range(8), 3), Lane(range(10, 18), 1)
    got = [step(model, state, [(other, PROMPT[::-1][a:b]), (lane, PROMPT[a:b])])[1] for a, b in ((0, 41), (41, 42), (42, 70))]
    assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("loaded", ["reference"], indirect=True)
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("slots", [1, 5])
def test_fewer_slots_than_experts_give_the_same_bits(loaded, model_type, slots):
    model, want = loaded(model_type, slots)
    assert model.spec.slots == slots
    assert torch.equal(step(model, pools(model.spec), [(Lane(range(8), 0), PROMPT)])[0], want)


def test_the_exact_backend_says_what_it_needs(tmp_path, monkeypatch):
    with pytest.raises(Unsupported, match="exact: slots=5"):
        load(save(make("qwen3_moe"), tmp_path), backend="exact", slots=5)
    monkeypatch.setattr(cpu, "available", lambda: False)
    with pytest.raises(Unsupported, match=r"exact: needs the C\+\+ library"):
        load(save(make("qwen3_moe"), tmp_path), backend="exact")


@pytest.mark.parametrize("backend", ["reference", "exact", "cpu"])
def test_a_cut_copies_the_state_that_a_shorter_run_ends_with(backend, tmp_path):
    directory = save(make("qwen3_5_moe"), tmp_path)
    model = load(directory, backend=backend).model
    state = pools(model.spec)
    cuts = [StateCut(1, 4), StateCut(37, 5), StateCut(37, 6), StateCut(70, 7)]
    step(model, state, [(Lane(range(8), 0), PROMPT)], [cuts])
    for cut in cuts:
        short = pools(model.spec)
        step(model, short, [(Lane(range(8), 2), PROMPT[: cut.offset])])
        for got, want in zip(row_state(state, cut.dest_row), row_state(short, 2), strict=True):
            if backend != "cpu":
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_decode_goes_on_from_a_copied_row(loaded):
    model, want = loaded("qwen3_5_moe")
    state = pools(model.spec)
    step(model, state, [(Lane(range(8), 0), PROMPT[:50])], [[StateCut(33, 5)]])
    resumed = Lane(range(8), 5, context=33)
    got = [step(model, state, [(resumed, PROMPT[i : i + 1])])[0] for i in range(33, LENGTH)]
    assert torch.equal(torch.cat(got), want[33:])
