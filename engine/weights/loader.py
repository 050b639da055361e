"""Gives a model the tensors that it asks for, in the shapes that it expects, whatever checkpoint layout they come in.

Layouts known: transformers ≥ 5 (fused `mlp.experts.gate_up_proj`) and hub files (one tensor per expert); text models alone and
inside multimodal checkpoints (`model.language_model.…`), whose other parts are never read.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.errors import CheckpointError
from engine.weights.digests import Digests
from engine.weights.fingerprint import Fingerprint
from engine.weights.reader import CheckpointReader

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
_ACCEPTED = ("BF16", "F32")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json as a dict. Raises CheckpointError if it is missing or not an object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: config.json is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(config).__name__}")
    return config


class ExpertStore(Protocol):
    """Where experts are loaded to, instead of staying views of the file or being stacked in memory of their own."""

    def place(
        self, capacity: int, count: int, inter: int, hidden: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors gate_up [count, 2·inter, hidden] and down [count, hidden, inter] of one more layer, to be filled.

        capacity: experts in the whole checkpoint, at least; the same at every call.
        """
        ...


class Weights:
    """Tensors by the names they have in the plain text model (`model.layers.0.…`).

    dtype: what large tensors are converted to; those already in it stay views of the mapped file.
    empty(*shape, dtype=…): gives the memory that experts are put together in, where the file has one tensor for each.
    store: where experts go; None leaves them in the file where they can stay there.
    Everything handed out is counted in `parameters` and goes into `digest`; digests: of the single tensors.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        dtype: torch.dtype,
        *,
        empty: Callable[..., torch.Tensor] = torch.empty,
        digests: Digests | None = None,
        store: ExpertStore | None = None,
    ) -> None:
        self._reader = reader
        self._digests = Digests() if digests is None else digests
        self._empty = empty
        self._store = store
        self.dtype = dtype
        self.parameters = 0
        self._fingerprint = Fingerprint()
        self._seen: set[str] = set()
        self._prefix = self._find_prefix()

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._reader

    def digest(self) -> str:
        return self._fingerprint.hexdigest()

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, contiguous, in `dtype` (default: the model's).

        Raises CheckpointError if it is missing, has another shape, or is stored in neither BF16 nor F32.
        """
        stored = self._take(name, shape)
        wanted = dtype or self.dtype
        return stored if stored.dtype == wanted else stored.to(wanted)

    def stacked(self, *parts: tuple[str, int], columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Several [rows, columns] matrices one above the other, as one matrix product wants them."""
        return torch.cat([self.get(name, rows, columns, dtype=dtype) for name, rows in parts])

    def experts(self, prefix: str, count: int, inter: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [count, 2·inter, hidden] and down [count, hidden, inter] of `prefix` (`model.layers.0.mlp.experts`)."""
        fused = f"{prefix}.gate_up_proj" in self
        if not fused and f"{prefix}.0.gate_proj.weight" not in self:
            raise CheckpointError(
                f"{self._reader.directory}: tensor {prefix}.gate_up_proj is missing, and so is {prefix}.0.gate_proj.weight"
            )
        if fused and self._store is None:
            gate_up = self.get(f"{prefix}.gate_up_proj", count, 2 * inter, hidden)
            return gate_up, self.get(f"{prefix}.down_proj", count, hidden, inter)
        if self._store is None:
            gate_up = self._empty(count, 2 * inter, hidden, dtype=self.dtype)
            down = self._empty(count, hidden, inter, dtype=self.dtype)
        else:
            gate_up, down = self._store.place(self._experts_stored(inter * hidden), count, inter, hidden, self.dtype)
        if fused:
            self._move(f"{prefix}.gate_up_proj", gate_up)
            self._move(f"{prefix}.down_proj", down)
            return gate_up, down
        for e in range(count):
            self._move(f"{prefix}.{e}.gate_proj.weight", gate_up[e, :inter])
            self._move(f"{prefix}.{e}.up_proj.weight", gate_up[e, inter:])
            self._move(f"{prefix}.{e}.down_proj.weight", down[e])
        return gate_up, down

    def _move(self, name: str, dest: torch.Tensor) -> None:
        """Copy a tensor to its place and let go of the file's pages, so that no two copies stay in memory."""
        dest.copy_(self._take(name, tuple(dest.shape)))
        self._reader.let_go(self._stored_name(name))

    def _experts_stored(self, matrix: int) -> int:
        """Routed experts in the files, those of parts that are never read included. matrix: inter · hidden."""
        names = (name for name in self._reader.names() if ".experts." in name)
        return sum(math.prod(self._reader.entry(name).shape) for name in names) // (3 * matrix)

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._reader:
                return prefix
        raise CheckpointError(
            f"{self._reader.directory}: tensor model.embed_tokens.weight is missing (also looked below "
            + ", ".join(repr(p) for p in _PREFIXES[1:])
            + ")"
        )

    def _stored_name(self, name: str) -> str:
        if name == "lm_head.weight":
            return next((head for head in _HEADS if head in self._reader), name)
        return self._prefix + name.removeprefix("model.")

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored_name = self._stored_name(name)
        entry = self._reader.entry(stored_name)
        where = f"{self._reader.directory / entry.file}: tensor {stored_name!r}"
        if entry.dtype not in _ACCEPTED:
            raise CheckpointError(f"{where} has dtype {entry.dtype}, accepted: {', '.join(_ACCEPTED)}")
        if entry.shape != shape:
            raise CheckpointError(f"{where} has shape {list(entry.shape)}, config.json asks for {list(shape)}")
        tensor = self._reader.tensor(stored_name)
        if stored_name not in self._seen:
            self._seen.add(stored_name)
            self.parameters += tensor.numel()
            raw = self._reader.raw(stored_name)
            content = self._digests.content(self._reader.directory / entry.file, stored_name, raw)
            raw[:: mmap.PAGESIZE].sum()  # a remembered one comes from disk now, and not in the first turn
            self._fingerprint.add(stored_name, entry.dtype, entry.shape, content)
        return tensor
