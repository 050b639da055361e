"""What a router chose for every token of a few turns, and which of the tokens were prompt and which were generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

DEMO = Path(__file__).parent / "demo_routes.npz"
"""Recorded from the embedded demo model: python -m benchmarks.routing.record"""


@dataclass(frozen=True)
class Trace:
    """routes: uint16 [tokens, layers, top_k], expert ids within the layer, distinct within a row. generated: bool [tokens]."""

    name: str
    experts: int
    routes: np.ndarray
    generated: np.ndarray

    def __post_init__(self) -> None:
        if self.routes.ndim != 3 or len(self.routes) != len(self.generated):
            raise ValueError(f"routes {self.routes.shape} and generated {self.generated.shape} do not belong together")
        if self.routes.size and int(self.routes.max()) >= self.experts:
            raise ValueError(f"expert {int(self.routes.max())} of {self.experts}")

    @property
    def layers(self) -> int:
        return self.routes.shape[1]

    @property
    def top_k(self) -> int:
        return self.routes.shape[2]

    def phases(self) -> Iterator[tuple[bool, int, int]]:
        """(generated, first token, end), in order: a prompt, what was generated, the next turn's new prompt tokens, …"""
        edges = [0, *(np.flatnonzero(np.diff(self.generated.astype(np.int8))) + 1).tolist(), len(self.generated)]
        for start, end in pairwise(edges):
            if end > start:
                yield bool(self.generated[start]), start, end

    def counted_from(self) -> int:
        """First token that figures count: the second stretch of generated tokens, or after a quarter of the only one."""
        stretches = [(start, end) for generated, start, end in self.phases() if generated]
        if len(stretches) > 1:
            return stretches[1][0]
        return stretches[0][0] + (stretches[0][1] - stretches[0][0]) // 4 if stretches else len(self.generated)

    def overlap(self) -> float:
        """Share of a token's experts that the token before it used too, over all layers."""
        same = (self.routes[1:, :, :, None] == self.routes[:-1, :, None, :]).any(-1)
        return float(same.mean()) if same.size else 0.0

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path,
            name=self.name,
            experts=self.experts,
            routes=self.routes.astype(np.uint8 if self.experts <= 256 else np.uint16),
            generated=np.packbits(self.generated),
        )


def load(path: Path) -> Trace:
    with np.load(path) as data:
        routes = data["routes"].astype(np.uint16)
        generated = np.unpackbits(data["generated"])[: len(routes)].astype(bool)
        return Trace(str(data["name"]), int(data["experts"]), routes, generated)
