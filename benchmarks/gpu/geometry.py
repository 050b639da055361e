"""The shape of the benchmarks' model: Qwen3.6-35B-A3B with half of its layers, and a tiny one of the same kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """states: tokens of the programmed trace; at most `hidden`. Every fourth layer is gated attention, others gated delta."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    k_heads: int
    v_heads: int
    d_k: int
    d_v: int
    conv_kernel: int
    experts: int
    top_k: int
    inter: int
    shared_inter: int
    states: int
    max_context: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.k_heads * self.d_k + self.v_heads * self.d_v

    @property
    def record_bytes(self) -> int:
        """Of one bf16 expert."""
        return 3 * self.hidden * self.inter * 2

    @property
    def bank_bytes(self) -> int:
        return self.layers * self.experts * self.record_bytes

    def kinds(self) -> list[str]:
        return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(self.layers)]

    def config(self) -> dict[str, Any]:
        """config.json as transformers writes it for this architecture."""
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": self.kinds(),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "linear_num_key_heads": self.k_heads,
            "linear_num_value_heads": self.v_heads,
            "linear_key_head_dim": self.d_k,
            "linear_value_head_dim": self.d_v,
            "linear_conv_kernel_dim": self.conv_kernel,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.inter,
            "shared_expert_intermediate_size": self.shared_inter,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.max_context,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        }

    def described(self) -> dict[str, int]:
        return asdict(self)


HALF_QWEN36 = Shape(
    layers=20,
    hidden=2048,
    vocab=248320,
    heads=16,
    kv_heads=2,
    head_dim=256,
    k_heads=16,
    v_heads=32,
    d_k=128,
    d_v=128,
    conv_kernel=4,
    experts=256,
    top_k=8,
    inter=512,
    shared_inter=512,
    states=2048,
    max_context=262144,
)
TINY = Shape(
    layers=4,
    hidden=64,
    vocab=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    k_heads=2,
    v_heads=4,
    d_k=16,
    d_v=16,
    conv_kernel=4,
    experts=8,
    top_k=2,
    inter=32,
    shared_inter=32,
    states=48,
    max_context=4096,
)
