"""Every registered architecture against transformers: same weights, same tokens, f32 to 1e-4, bf16 to its rounding."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from engine.kernels import cpu
from engine.models import registry
from tests.engine.checkpoints import MAKERS, Lane, load, make, pools, save, step

TYPES = sorted(registry.MODELS)
BACKENDS = ["cpu", "torch", "reference", "exact"]
PAGES = [3, 9, 1, 7, 5, 11, 2, 13]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """model_type → (directory, prompt, transformers' logits over it, its next 12 greedy tokens)."""
    made = {}

    def get(model_type: str):
        if model_type not in made:
            model = make(model_type)
            directory = save(model, tmp_path_factory.mktemp(model_type))
            prompt = torch.randint(0, 97, (75,), generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                logits = model(prompt[None]).logits[0]
                tokens = prompt[None]
                for _ in range(12):
                    tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
            made[model_type] = directory, prompt.tolist(), logits, tokens[0, 75:].tolist()
        return made[model_type]

    return get


@pytest.fixture
def run_on(monkeypatch):
    """load() by the name of a backend; "torch" is the fast one on a machine without the C++ library."""

    def get(directory: Path, name: str, **options):
        if name == "torch":
            monkeypatch.setattr(cpu, "available", lambda: False)
        elif name in ("cpu", "exact") and not cpu.available():
            pytest.skip("needs the C++ library")
        return load(directory, backend=name if name in ("reference", "exact") else "cpu", **options)

    return get


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    return ((got - want).abs().max() / want.abs().max()).item() <= tolerance


def test_every_registered_architecture_has_a_golden_checkpoint():
    assert set(MAKERS) == set(registry.MODELS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", TYPES)
def test_whole_prefill_gives_the_logits_of_transformers(golden, run_on, model_type, backend):
    directory, prompt, want, _ = golden(model_type)
    model = run_on(directory, backend).model
    (got,) = step(model, pools(model.spec), [(Lane(PAGES, 1), prompt)])
    assert close(got, want, 1e-4)


@pytest.mark.parametrize(("backend", "slots"), [*itertools.product(BACKENDS[:3], [None, 3, 11]), ("exact", None)])
@pytest.mark.parametrize("model_type", TYPES)
def test_chunked_prefill_and_decode_give_the_same_greedy_tokens(golden, run_on, model_type, backend, slots):
    directory, prompt, want, greedy = golden(model_type)
    loaded = run_on(directory, backend, slots=slots or "auto")
    model, state, lane = loaded.model, pools(loaded.model.spec), Lane(PAGES, 2)
    parts = [step(model, state, [(lane, prompt[a:b])])[0] for a, b in ((0, 32), (32, 33), (33, 70), (70, 75))]
    assert close(torch.cat(parts), want, 1e-4)
    tokens = [int(parts[-1][-1].argmax())]
    while len(tokens) < 12:
        tokens.append(int(step(model, state, [(lane, tokens[-1:])])[0][-1].argmax()))
    assert tokens == greedy
    if slots:
        assert loaded.slots is not None
        assert loaded.slots.misses > slots
        assert loaded.slots.hits > 0 or slots == 3  # one slot a layer, two experts a token: LRU can only cycle


@pytest.mark.parametrize("model_type", TYPES)
def test_batched_sequences_do_not_touch_each_other(golden, model_type):
    directory, prompt, _, _ = golden(model_type)
    model = load(directory).model
    alone = [step(model, pools(model.spec), [(Lane(PAGES, 0), part)])[0] for part in (prompt[:37], prompt[20:71])]
    state, one, two = pools(model.spec), Lane(PAGES[:4], 1), Lane(PAGES[4:], 3)
    first = step(model, state, [(one, prompt[:36]), (two, prompt[20:70])])
    last = step(model, state, [(one, prompt[36:37]), (two, prompt[70:71])])
    for index in range(2):
        assert close(torch.cat([first[index], last[index]]), alone[index], 1e-4)


@pytest.mark.parametrize("model_type", TYPES)
def test_bf16_stays_within_its_rounding_of_f32(model_type, tmp_path: Path):
    model = make(model_type, dtype=torch.bfloat16)
    save(model, tmp_path)
    prompt = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        exact = model.float()(prompt[None]).logits[0]
        rounded = model.bfloat16()(prompt[None]).logits[0].float()
    fast = load(tmp_path).model
    assert fast.spec.dtype == torch.bfloat16
    (got,) = step(fast, pools(fast.spec), [(Lane(PAGES, 0), prompt.tolist())])
    scale = exact.abs().max()
    ours, theirs = (got - exact).abs().mean() / scale, (rounded - exact).abs().mean() / scale
    assert ours <= max(1.5 * theirs, 0.01), (ours, theirs)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        (
            "qwen3_moe",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e6,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("qwen3_5_moe", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3_5_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}}),
        ("qwen3_5_moe", {"linear_conv_kernel_dim": 3, "linear_num_key_heads": 4}),
    ],
)
def test_options_of_the_config_mean_the_same(model_type, changes, tmp_path: Path):
    model = make(model_type, **changes)
    save(model, tmp_path)
    prompt = torch.randint(0, 97, (90,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = model(prompt[None]).logits[0]
    ours = load(tmp_path).model
    (got,) = step(ours, pools(ours.spec), [(Lane(PAGES, 0), prompt.tolist())])
    assert close(got, want, 1e-4)


def test_the_text_part_of_a_real_multimodal_checkpoint(tmp_path: Path):
    text = make("qwen3_5_moe").config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
    torch.manual_seed(0)
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision)).eval()
    save(model, tmp_path)
    prompt = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        want = model(input_ids=prompt[None]).logits[0]
    loaded = load(tmp_path)
    (got,) = step(loaded.model, pools(loaded.model.spec), [(Lane(PAGES, 0), prompt.tolist())])
    assert close(got, want, 1e-4)
    assert loaded.model.spec.parameters < sum(p.numel() for p in model.parameters())
