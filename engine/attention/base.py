"""What an attention layer holds, and where its part of a batch lies in the paged pools."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer's weights.

    qkv: queries, keys, values of the same input in one matrix. With `gated`, each head's query is followed by its gate
    (2 · head_dim rows a head). ordinal: index into the KV pools.
    """

    ordinal: int
    qkv: Linear
    out: Linear
    q_norm: RmsNorm
    k_norm: RmsNorm
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def kv_slots(batch: ForwardBatch, page_size: int) -> torch.Tensor:
    """Pool position (page · page_size + offset) of each token of the batch, int64 [tokens]."""
    slots = torch.empty(len(batch.token_ids), dtype=torch.int64)
    for seq in batch.seqs:
        positions = torch.arange(seq.context, seq.context + seq.length)
        pages = seq.page_table[positions // page_size].long()
        slots[seq.start : seq.start + seq.length] = pages * page_size + positions % page_size
    return slots
