"""The bytes of recurrent state, by row. Chooses nothing; see allocator.py for which row is whose."""

from __future__ import annotations

import numpy as np
import torch

from engine.models.base import ModelSpec
from engine.types import StateComponent


class RecurrentPools:
    """delta[ordinal]: f32 [rows, H_v, d_k, d_v]. conv[ordinal]: spec.dtype [rows, conv_dim, conv_kernel − 1].

    A row holds anything until a fresh sequence has run on it.
    """

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self.rows = rows
        self._allocate(spec, torch.device("cpu"))
        self._bytes = {name: pool.flatten(1).view(torch.uint8).numpy() for name, pool in self._named.items()}

    def _allocate(self, spec: ModelSpec, device: torch.device) -> None:
        layers, rows = spec.delta_layers, self.rows
        tail = max(0, spec.conv_kernel - 1)
        self.delta = [torch.zeros(rows, spec.H_v, spec.d_k, spec.d_v, device=device) for _ in layers]
        self.conv = [torch.zeros(rows, spec.conv_dim, tail, dtype=spec.dtype, device=device) for _ in layers]
        self._named = {
            f"layer.{layer.index}.{kind}": pool
            for layer, delta, conv in zip(layers, self.delta, self.conv, strict=True)
            for kind, pool in (("delta", delta), ("conv", conv))
        }

    @property
    def components(self) -> tuple[StateComponent, ...]:
        """One row as named tensors, in layer order."""
        return tuple(
            StateComponent(
                name=name,
                dtype=str(pool.dtype).removeprefix("torch."),
                shape=tuple(pool.shape[1:]),
                nbytes=pool[0].numel() * pool.element_size(),
            )
            for name, pool in self._named.items()
        )

    def copy(self, source: int, dest: int) -> None:
        for rows in self._bytes.values():  # a third of what torch takes for it
            rows[dest] = rows[source]

    def fill(self, rows: np.ndarray, value: float) -> None:
        """Overwrite whole rows (poison)."""
        ids = torch.from_numpy(rows).long()
        for pool in self._named.values():
            pool[ids] = value

    def read(self, row: int) -> np.ndarray:
        """A copy of one row: its components one after another, uint8."""
        return np.concatenate([pool[row] for pool in self._bytes.values()])

    def write(self, row: int, name: str, source: np.ndarray) -> None:
        """Put one component (uint8 [nbytes], as read() gives it) into a row. The caller has checked name and size."""
        self._bytes[name][row] = source
