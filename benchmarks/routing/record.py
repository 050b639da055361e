"""Records what the demo model's routers choose on held-out sessions of its own kind, through the engine.

    python -m benchmarks.routing.record [--model DIR] [--sessions 8] [--tokens 1024] [--out FILE.npz]

Each session is a row of tokens as the model was trained on; what an assistant wrote counts as generated, the rest as prompt.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.routing.trace import DEMO, Trace
from engine.batch import ForwardBatch, SeqSlice
from engine.config import EngineConfig
from engine.engine import Engine

MODEL = Path(__file__).parents[2] / "agentserve" / "demo_model"
LEARNED = 2
"""In make_batch's mask: text of the assistant."""


class Watch:
    """Notes every token's experts while an engine of the CPU or reference backend runs. Load it with at least one slot
    for each expert: routes are seen where the engine asks its slots for experts.

    routes: by MoE layer, a list of int64 [tokens of a pass, top_k].
    """

    def __init__(self, engine: Engine) -> None:
        decoder: Any = getattr(engine.model, "_decoder", None)
        offloads = [layer.mlp.offload for layer in decoder.layers] if decoder is not None else []
        if not offloads or offloads[0] is None:
            raise ValueError("routes can be watched only on the cpu and reference backends, with slots set")
        offload = offloads[0]
        self.routes: list[list[np.ndarray]] = [[] for _ in offloads]
        forward = offload.forward

        def watched(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            self.routes[layer].append(ids.numpy().copy())
            return forward(layer, x, ids, weights)

        offload.forward = watched

    def clear(self) -> None:
        for routes in self.routes:
            routes.clear()


def tokens_of(model: Path, sessions: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, generated) of each session."""
    from examples.demo_model.data import make_batch
    from examples.demo_model.rows import Encoder

    encoder = Encoder(str(model / "tokenizer.json"))
    ids, mask = make_batch(encoder, Random(5), sessions, length, encoder.token("<|endoftext|>"), held_out=True)
    rows = zip(ids.reshape(sessions, length), mask.reshape(sessions, length), strict=True)
    return [(row[kind > 0].astype(np.int32), kind[kind > 0] == LEARNED) for row, kind in rows]


def record(model: Path, sessions: list[tuple[np.ndarray, np.ndarray]], name: str = "demo model") -> Trace:
    engine = Engine.load(EngineConfig(model_dir=model, threads=1, slots=1 << 20, kv_tokens=1 << 14, snapshot_rows=1))
    watch = Watch(engine)
    routes = []
    for ids, _ in sessions:
        watch.clear()
        pages = torch.arange(-(-len(ids) // engine.store.page_size), dtype=torch.int32)
        whole = SeqSlice(0, len(ids), 0, pages, 0, True, ())
        # Logits are wanted everywhere: the last layer's experts are computed only where they are.
        everywhere = torch.arange(len(ids))
        batch = ForwardBatch(torch.from_numpy(ids.astype(np.int64)), everywhere, (whole,), everywhere)
        engine.model.forward(batch, engine.store.kv, engine.store.states)
        routes.append(np.stack([np.concatenate(layer) for layer in watch.routes], axis=1).astype(np.uint16))
    return Trace(name, engine.model.spec.experts, np.concatenate(routes), np.concatenate([kinds for _, kinds in sessions]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="of each session, at most")
    parser.add_argument("--out", type=Path, default=DEMO)
    options = parser.parse_args()
    trace = record(options.model, tokens_of(options.model, options.sessions, options.tokens))
    trace.save(options.out)
    print(
        f"{options.out}: {len(trace.routes)} tokens, {int(trace.generated.sum())} of them generated; a token shares "
        f"{trace.overlap():.0%} of its experts with the one before it ({trace.top_k / trace.experts:.0%} by chance)"
    )


if __name__ == "__main__":
    main()
