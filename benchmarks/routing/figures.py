"""What an outcome costs in time, by the engine's cost model (engine/moe/cost.py), and how results look as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.routing.policies import Outcome, placements, replay
from benchmarks.routing.trace import Trace
from engine.moe.cost import Rates, decode_table, layer_ns

QWEN36_RECORD_BYTES = 3 * 2048 * 512 * 2
"""One bf16 expert of Qwen3.6-35B-A3B."""
RATES: Mapping[str, Rates] = {
    # The machine of FreeToken's measurements and ours, with an H200's memory behind it: MB/s.
    "server": Rates(
        hbm_mbs=4_300_000, link_mbs=50_000, copy_mbs=55_300, cpu_mbs=92_000, both_link_mbs=49_000, both_cpu_mbs=65_000
    ),
    "desktop": Rates(
        hbm_mbs=500_000, link_mbs=20_000, copy_mbs=22_000, cpu_mbs=30_000, both_link_mbs=18_000, both_cpu_mbs=22_000
    ),
}


def expert_us(outcome: Outcome, rates: Rates, record_bytes: int) -> float:
    """Mean time of one token's routed experts over all layers of the trace, µs."""
    known: dict[tuple[int, int], int] = {}
    total = 0
    for misses, fetched in zip(outcome.misses.ravel().tolist(), outcome.fetched.ravel().tolist(), strict=True):
        if (misses, fetched) not in known:
            known[misses, fetched] = layer_ns(rates, record_bytes, outcome.top_k - misses, misses, fetched)
        total += known[misses, fetched]
    return total / len(outcome.misses) / 1000


def compare(trace: Trace, share: float, rates: Rates, record_bytes: int = QWEN36_RECORD_BYTES) -> list[dict[str, Any]]:
    """Every policy on the same trace with slots for `share` of all experts. One flat dict a policy."""
    slots = max(trace.top_k, round(share * trace.layers * trace.experts))
    shared = decode_table(rates, record_bytes, trace.top_k, trace.top_k)
    lines = []
    for (policy, misses), make in placements(trace, slots, shared).items():
        outcome = replay(trace, make())
        lines.append(
            {
                "policy": policy,
                "misses": misses,
                "resident": share,
                "slots": slots,
                "hit_rate": round(outcome.hit_rate, 4),
                "hit_rate_by_layer": [round(rate, 4) for rate in outcome.hit_rate_by_layer],
                "misses_per_token_and_layer": round(float(outcome.misses.mean()), 3),
                "fetched_per_token_and_layer": round(float(outcome.fetched.mean()), 3),
                "moved_by_prefill": outcome.moved,
                "experts_us_per_token": round(expert_us(outcome, rates, record_bytes), 1),
            }
        )
    return lines


def show(console: Console, trace: Trace, machine: str, results: Sequence[Mapping[str, Any]]) -> None:
    console.print(
        f"{trace.name}: {int(trace.generated.sum())} generated tokens, {trace.layers} layers, "
        f"top {trace.top_k} of {trace.experts}; "
        f"a token shares {trace.overlap():.0%} of its experts with the one before"
    )
    shares = list(dict.fromkeys(line["resident"] for line in results))
    table = Table(caption=f"hits, misses of a layer, µs of its experts on {machine}; by share of experts resident")
    for name in ("policy", "misses are"):
        table.add_column(name, no_wrap=True)
    for share in shares:
        table.add_column(f"{share:.0%}", justify="right", no_wrap=True)
    for policy, misses in dict.fromkeys((line["policy"], line["misses"]) for line in results):
        row = [policy, misses]
        for share in shares:
            line = next(x for x in results if (x["policy"], x["misses"], x["resident"]) == (policy, misses, share))
            us = line["experts_us_per_token"] / trace.layers
            row.append(f"{line['hit_rate']:6.1%} {line['misses_per_token_and_layer']:5.2f} {us:4.0f}")
        table.add_row(*row)
    console.print(table)
