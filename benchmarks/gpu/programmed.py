"""Weights that make a model walk a given recording of routes, in any engine: realistic locality at full cost.

A token of the walk has an embedding of its own, orthogonal to all others and so large that nothing a layer adds can turn it
(mixers add nothing; experts add what they always do, which is small beside it). So every router sees the embedding, and its
weights are a sum over states: each expert's row is made of the embeddings that shall choose it. The head maps state t to t + 1.
"""

from __future__ import annotations

import torch

from benchmarks.routing.trace import Trace

SIZE = 1024.0
"""Of an embedding's entries, where experts add less than 1."""
CHOSEN = 8.0
"""Router score of a state's first expert; the others of its choice follow at even distance down to three quarters, and every
other expert of the layer scores about 0."""
NEXT = 1.0
"""Norm of a head row that follows; all others have entries of OTHERS."""
OTHERS = 0.002


class Programme:
    """routes: what state t chooses, in the order of its scores. States are token ids: 0 … states − 1, and around."""

    def __init__(self, trace: Trace, hidden: int, device: torch.device, seed: int = 0) -> None:
        states = len(trace.routes)
        if states > hidden:
            raise ValueError(f"{states} states need a hidden size of at least as much, got {hidden}")
        self.routes = torch.from_numpy(trace.routes.astype("int64")).to(device)
        self.experts = trace.experts
        generator = torch.Generator(device=device).manual_seed(seed)
        square = torch.randn(hidden, hidden, generator=generator, device=device)
        self._directions = torch.linalg.qr(square)[0][:states]

    def __len__(self) -> int:
        return len(self._directions)

    def embed(self, rows: torch.Tensor) -> None:
        """Write the states' rows of an embedding table that is filled otherwise: [vocab, hidden]."""
        hidden = rows.shape[1]
        rows[: len(self)] = (SIZE * hidden**0.5 * self._directions).to(rows.dtype)

    def router(self, layer: int) -> torch.Tensor:
        """f32 [experts, hidden]. A normalized state has the length √hidden."""
        states, k = len(self), self.routes.shape[2]
        wanted = torch.zeros(states, self.experts, device=self._directions.device)
        scores = CHOSEN * (1 - 0.25 * torch.arange(k, device=wanted.device) / k)
        wanted.scatter_(1, self.routes[:, layer], scores.expand(states, k))
        return wanted.T @ self._directions / self._directions.shape[1] ** 0.5

    def head(self, rows: torch.Tensor) -> None:
        """Write the head's rows of the states: [vocab, hidden]."""
        rows[: len(self)] = (NEXT * self._directions.roll(1, 0)).to(rows.dtype)

    def after(self, token: int, count: int) -> list[int]:
        """The next `count` tokens of the walk."""
        return [(token + 1 + i) % len(self) for i in range(count)]
