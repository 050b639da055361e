"""Invented routes: uniform ones, the worst case of any cache, and ones with the locality that was published.

Published for Qwen3.6-35B-A3B on a 32 GB card (FreeToken's paper): LRU misses 16% of the experts that decoding asks for, a
placement by popularity (KTransformers) 41%, a placement that knows nothing (llama.cpp) 62%. The last one is what is not
resident, so 38% was. `local` has three numbers; its defaults give these three rates within a few points at that share.
"""

from __future__ import annotations

import numpy as np

from benchmarks.routing.trace import Trace

PUBLISHED_RESIDENT = 0.38
PUBLISHED_MISSES = {"lru": 0.16, "static, by prefill": 0.41, "static, blind": 0.62}


def _turns(turns: int, prompt: int, output: int) -> np.ndarray:
    return np.tile(np.repeat([False, True], [prompt, output]), turns)


def uniform(
    *, layers: int = 4, experts: int = 256, top_k: int = 8, turns: int = 3, prompt: int = 64, output: int = 150, seed: int = 0
) -> Trace:
    """Every expert is as likely as any other, whatever came before: what random weights do."""
    random = np.random.default_rng(seed)
    generated = _turns(turns, prompt, output)
    keys = random.random((len(generated), layers, experts))
    routes = np.argpartition(keys, top_k, axis=2)[:, :, :top_k].astype(np.uint16)
    return Trace("uniform", experts, routes, generated)


def local(
    *,
    layers: int = 4,
    experts: int = 256,
    top_k: int = 8,
    turns: int = 3,
    prompt: int = 64,
    output: int = 150,
    skew: float = 0.65,
    reuse: float = 0.67,
    window: int = 10,
    drift: float = 0.3,
    seed: int = 0,
    name: str = "local",
) -> Trace:
    """Some experts are popular, and a token mostly uses what the tokens just before it used.

    skew: exponent of a Zipf law over the experts of a layer, in an order of its own for each layer. reuse: probability that a
    choice is one of those of the last `window` tokens. drift: share of the experts whose popularity changes between turns.
    """
    random = np.random.default_rng(seed)
    generated = _turns(turns, prompt, output)
    routes = np.empty((len(generated), layers, top_k), dtype=np.uint16)
    law = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    law /= law.sum()
    for layer in range(layers):
        rank = random.permutation(experts)
        recent: list[list[int]] = []
        for token in range(len(generated)):
            if token and generated[token - 1] and not generated[token]:
                moved = random.permutation(experts)[: int(drift * experts)]
                rank[moved] = rank[random.permutation(moved)]
            fresh = iter(rank[random.choice(experts, 4 * top_k, p=law, replace=False)].tolist())
            pool = [e for row in recent for e in row]
            chosen: dict[int, None] = {}
            for _ in range(4 * top_k):
                again = pool and random.random() < reuse
                chosen[pool[int(random.integers(len(pool)))] if again else next(fresh)] = None
                if len(chosen) == top_k:
                    break
            while len(chosen) < top_k:
                chosen[next(fresh)] = None
            routes[token, layer] = list(chosen)
            recent = [*recent[-(window - 1) :], list(chosen)] if window > 1 else [list(chosen)]
    return Trace(name, experts, routes, generated)
