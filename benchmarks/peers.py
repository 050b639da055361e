"""What two other servers reuse in the scenarios of reuse_scenarios.py. Data, measured once; nothing here runs them.

Source: llama.cpp (commit 0c1e57098) and vLLM's CPU backend 0.32, one thread of an AVX512-VNNI Xeon, the same random weights in
both: a 1.27 B mixture of experts with 12 attention layers, and a hybrid of that size (9 of 12 layers gated delta nets). Counts
of reused prompt tokens depend on block sizes and on where state is kept, not on the weights. "tuned": llama.cpp with settings
chosen by hand for the scenario.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Tokens reused of a prompt of that size; None = not measured. note: what must be known to read the tuned figure."""

    prompt: int
    llama: int | None = None
    tuned: int | None = None
    vllm: int | None = None
    note: str = ""


APPEND, THINKING, PLACEHOLDER, SHARED, SUBAGENT, RESTART = (
    "append only",
    "earlier thinking dropped",
    "old tool output replaced",
    "second session, same system prompt",
    "after a sub-agent",
    "restart",
)

ATTENTION: dict[tuple[str, int], Peer] = {
    (APPEND, 6): Peer(2_100, 1_899, None, 1_792),
    (THINKING, 4): Peer(1_584, 860, 1_508, 768, "tuned is inexact: it shifts old KV"),
    (PLACEHOLDER, 5): Peer(1_664, 908, 909, 896),
    (SHARED, 3): Peer(2_056, 1_500, 1_855, 1_792, "tuned shares nothing at turn 1"),
    (RESTART, 3): Peer(1_356, 0, 1_155, 0, "tuned saves its slot by hand"),
}
HYBRID: dict[tuple[str, int], Peer] = {
    (APPEND, 3): Peer(1_356, 1_155, None, 768),
    (APPEND, 4): Peer(1_604, 1_403, None, 1_152),
    (THINKING, 4): Peer(1_584, 856, None, 768),
    (PLACEHOLDER, 5): Peer(1_664, 907, None, 768),
    (SHARED, 1): Peer(1_560, 1_500, None, 0),
    (RESTART, 3): Peer(1_356, 0, None, None),
}
