"""What one forward pass is told: flat tokens of several sequences, and where their state lies.

Built by the scheduler, read by runner and models. Holds no policy and no tensors of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class StateCut:
    """Inside a sequence's slice: after `offset` of its tokens (1…length) copy its recurrent state to row `dest_row`."""

    offset: int
    dest_row: int


class Draw(NamedTuple):
    """How the host will choose the token behind a row (sampling.py), for a device that guesses it. temperature 0: the largest
    logit. uniform: the number in [0, 1) that the host will draw with."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


class SeqSlice(NamedTuple):
    """One sequence's part of the flat batch. A tuple, as whatever is made for every row of every step: half the time.

    start, length: its tokens are flat rows [start, start + length).
    context: tokens already in the state; the slice's first token has position `context`.
    page_table: int32 [pages], covering positions 0 … context + length − 1.
    state_row: row of the recurrent pool that is read and advanced (−1 for a pure attention model).
    fresh: context is 0, so the row's old content must be ignored (treated as zeros).
    cuts: where recurrent state is copied on the way; KV needs no copy.
    row_out: row that takes the advanced state while state_row keeps what it has, −1 = state_row is advanced. Only for a single
    token, and for models that look ahead (models/base.Staged).
    draw: how the token behind it will be chosen, None = the largest logit, and nobody looks at the others. For models that look
    ahead.
    """

    start: int
    length: int
    context: int
    page_table: torch.Tensor
    state_row: int
    fresh: bool
    cuts: tuple[StateCut, ...] = ()
    row_out: int = -1
    draw: Draw | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """token_ids, positions: int64 [tokens]. logit_rows: int64 [n] flat rows whose logits are wanted, rising."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    seqs: tuple[SeqSlice, ...]
    logit_rows: torch.Tensor
