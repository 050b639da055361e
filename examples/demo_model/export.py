"""Stacked training parameters ↔ a transformers checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from examples.demo_model.config import Shape
from examples.demo_model.model import Params, parameter_shapes

DELTA = {
    "qkv": "in_proj_qkv.weight", "z": "in_proj_z.weight", "b": "in_proj_b.weight", "a": "in_proj_a.weight",
    "conv": "conv1d.weight", "dt_bias": "dt_bias", "A_log": "A_log", "delta_norm": "norm.weight", "delta_out": "out_proj.weight",
}  # fmt: skip
ATTENTION = {name: f"{name}_proj.weight" for name in ("q", "k", "v", "o")} | {
    name: f"{name}.weight" for name in ("q_norm", "k_norm")
}
EVERY = {
    "norm_in": "input_layernorm.weight", "norm_post": "post_attention_layernorm.weight", "router": "mlp.gate.weight",
    "shared_gate": "mlp.shared_expert.gate_proj.weight", "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight", "shared_scale": "mlp.shared_expert_gate.weight",
}  # fmt: skip


def to_hf(params: Params, shape: Shape) -> dict[str, Tensor]:
    """Checkpoint tensors by name, experts one by one, as transformers writes them."""
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    attention = delta = 0
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        for name, target in EVERY.items():
            tensors[prefix + target] = params[name][i]
        if shape.is_attention(i):
            tensors |= {f"{prefix}self_attn.{target}": params[name][attention] for name, target in ATTENTION.items()}
            attention += 1
        else:
            for name, target in DELTA.items():
                value = params[name][delta]
                tensors[f"{prefix}linear_attn.{target}"] = value.unsqueeze(1) if name == "conv" else value
            delta += 1
        for e in range(shape.experts):
            gate, up = params["gate_up"][i, e].chunk(2, dim=0)
            expert = f"{prefix}mlp.experts.{e}."
            tensors |= {expert + "gate_proj.weight": gate, expert + "up_proj.weight": up}
            tensors[expert + "down_proj.weight"] = params["down"][i, e]
    return tensors


def from_hf(tensors: dict[str, Tensor], shape: Shape) -> Params:
    """The inverse of to_hf, in f32. Raises KeyError naming a missing tensor."""
    attention_layers = [i for i in range(shape.layers) if shape.is_attention(i)]
    delta_layers = [i for i in range(shape.layers) if not shape.is_attention(i)]
    layer = lambda i, name: tensors[f"model.layers.{i}.{name}"].float()  # noqa: E731
    params = {
        "embed": tensors["model.embed_tokens.weight"].float(),
        "final_norm": tensors["model.norm.weight"].float(),
    }
    for name, target in EVERY.items():
        params[name] = torch.stack([layer(i, target) for i in range(shape.layers)])
    for name, target in ATTENTION.items():
        params[name] = torch.stack([layer(i, "self_attn." + target) for i in attention_layers])
    for name, target in DELTA.items():
        params[name] = torch.stack([layer(i, "linear_attn." + target) for i in delta_layers])
    params["conv"] = params["conv"].squeeze(2)

    def experts(kind: str) -> Tensor:
        return torch.stack(
            [
                torch.stack([layer(i, f"mlp.experts.{e}.{kind}_proj.weight") for e in range(shape.experts)])
                for i in range(shape.layers)
            ]
        )

    params["gate_up"] = torch.cat([experts("gate"), experts("up")], dim=2)
    params["down"] = experts("down")
    return {name: params[name] for name in parameter_shapes(shape)}


def load_start(folder: Path, shape: Shape) -> Params:
    """Weights in f32 to go on from: the f32 files of an earlier run, else a checkpoint. Raises FileNotFoundError if there are neither."""
    from safetensors.torch import load_file

    if parts := sorted(folder.glob("master-*.safetensors")):
        return {name: value for part in parts for name, value in load_file(part).items()}
    return from_hf(load_file(folder / "model.safetensors"), shape)


def save_weights(params: Params, shape: Shape, folder: Path, name: str = "model.safetensors") -> None:
    """Write the weights in bf16."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: value.detach().to("cpu", torch.bfloat16).contiguous().clone() for key, value in to_hf(params, shape).items()
    }
    save_file(tensors, str(folder / name), metadata={"format": "pt"})


def save_config(shape: Shape, folder: Path, pad: int, end: int) -> None:
    """Write config.json and generation_config.json. pad, end: token ids."""
    import json

    config = shape.hf_config()
    config.pad_token_id, config.eos_token_id, config.dtype = pad, end, torch.bfloat16
    config.architectures = ["Qwen3_5MoeForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    config.to_json_file(str(folder / "config.json"), use_diff=False)
    generation = {"do_sample": False, "eos_token_id": end, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
