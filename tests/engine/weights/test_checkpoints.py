"""Checkpoint directories: every layout in the wild loads to the same model; bad ones are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, EngineError, Unsupported
from engine.kernels import cpu
from engine.models import registry
from engine.weights.fingerprint import Fingerprint
from engine.weights.reader import CheckpointReader
from tests.engine.checkpoints import Lane, load, make, pools, save, step

PROMPT = list(range(3, 40))


def logits(directory: Path) -> torch.Tensor:
    model = load(directory).model
    return step(model, pools(model.spec), [(Lane(range(8), 0), PROMPT)])[0]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def rewrite(directory: Path, content: dict[str, torch.Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in content.items()}, directory / "model.safetensors")


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return save(make("qwen3_moe"), tmp_path)


@pytest.fixture
def qwen3_5(tmp_path: Path) -> Path:
    return save(make("qwen3_5_moe"), tmp_path)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def split_experts(content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in content.items():
        stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        for e in range(tensor.shape[0]) if name.endswith("experts.gate_up_proj") else ():
            out[f"{stem}{e}.gate_proj.weight"], out[f"{stem}{e}.up_proj.weight"] = tensor[e].chunk(2)
        for e in range(tensor.shape[0]) if name.endswith("experts.down_proj") else ():
            out[f"{stem}{e}.down_proj.weight"] = tensor[e]
        if "experts.gate_up_proj" not in name and "experts.down_proj" not in name:
            out[name] = tensor
    return out


def fuse_experts(content: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {n: t for n, t in content.items() if ".mlp.experts." not in n}
    for stem in sorted({n.split(".experts.")[0] + ".experts." for n in content if ".mlp.experts." in n}):
        if stem + "gate_up_proj" in content:
            out[stem + "gate_up_proj"], out[stem + "down_proj"] = content[stem + "gate_up_proj"], content[stem + "down_proj"]
            continue
        count = sum(n.startswith(stem) and n.endswith("gate_proj.weight") for n in content)
        pairs = [[content[f"{stem}{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in range(count)]
        out[stem + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        out[stem + "down_proj"] = torch.stack([content[f"{stem}{e}.down_proj.weight"] for e in range(count)])
    return out


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_moe"])
def test_fused_and_single_experts_load_alike(model_type, tmp_path):
    directory = save(make(model_type), tmp_path)
    want, content = logits(directory), fuse_experts(tensors(directory))
    rewrite(directory, content)
    assert torch.equal(logits(directory), want)
    rewrite(directory, split_experts(content))
    assert torch.equal(logits(directory), want)


def test_shards_load_like_one_file(qwen3, tmp_path_factory):
    sharded = save(make("qwen3_moe"), tmp_path_factory.mktemp("shards"), max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert torch.equal(logits(sharded), logits(qwen3))
    assert load(sharded).weights_digest == load(qwen3).weights_digest


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "language_model."])
def test_the_text_part_of_a_multimodal_checkpoint_is_found(qwen3_5, prefix):
    want, content = logits(qwen3_5), {}
    for name, tensor in tensors(qwen3_5).items():
        bare = name.removeprefix("model.").removeprefix("language_model.")
        content[name if name.startswith("lm_head") else prefix + bare] = tensor
    content["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(4, 4, dtype=torch.float16)
    content["mtp.layers.0.input_layernorm.weight"] = torch.zeros(4)
    rewrite(qwen3_5, content)
    text = json.loads((qwen3_5 / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 1}, "eos_token_id": [5, 6]}
    (qwen3_5 / "config.json").write_text(json.dumps(outer))
    assert torch.equal(logits(qwen3_5), want)
    assert load(qwen3_5).model.spec.eos_token_ids == (5, 6)


def test_generation_config_overrides_the_end_tokens(qwen3):
    (qwen3 / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load(qwen3).model.spec.eos_token_ids == (7, 9)


def test_the_digest_follows_names_and_bytes(qwen3):
    before = load(qwen3).weights_digest
    content = tensors(qwen3)
    name = "model.layers.1.self_attn.q_norm.weight"
    rewrite(qwen3, {**content, name: content[name] + 1})
    assert load(qwen3).weights_digest != before
    one, two = Fingerprint(), Fingerprint()
    raw = bytes(range(16))
    one.add("a", "F32", (2,), raw)
    one.add("b", "F32", (2,), raw)
    two.add("b", "F32", (2,), raw)
    two.add("a", "F32", (2,), raw)
    assert one.hexdigest() == two.hexdigest()
    two.add("c", "F32", (2,), raw)
    assert one.hexdigest() != two.hexdigest()


def test_large_tensors_are_views_of_the_mapped_file(qwen3):
    reader = CheckpointReader(qwen3)
    name = next(n for n in reader.names() if n.endswith("lm_head.weight"))
    assert reader.tensor(name).untyped_storage().data_ptr() == reader.raw(name).untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", ["fused", "single"])
def test_huge_pages_are_asked_for_before_weights_are_read(qwen3, layout, monkeypatch):
    if layout == "fused":
        rewrite(qwen3, fuse_experts(tensors(qwen3)))
    happened: list[object] = []
    read = CheckpointReader.raw

    def raw(self: CheckpointReader, name: str) -> torch.Tensor:
        happened.append(name)
        return read(self, name)

    monkeypatch.setattr(CheckpointReader, "raw", raw)
    monkeypatch.setattr(cpu, "advise_huge", lambda tensor: happened.append(tuple(tensor.shape)))
    load(qwen3, backend="cpu")
    assert happened[0] == ((qwen3 / "model.safetensors").stat().st_size,)
    banks = [(8, 64, 64), (8, 64, 32)] * 2 if layout == "single" else []  # two layers have experts
    assert [entry for entry in happened[1:] if isinstance(entry, tuple)] == banks


def test_memory_in_huge_pages_is_memory():
    for shape, dtype in (((3, 5), torch.float32), ((1100, 1000, 2), torch.bfloat16)):
        tensor = cpu.huge_empty(*shape, dtype=dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        tensor.fill_(2)
        assert float(tensor.sum(dtype=torch.float64)) == 2 * tensor.numel()


def refused(directory: Path, kind: type[EngineError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load(directory)
    return str(caught.value)


def test_a_missing_tensor_is_named(qwen3):
    content = tensors(qwen3)
    del content["model.layers.2.self_attn.o_proj.weight"]
    rewrite(qwen3, content)
    assert "model.layers.2.self_attn.o_proj.weight' is missing" in refused(qwen3)


def test_missing_experts_are_named(qwen3):
    rewrite(qwen3, {n: t for n, t in tensors(qwen3).items() if "layers.0.mlp.experts" not in n})
    assert "model.layers.0.mlp.experts.gate_up_proj is missing" in refused(qwen3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_wrong_dtype_names_the_tensor_and_what_is_accepted(qwen3, dtype):
    content = tensors(qwen3)
    content["model.norm.weight"] = content["model.norm.weight"].to(dtype)
    rewrite(qwen3, content)
    message = refused(qwen3)
    assert "model.norm.weight" in message
    assert "accepted: BF16, F32" in message


def test_a_wrong_shape_names_both(qwen3):
    content = tensors(qwen3)
    content["lm_head.weight"] = content["lm_head.weight"][:-1]
    rewrite(qwen3, content)
    message = refused(qwen3)
    assert "lm_head.weight" in message
    assert "[96, 64]" in message
    assert "[97, 64]" in message


def test_an_unknown_architecture_lists_the_known_ones(qwen3):
    edit_config(qwen3, model_type="llama")
    message = refused(qwen3)
    assert "'llama'" in message
    assert all(name in message for name in registry.MODELS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sliding_window": True}, "sliding"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_is_not_built_is_refused_by_name(qwen3, changes, reason):
    edit_config(qwen3, **changes)
    assert reason in refused(qwen3, Unsupported)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": "three"},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"num_experts_per_tok": 9},
        {"rms_norm_eps": "small"},
    ],
)
def test_a_bad_config_field_is_named(qwen3, changes):
    edit_config(qwen3, **changes)
    assert next(iter(changes)) in refused(qwen3)


def test_a_directory_without_config_or_weights_says_which(tmp_path):
    assert "config.json is missing" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "JSON object" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "never loaded" in refused(tmp_path)
    rewrite(tmp_path, {})
    assert "no tensors" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 700, 0.5, -1])
def test_a_truncated_file_is_refused(qwen3, keep):
    path = qwen3 / "model.safetensors"
    data = path.read_bytes()
    cut = int(len(data) * keep) if isinstance(keep, float) else keep
    path.write_bytes(data[:cut])
    assert "truncated" in refused(qwen3)


def test_a_missing_shard_is_named(tmp_path):
    directory = save(make("qwen3_moe"), tmp_path, max_shard_size="200KB")
    victim = sorted(directory.glob("*.safetensors"))[1]
    victim.unlink()
    assert victim.name in refused(directory)


@pytest.mark.parametrize(
    "header", [b"{]", b"[]", b'{"a": {"dtype": "F32"}}', b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,4]}}']
)
def test_a_malformed_header_is_refused(qwen3, header):
    (qwen3 / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    assert "model.safetensors" in refused(qwen3)


def test_an_index_may_not_point_out_of_its_directory(qwen3):
    (qwen3 / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "not a plain file name" in refused(qwen3)
