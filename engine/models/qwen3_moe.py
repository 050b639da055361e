"""Qwen3-MoE: grouped-query attention with normed heads, every layer (or every nth) a mixture of experts.

Source: Qwen3MoeForCausalLM in transformers (defaults of absent config fields as in Qwen3MoeConfig).
"""

from __future__ import annotations

from engine.attention.base import Attention
from engine.errors import Unsupported
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


def build(config: HfConfig, weights: Weights) -> Decoder:
    """Read every weight. Raises Unsupported for sliding windows, unknown activations and rope kinds; CheckpointError."""
    config.require("hidden_act", "silu", "silu")
    if config.flag("use_sliding_window"):
        raise Unsupported("config.json: use_sliding_window true; sliding-window attention is not supported")
    layers = config.integer("num_hidden_layers", 24)
    hidden = config.integer("hidden_size", 2048)
    vocab = config.integer("vocab_size", 151936)
    heads, kv_heads = config.integer("num_attention_heads", 32), config.integer("num_key_value_heads", 4)
    head_dim = config.integer("head_dim", hidden // heads)
    experts = config.integer("num_experts", config.fields.get("num_local_experts") or 128, at_least=0)
    top_k = config.integer("num_experts_per_tok", 8)
    inter = config.integer("moe_intermediate_size", 768)
    eps, bias = config.number("rms_norm_eps", 1e-6), config.flag("attention_bias")
    dense = config.integers("mlp_only_layers")
    every = config.integer("decoder_sparse_step", 1)
    moe = [experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(layers)]
    config.check_heads(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    config.check_top_k(top_k, experts if any(moe) else top_k)
    rope = rope_table(config.fields, head_dim)

    def attention(i: int) -> Attention:
        name = f"model.layers.{i}.self_attn"
        parts = (("q_proj", heads * head_dim), ("k_proj", kv_heads * head_dim), ("v_proj", kv_heads * head_dim))
        return Attention(
            ordinal=i,
            qkv=load_stacked(weights, name, parts, hidden, bias),
            out=load_linear(weights, f"{name}.o_proj", hidden, heads * head_dim, bias),
            q_norm=load_norm(weights, f"{name}.q_norm", head_dim, eps),
            k_norm=load_norm(weights, f"{name}.k_norm", head_dim, eps),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            gated=False,
        )

    def mlp(i: int) -> Mlp | Moe:
        name = f"model.layers.{i}.mlp"
        if not moe[i]:
            size = config.integer("intermediate_size", 6144)
            gate_up = load_stacked(weights, name, (("gate_proj", size), ("up_proj", size)), hidden)
            return Mlp(gate_up.weight, weights.get(f"{name}.down_proj.weight", hidden, size))
        scores = load_linear(weights, f"{name}.gate", experts, hidden)
        router = Router(scores, experts, top_k, config.flag("norm_topk_prob"), shared_gate=False)
        return Moe(sum(moe[:i]), router, ExpertBank(*weights.experts(f"{name}.experts", experts, inter, hidden)))

    embedding = weights.get("model.embed_tokens.weight", vocab, hidden)
    stack = tuple(
        DecoderLayer(
            mixer_norm=load_norm(weights, f"model.layers.{i}.input_layernorm", hidden, eps),
            mixer=attention(i),
            mlp_norm=load_norm(weights, f"model.layers.{i}.post_attention_layernorm", hidden, eps),
            mlp=mlp(i),
        )
        for i in range(layers)
    )
    norm = load_norm(weights, "model.norm", hidden, eps)
    head = Linear(embedding) if config.flag("tie_word_embeddings") else load_linear(weights, "lm_head", vocab, hidden)
    spec = ModelSpec(
        model_type="qwen3_moe",
        vocab_size=vocab,
        hidden=hidden,
        layers=layer_specs(["attention"] * layers, moe),
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=weights.dtype,
        eos_token_ids=config.eos_token_ids(),
        max_context=config.integer("max_position_embeddings", 32768),
        parameters=weights.parameters,
        experts=experts,
        top_k=top_k,
        numerics={"rope": rope.description, "eps": repr(eps)},
    )
    return Decoder(spec, embedding, stack, norm, head, rope)
