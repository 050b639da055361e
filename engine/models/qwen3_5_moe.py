"""Qwen3.5-MoE and Qwen3.6-MoE: gated delta net in most layers, gated attention in every fourth, experts plus a shared
one in all.

Also the text part of the multimodal checkpoints; their vision tower and multi-token-prediction layers are not read.
Norm weights are stored minus one, but for the delta net's gated norm. Attention rotates a quarter of each head.
Source: Qwen3_5MoeForCausalLM in transformers (defaults of absent config fields as in Qwen3_5MoeTextConfig).
"""

from __future__ import annotations

import torch

from engine.attention.base import Attention
from engine.errors import CheckpointError
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import Linear, load_linear, load_stacked
from engine.layers.norm import load_norm
from engine.layers.rope import rope_table
from engine.models.base import ModelSpec
from engine.models.decoder import Decoder, DecoderLayer, layer_specs
from engine.models.hf_config import HfConfig
from engine.moe.banks import ExpertBank
from engine.moe.layer import Mlp, Moe
from engine.moe.router import Router
from engine.weights.loader import Weights

_KINDS = {"linear_attention": "delta", "full_attention": "attention"}


def build(config: HfConfig, weights: Weights) -> Decoder:
    """Read every weight. Raises Unsupported for unknown activations and rope kinds; CheckpointError."""
    config.require("hidden_act", "silu", "silu")
    layers = config.integer("num_hidden_layers", 40)
    hidden = config.integer("hidden_size", 2048)
    vocab = config.integer("vocab_size", 248320)
    heads, kv_heads = config.integer("num_attention_heads", 16), config.integer("num_key_value_heads", 2)
    head_dim = config.integer("head_dim", 256)
    k_heads, v_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    d_k, d_v = config.integer("linear_key_head_dim", 128), config.integer("linear_value_head_dim", 128)
    kernel = config.integer("linear_conv_kernel_dim", 4, at_least=2)
    experts, top_k = config.integer("num_experts", 256), config.integer("num_experts_per_tok", 8)
    inter, shared_inter = config.integer("moe_intermediate_size", 512), config.integer("shared_expert_intermediate_size", 512)
    eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("attention_bias")
    specs = layer_specs(_layer_kinds(config, layers), [True] * layers)
    config.check_heads(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    config.check_heads(v_heads, k_heads, "linear_num_value_heads", "linear_num_key_heads")
    config.check_top_k(top_k, experts)
    rope = rope_table(config.fields, head_dim, partial_default=0.25)

    def attention(i: int) -> Attention:
        name = f"model.layers.{i}.self_attn"
        parts = (("q_proj", 2 * heads * head_dim), ("k_proj", kv_heads * head_dim), ("v_proj", kv_heads * head_dim))
        return Attention(
            ordinal=specs[i].ordinal,
            qkv=load_stacked(weights, name, parts, hidden, bias),
            out=load_linear(weights, f"{name}.o_proj", hidden, heads * head_dim, bias),
            q_norm=load_norm(weights, f"{name}.q_norm", head_dim, eps, zero_centred=True),
            k_norm=load_norm(weights, f"{name}.k_norm", head_dim, eps, zero_centred=True),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            gated=True,
        )

    def delta(i: int) -> GatedDelta:
        name = f"model.layers.{i}.linear_attn"
        conv_dim = 2 * k_heads * d_k + v_heads * d_v
        parts = (("in_proj_qkv", conv_dim), ("in_proj_z", v_heads * d_v), ("in_proj_b", v_heads), ("in_proj_a", v_heads))
        return GatedDelta(
            ordinal=specs[i].ordinal,
            project=load_stacked(weights, name, parts, hidden),
            out=load_linear(weights, f"{name}.out_proj", hidden, v_heads * d_v),
            conv=weights.get(f"{name}.conv1d.weight", conv_dim, 1, kernel).squeeze(1),
            a_log=weights.get(f"{name}.A_log", v_heads, dtype=torch.float32),
            dt_bias=weights.get(f"{name}.dt_bias", v_heads, dtype=torch.float32),
            norm=load_norm(weights, f"{name}.norm", d_v, eps),
            k_heads=k_heads,
            v_heads=v_heads,
            d_k=d_k,
            d_v=d_v,
        )

    def moe(i: int) -> Moe:
        name = f"model.layers.{i}.mlp"
        scores = torch.cat(
            [weights.get(f"{name}.gate.weight", experts, hidden), weights.get(f"{name}.shared_expert_gate.weight", 1, hidden)]
        )
        parts = (("gate_proj", shared_inter), ("up_proj", shared_inter))
        gate_up = load_stacked(weights, f"{name}.shared_expert", parts, hidden)
        return Moe(
            ordinal=i,
            router=Router(Linear(scores), experts, top_k, normalize=True, shared_gate=True),
            bank=ExpertBank(*weights.experts(f"{name}.experts", experts, inter, hidden)),
            shared=Mlp(gate_up.weight, weights.get(f"{name}.shared_expert.down_proj.weight", hidden, shared_inter)),
        )

    embedding = weights.get("model.embed_tokens.weight", vocab, hidden)
    stack = tuple(
        DecoderLayer(
            mixer_norm=load_norm(weights, f"model.layers.{i}.input_layernorm", hidden, eps, zero_centred=True),
            mixer=attention(i) if specs[i].kind == "attention" else delta(i),
            mlp_norm=load_norm(weights, f"model.layers.{i}.post_attention_layernorm", hidden, eps, zero_centred=True),
            mlp=moe(i),
        )
        for i in range(layers)
    )
    norm = load_norm(weights, "model.norm", hidden, eps, zero_centred=True)
    head = Linear(embedding) if config.flag("tie_word_embeddings") else load_linear(weights, "lm_head", vocab, hidden)
    spec = ModelSpec(
        model_type="qwen3_5_moe",
        vocab_size=vocab,
        hidden=hidden,
        layers=specs,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=weights.dtype,
        eos_token_ids=config.eos_token_ids(),
        max_context=config.integer("max_position_embeddings", 32768),
        parameters=weights.parameters,
        experts=experts,
        top_k=top_k,
        H_v=v_heads,
        d_k=d_k,
        d_v=d_v,
        conv_dim=2 * k_heads * d_k + v_heads * d_v,
        conv_kernel=kernel,
        numerics={"rope": rope.description, "eps": repr(eps)},
    )
    return Decoder(spec, embedding, stack, norm, head, rope)


def _layer_kinds(config: HfConfig, layers: int) -> list[str]:
    """From layer_types, or full attention in every full_attention_interval-th layer."""
    types = config.fields.get("layer_types")
    if types is None:
        every = config.integer("full_attention_interval", 4)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    unknown = [t for t in types if t not in _KINDS]
    if unknown:
        raise CheckpointError(f"config.json: layer_types has {unknown[0]!r}, accepted: {', '.join(_KINDS)}")
    if len(types) != layers:
        raise CheckpointError(f"config.json: layer_types has {len(types)} entries, num_hidden_layers is {layers}")
    return [_KINDS[t] for t in types]
