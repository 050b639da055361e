"""The training forward against transformers, and the delta operators against plain recurrences."""

import pytest
import torch

from examples.demo_model.config import Shape
from examples.demo_model.delta import CHUNK, scan, scan_plain, unit_inverse
from examples.demo_model.export import from_hf, load_start, save_weights, to_hf
from examples.demo_model.model import Forward, initial
from examples.demo_model.train import save_master

SMALL = Shape(vocabulary=97, hidden=32, layers=4, heads=2, kv_heads=1, head_dim=16, key_heads=2, value_heads=4,
              delta_dim=8, experts=4, expert_width=16, shared_width=16)  # fmt: skip


def hf_model(params, shape):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(shape.hf_config(), attn_implementation="eager")
    fused = {}
    for name, value in to_hf(params, shape).items():
        if ".experts." not in name:
            fused[name] = value
    for i in range(shape.layers):
        fused[f"model.layers.{i}.mlp.experts.gate_up_proj"] = params["gate_up"][i]
        fused[f"model.layers.{i}.mlp.experts.down_proj"] = params["down"][i]
    fused["lm_head.weight"] = params["embed"]
    model.load_state_dict({name: value.detach() for name, value in fused.items()})
    return model.eval()


def test_loss_equals_the_loss_of_transformers():
    params = initial(SMALL, seed=3, device="cpu")
    length = 3 * CHUNK
    ids = torch.randint(0, SMALL.vocabulary, (2 * length,), generator=torch.Generator().manual_seed(1))
    loss, _ = Forward(SMALL).loss(params, ids, torch.ones(ids.shape), length, torch.float32)
    rows = ids.reshape(2, length)
    with torch.no_grad():
        logits = hf_model(params, SMALL)(input_ids=rows, use_cache=False).logits
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_names_go_to_transformers_and_back():
    params = initial(SMALL, seed=5, device="cpu")
    again = from_hf(to_hf(params, SMALL), SMALL)
    assert all(torch.equal(params[name], again[name]) for name in params)


def test_training_goes_on_from_a_checkpoint_or_from_f32_weights(tmp_path):
    params = initial(SMALL, seed=5, device="cpu")
    save_weights(params, SMALL, tmp_path)
    rounded = load_start(tmp_path, SMALL)
    assert all(torch.equal(params[name].bfloat16().float(), rounded[name]) for name in params)
    save_master(params, tmp_path)
    exact = load_start(tmp_path, SMALL)
    assert all(torch.equal(params[name], exact[name]) for name in params)


def test_scan_and_its_gradient_equal_the_plain_recurrence():
    generator = torch.Generator().manual_seed(2)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.3).requires_grad_()

    tensors = [make(6, 2, 8, 4) for _ in range(4)] + [make(6, 2, 8, 8), make(6, 2)]
    out, _ = scan(*tensors, 3)
    want = scan_plain(*tensors, 3)
    torch.testing.assert_close(out, want)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad((out * weight).sum(), tensors)
    for mine, plain in zip(got, torch.autograd.grad((want * weight).sum(), tensors), strict=True):
        torch.testing.assert_close(mine, plain)


def test_unit_inverse_and_its_gradient():
    lower = torch.randn(3, 8, 8, dtype=torch.float64).tril(-1).requires_grad_()
    torch.testing.assert_close(unit_inverse(lower) @ (torch.eye(8) + lower), torch.eye(8, dtype=torch.float64).expand(3, 8, 8))
    assert torch.autograd.gradcheck(lambda x: unit_inverse(x.tril(-1)), (lower,))
