"""Host banks: every routed expert of every MoE layer, authoritative. Slots hold copies; losing one loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import ShapeMismatch


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """Some experts, one row each; a row of all tensors together is one expert's record.

    gate_up: [rows, 2 · inter, hidden], gate above up. down: [rows, hidden, inter]. Both contiguous, possibly views of a
        mapped file.
    """

    gate_up: torch.Tensor
    down: torch.Tensor

    def __post_init__(self) -> None:
        rows, twice, hidden = self.gate_up.shape
        if self.down.shape != (rows, hidden, twice // 2) or twice % 2:
            raise ShapeMismatch(f"gate_up {list(self.gate_up.shape)} and down {list(self.down.shape)} are not one bank")

    @property
    def rows(self) -> int:
        return self.gate_up.shape[0]

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert, all tensors."""
        return (self.gate_up[0].numel() + self.down[0].numel()) * self.gate_up.element_size()

    def empty_like(self, rows: int) -> ExpertBank:
        """A bank of `rows` rows of the same record, its bytes undefined."""
        return ExpertBank(
            self.gate_up.new_empty(rows, *self.gate_up.shape[1:]), self.down.new_empty(rows, *self.down.shape[1:])
        )

    def copy_row(self, row: int, source: ExpertBank, source_row: int) -> None:
        """Overwrite a whole record. The caller has cleared the row's owner before and publishes the new one after."""
        self.gate_up[row].copy_(source.gate_up[source_row])
        self.down[row].copy_(source.down[source_row])


def check_uniform(banks: Sequence[ExpertBank]) -> None:
    """All layers' records must be alike, for one pool of slots serves them all. Raises ShapeMismatch."""
    for bank in banks:
        if bank.gate_up.shape != banks[0].gate_up.shape or bank.gate_up.dtype != banks[0].gate_up.dtype:
            raise ShapeMismatch(f"bank {list(bank.gate_up.shape)} differs from the first, {list(banks[0].gate_up.shape)}")
