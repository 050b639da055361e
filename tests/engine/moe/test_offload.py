"""Experts behind slots compute what resident experts compute, on both paths, whatever is fetched."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ShapeMismatch
from engine.kernels import cpu, reference
from engine.moe.banks import ExpertBank, check_uniform
from engine.moe.offload import ExpertOffload
from engine.moe.slots import make_policy

E, HIDDEN, INTER = 6, 32, 16

needs_library = pytest.mark.skipif(not cpu.available(), reason="needs the C++ library")


def banks(count: int) -> list[ExpertBank]:
    generator = torch.Generator().manual_seed(5)
    return [
        ExpertBank(torch.randn(E, 2 * INTER, HIDDEN, generator=generator), torch.randn(E, HIDDEN, INTER, generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize("fetch_limit", [-1, 0, 1])
@pytest.mark.parametrize("slots", [1, 4, 12])
@pytest.mark.parametrize("policy", ["lru", "lru_floor", "frequency"])
def test_outputs_are_those_of_resident_experts(policy, slots, fetch_limit, native):
    layers = banks(2)
    offload = ExpertOffload(layers, slots, make_policy(policy, slots, 2), native, fetch_limit, decode_tokens=4)
    generator = torch.Generator().manual_seed(6)
    for tokens in (1, 3, 40, 2, 1, 17, 4):
        for layer, bank in enumerate(layers):
            x = torch.randn(tokens, HIDDEN, generator=generator)
            ids, weights = reference.route(torch.randn(tokens, E, generator=generator), 2, True)
            got = offload.forward(layer, x, ids, weights)
            want = reference.experts_forward(x, ids, weights, bank.gate_up, bank.down)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
            for slot, owner in enumerate(offload.map.id_of_slot):
                if owner >= 0:
                    source = layers[owner // E]
                    assert torch.equal(offload.pool.gate_up[slot], source.gate_up[owner % E])
                    assert torch.equal(offload.pool.down[slot], source.down[owner % E])


def test_a_prefill_uses_and_then_keeps_what_it_streamed():
    layers = banks(1)
    offload = ExpertOffload(layers, E, make_policy("lru", E, 1), decode_tokens=1)
    x = torch.randn(20, HIDDEN)
    ids, weights = reference.route(torch.randn(20, E), 3, True)
    offload.forward(0, x, ids, weights)
    assert offload.map.misses == len(torch.unique(ids))
    offload.forward(0, x, ids, weights)
    assert offload.map.hits == len(torch.unique(ids))


def test_banks_that_do_not_fit_together_are_refused():
    with pytest.raises(ShapeMismatch, match="not one bank"):
        ExpertBank(torch.zeros(2, 8, 4), torch.zeros(2, 4, 3))
    with pytest.raises(ShapeMismatch, match="differs"):
        check_uniform(
            [ExpertBank(torch.zeros(2, 8, 4), torch.zeros(2, 4, 4)), ExpertBank(torch.zeros(2, 4, 4), torch.zeros(2, 4, 2))]
        )
