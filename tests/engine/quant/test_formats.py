"""The contract of weight formats, over the live registry."""

from __future__ import annotations

import pytest
import torch

from engine.errors import CheckpointError, Unsupported
from engine.kernels import reference
from engine.moe.banks import ExpertBank
from engine.moe.cpu_executor import CpuExecutor
from engine.quant import registry
from engine.quant.base import record_bytes

HIDDEN, INTER, EXPERTS = 64, 32, 4


def banks(form) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], ExpertBank]:
    """Packed gate_up and down, and the same experts in f32."""
    generator = torch.Generator().manual_seed(7)
    gate_up = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=generator) / 8
    down = torch.randn(EXPERTS, HIDDEN, INTER, generator=generator) / 8
    return dict(form.pack(gate_up)), dict(form.pack(down)), ExpertBank(gate_up, down)


@pytest.mark.parametrize("name", sorted(registry.FORMATS))
def test_unpacking_gives_back_what_was_packed(name):
    form = registry.get(name)
    assert form.name == name
    assert form.stored
    gate_up, _, exact = banks(form)
    again = form.unpack(gate_up)
    assert again.dtype == torch.float32
    assert again.shape == exact.gate_up.shape
    assert (again - exact.gate_up).abs().max() <= 4 * form.tolerance * exact.gate_up.abs().max()
    assert torch.equal(form.unpack(form.pack(again)), again)


@pytest.mark.parametrize("name", sorted(registry.FORMATS))
def test_a_record_has_the_bytes_that_the_format_claims(name):
    form = registry.get(name)
    gate_up, down, _ = banks(form)
    total = sum(t.numel() * t.element_size() for t in (*gate_up.values(), *down.values()))
    assert total == EXPERTS * record_bytes(form, HIDDEN, INTER)


@pytest.mark.parametrize("name", sorted(registry.FORMATS))
def test_experts_stay_within_the_stated_tolerance(name):
    form = registry.get(name)
    gate_up, down, exact = banks(form)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(8))
    ids, weights = reference.route(torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(9)), 2, True)
    want = reference.experts_forward(x, ids, weights, exact.gate_up, exact.down)
    packed = ExpertBank(gate_up["weight"], down["weight"])
    for got in (
        CpuExecutor(packed).forward(x.to(form.dtype), ids, weights),
        reference.experts_forward(x.to(form.dtype), ids, weights, packed.gate_up, packed.down),
    ):
        assert (got - want).abs().mean() <= form.tolerance * want.abs().max()


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(Unsupported, match=r"bf16, f32"):
        registry.get("mxfp4")
    with pytest.raises(CheckpointError, match="F16"):
        registry.choose({}, "F16", "auto")
    with pytest.raises(Unsupported, match=r"awq.*bf16, f32"):
        registry.choose({"quantization_config": {"quant_method": "awq"}}, "BF16", "auto")
