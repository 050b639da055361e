"""What every model promises: a frozen description, and one call that runs a flat batch.

Holds no weights and no architecture; each architecture is one file beside this one, found through registry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from engine.batch import ForwardBatch

LayerKind = Literal["attention", "delta"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. ordinal counts within its kind: it indexes the pools (k[ordinal], or delta[ordinal])."""

    index: int
    kind: LayerKind
    ordinal: int
    moe: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What others must know of a model to allocate its state and to describe it.

    kv_heads, head_dim: attention layers. H_v, d_k, d_v, conv_dim, conv_kernel: delta layers (0 if the model has none).
    dtype: of activations, keys, values and convolution tails; the delta state is always f32.
    slots: expert slots shared by all MoE layers, None when every expert is resident.
    numerics: facts that change results and so belong in a state namespace (rope, epsilon, backend …).
    """

    model_type: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    max_context: int
    parameters: int
    experts: int = 0
    top_k: int = 0
    H_v: int = 0
    d_k: int = 0
    d_v: int = 0
    conv_dim: int = 0
    conv_kernel: int = 0
    slots: int | None = None
    numerics: Mapping[str, str] = field(default_factory=dict)

    @property
    def attention_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if layer.kind == "attention")

    @property
    def delta_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if layer.kind == "delta")


class KvPools(Protocol):
    """Paged keys and values. k[ordinal], v[ordinal]: [pages, page_size, kv_heads, head_dim], contiguous, spec.dtype."""

    @property
    def k(self) -> Sequence[torch.Tensor]: ...
    @property
    def v(self) -> Sequence[torch.Tensor]: ...
    @property
    def page_size(self) -> int: ...


class RecurrentPools(Protocol):
    """Recurrent state by row. delta[ordinal]: f32 [rows, H_v, d_k, d_v]. conv[ordinal]: spec.dtype [rows, conv_dim, K − 1]."""

    @property
    def delta(self) -> Sequence[torch.Tensor]: ...
    @property
    def conv(self) -> Sequence[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Logits:
    """What a pass gives. rows: f32 [n, vocab_size], which the model may write again in its next pass: copy what is kept. Of no
    width where the model has begun with the step behind, and no row of this one has a `draw`.

    guesses: for each row the token that will probably be chosen by its `draw`, or −1 if it holds NaN or infinity; None if
    nobody has looked. Where the temperature is 0 it is no guess, but the index of the largest value, the lowest of several.
    """

    rows: torch.Tensor
    guesses: Sequence[int] | None = None

    def take(self, indices: Sequence[int]) -> Logits:
        """These rows only."""
        if len(indices) == len(self.rows):
            return self
        guesses = None if self.guesses is None else [self.guesses[index] for index in indices]
        return Logits(self.rows[list(indices)], guesses)


class Pass(Protocol):
    """A forward pass under way."""

    def advance(self) -> Logits | None:
        """Go on to the edge of the next layer. The logits, as forward() returns them, at the end. Raises what forward()
        does."""
        ...

    def abandon(self) -> None:
        """Give the pass up; state rows of its sequences are then undefined."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A model whose passes can be interrupted at the edges of layers, for decode steps of other sequences."""

    def warm_up(self, kv: KvPools, states: RecurrentPools) -> None:
        """Do now what the first step in these pools would do once. Changes no state."""
        ...

    def rehearse(self, kv: KvPools, states: RecurrentPools, tokens: int) -> None:
        """Compute prompts of up to so many tokens, for what only a prompt's first time costs. Writes the first pages and state
        rows: before any request."""
        ...

    def set_beside(self, callback: Callable[[], None]) -> None:
        """Call it in each forward() of single tokens, while the device computes."""
        ...

    def look_ahead(self, batch: ForwardBatch | None) -> None:
        """Of the next forward(), which is of single tokens: what the one after it is expected to be asked for. The device may
        begin with it before anybody has read what comes before it. None: what was begun so is not to be used, whatever comes.

        batch: single tokens. A token id of −1 − r: what is guessed for row r of the next forward(); every sequence has a
        row_out of its own, unless the model has no recurrent state, and pages for its token. What a forward() computes does not
        depend on it, but its logits have rows only if one of its sequences has a `draw`. If something else is asked for then,
        what was begun leaves nothing behind but keys and values at positions that are not computed yet, and what lies in
        row_out.
        """
        ...

    @property
    def begun(self) -> bool:
        """Whether the device has begun with a step that nobody has asked for yet."""
        ...

    def begin(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Pass:
        """Begin a pass. Until it is over or abandoned, forward() may run other sequences."""
        ...


class SlotCounters(Protocol):
    """Experts that a step found in slots, and that it did not, since the start."""

    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...


class Model(Protocol):
    """A loaded model. It owns weights only; all state of sequences lies in the pools that it is handed."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        """Run the batch, advance the state, return the logits of batch.logit_rows.

        Writes the keys and values of the batch's tokens into their pages, advances each sequence's state_row and copies
        it to every cut's dest_row. A fresh sequence's row is taken as zeros whatever it holds.
        """
        ...
