"""The demo model's shape, in one place. Sizes are counts; see README.md for why they are what they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 8
    attention_every: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_share: float = 0.25
    theta: float = 10000.0
    key_heads: int = 4
    value_heads: int = 8
    delta_dim: int = 32  # of keys and of values
    conv: int = 4
    experts: int = 16
    top_k: int = 2
    expert_width: int = 64
    shared_width: int = 64
    eps: float = 1e-6
    positions: int = 32768

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0

    def hf_config(self):
        """The transformers configuration of this shape."""
        from transformers import Qwen3_5MoeTextConfig

        return Qwen3_5MoeTextConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, max_position_embeddings=self.positions,
            rms_norm_eps=self.eps, tie_word_embeddings=True, linear_conv_kernel_dim=self.conv, linear_key_head_dim=self.delta_dim,
            linear_value_head_dim=self.delta_dim, linear_num_key_heads=self.key_heads, linear_num_value_heads=self.value_heads,
            moe_intermediate_size=self.expert_width, shared_expert_intermediate_size=self.shared_width,
            num_experts_per_tok=self.top_k, num_experts=self.experts,
            layer_types=["full_attention" if self.is_attention(i) else "linear_attention" for i in range(self.layers)],
            router_aux_loss_coef=0.0001,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta, "partial_rotary_factor": self.rotary_share,
                             "mrope_section": [3, 3, 2], "mrope_interleaved": True},
        )  # fmt: skip
