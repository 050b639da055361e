"""Two threads against one on the model of peer_model.py: with the second core free, and with another process busy on it.

    python -m benchmarks.thread_scaling [--context 512] [--rounds 15] [--decode-tokens 8] [--model DIR] [--record]

The engine alone, held to two cores. In every round one thread and two threads take turns, with the second core free and with a
loop that never sleeps on it; the figures are the ratios of a round's pairs, above 1 where two threads are faster. The pool
measures by itself whether its helper pays, so it is given an unmeasured prefill and a few steps after every change.

Decoding reads all active weights once per token and does little else, so memory bandwidth bounds it. The bound is taken in
the same rounds: how fast one and two threads read a matrix of half a GiB in huge pages with the fastest loop that there is
here, the engine's own product of a row with a matrix. `bound_ratio` is what two threads could gain on this machine at most,
`reached` what decoding makes of the bandwidth that its threads have.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import report, spread
from benchmarks.peer_model import VOCAB, build
from benchmarks.runners import Ours, time_decode, time_prefill
from engine.kernels import cpu
from engine.models.base import ModelSpec

THREADS = (1, 2)
ARMS = ("free", "busy")
SETTLE_TOKENS = 6
MATRIX = (1 << 16, 1 << 12)


def token_bytes(config: dict[str, Any], spec: ModelSpec, context: int) -> int:
    """Bytes that one decode step reads at least: weights of all layers with the chosen experts, head, keys and values."""
    hidden, heads, kv_heads, width = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    attention = 2 * hidden * heads * width + 2 * hidden * kv_heads * width
    router = (config.get("num_experts") or config["num_local_experts"]) * hidden
    experts = config["num_experts_per_tok"] * 3 * hidden * config["moe_intermediate_size"]
    layers = config["num_hidden_layers"]
    cached = context * layers * 2 * kv_heads * width
    return (layers * (attention + router + experts) + config["vocab_size"] * hidden + cached) * spec.dtype.itemsize


@contextlib.contextmanager
def competitor(core: int) -> Iterator[None]:
    """A process that never sleeps, held to a core."""
    process = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Reader:
    """How fast the kernels read memory, GB/s."""

    def __init__(self) -> None:
        self._matrix = cpu.huge_empty(*MATRIX, dtype=torch.bfloat16).fill_(0.5)
        self._row = torch.ones(1, MATRIX[1], dtype=torch.bfloat16)
        self._out = torch.empty(1, MATRIX[0], dtype=torch.bfloat16)

    def measure(self) -> float:
        began = time.perf_counter()
        cpu.linear(self._row, self._matrix, out=self._out)
        return self._matrix.numel() * 2 / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--decode-tokens", type=int, default=8)
    parser.add_argument("--model", type=Path, help="directory to keep the checkpoint in, made if it is empty")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if not cpu.available():
        parser.exit(1, f"no C++ library: {cpu.reason()}\n")
    cores = sorted(os.sched_getaffinity(0))[-2:]
    if len(cores) < 2:
        parser.exit(1, "two cores are needed\n")
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model or Path(scratch)
        if not (directory / "config.json").exists():
            build(directory)
        figures = measure(directory, cores[-1], arguments.context, arguments.rounds, arguments.decode_tokens)
    workload = {"context": arguments.context, "decode_tokens": arguments.decode_tokens, "dtype": "bf16", "isa": cpu.isa()}
    report("thread_scaling", "random qwen3_moe of peer_model", workload, figures, arguments.record)


def measure(directory: Path, busy_core: int, context: int, rounds: int, count: int) -> dict[str, Any]:
    from engine.weights.loader import read_config

    ours = Ours(directory, 2, context + SETTLE_TOKENS + count + 64)
    needed = token_bytes(read_config(directory), ours.model.spec, context)
    reader = Reader()
    prompt = torch.randint(0, VOCAB, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    rates: dict[tuple[str, str, int], list[float]] = {}
    for round_index in range(rounds + 1):
        for arm in ARMS:
            with competitor(busy_core) if arm == "busy" else contextlib.nullcontext():
                for threads in THREADS if round_index % 2 else THREADS[::-1]:
                    cpu.set_threads(threads)
                    ours.prefill(prompt)  # the pool has to see for itself what has changed
                    prefill = time_prefill(ours, prompt).wall
                    time_decode(ours, prompt[0], SETTLE_TOKENS)
                    decode = time_decode(ours, prompt[0], count).wall
                    taken = {"prefill": prefill, "decode": decode, "read": reader.measure()}
                    if round_index:
                        for kind, rate in taken.items():
                            rates.setdefault((arm, kind, threads), []).append(rate)

    def ratios(arm: str, kind: str) -> list[float]:
        one, two = (rates[arm, kind, threads] for threads in THREADS)
        return [b / a for a, b in zip(one, two, strict=True)]

    figures: dict[str, Any] = {arm: {kind: spread(ratios(arm, kind)) for kind in ("prefill", "decode")} for arm in ARMS}
    figures["bytes_per_token"] = needed
    figures["bound_ratio"] = spread(ratios("free", "read"))
    for threads in THREADS:
        decode, read = rates["free", "decode", threads], rates["free", "read", threads]
        figures[f"threads_{threads}"] = {
            "read_gb_per_s": spread(read),
            "decode_gb_per_s": spread([rate * needed / 1e9 for rate in decode]),
            "reached": spread([rate * needed / 1e9 / bound for rate, bound in zip(decode, read, strict=True)]),
        }
    return figures


if __name__ == "__main__":
    main()
