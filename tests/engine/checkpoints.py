"""Tiny seeded checkpoints of each registered architecture, made with transformers, and the pools to run them in.

transformers is imported where one is made: it takes seconds, and all tests are collected in each process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.batch import ForwardBatch, SeqSlice, StateCut
from engine.config import EngineConfig
from engine.models.base import Model, ModelSpec
from engine.runner import LoadedModel, load_model

VOCAB = 97


def qwen3_moe(**changes: Any) -> Any:
    """Two MoE layers around a dense one."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "max_position_embeddings": 512,
    }
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**fields, **changes}))


def qwen3_5_moe(**changes: Any) -> Any:
    """One attention layer among two delta layers."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
    }
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**fields, **changes}))


# One maker for each registered model_type; the contract test fails if one is missing.
MAKERS: dict[str, Callable[..., Any]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
}


def make(model_type: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model with every parameter random, so that none is left at a value that hides a mistake."""
    torch.manual_seed(seed)
    model = MAKERS[model_type](**changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


@dataclass
class Pools:
    """KV and recurrent pools filled with NaN, so that reading what was never written shows."""

    page_size: int
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    delta: list[torch.Tensor]
    conv: list[torch.Tensor]


def pools(spec: ModelSpec, pages: int = 32, page_size: int = 16, rows: int = 8) -> Pools:
    def filled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    kv = [
        filled(pages, page_size, spec.kv_heads, spec.head_dim, dtype=spec.dtype) for _ in range(2 * len(spec.attention_layers))
    ]
    deltas = spec.delta_layers
    return Pools(
        page_size,
        kv[::2],
        kv[1::2],
        [filled(rows, spec.H_v, spec.d_k, spec.d_v, dtype=torch.float32) for _ in deltas],
        [filled(rows, spec.conv_dim, spec.conv_kernel - 1, dtype=spec.dtype) for _ in deltas],
    )


@dataclass
class Lane:
    """One sequence in the pools: its pages (deliberately out of order), its row, and how far it has come."""

    pages: Sequence[int]
    row: int
    context: int = 0


def step(
    model: Model, state: Pools, work: Sequence[tuple[Lane, Sequence[int]]], cuts: Sequence[Sequence[StateCut]] = ()
) -> list[torch.Tensor]:
    """Feed tokens to lanes in one batch. Returns each lane's logits for all its tokens, [tokens, vocab]."""
    slices, ids, positions = [], [], []
    for index, (lane, tokens) in enumerate(work):
        table = torch.tensor(lane.pages, dtype=torch.int32)
        own = tuple(cuts[index]) if cuts else ()
        slices.append(SeqSlice(len(ids), len(tokens), lane.context, table, lane.row, lane.context == 0, own))
        positions += range(lane.context, lane.context + len(tokens))
        ids += tokens
        lane.context += len(tokens)
    batch = ForwardBatch(torch.tensor(ids), torch.tensor(positions), tuple(slices), torch.arange(len(ids)))
    logits = model.forward(batch, state, state).rows.clone()  # the next step may write them again
    return [logits[s.start : s.start + s.length] for s in slices]


def load(directory: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model_dir=directory, **{"threads": 1, **options}))
