"""Attention of one layer behind a long context, on the CPU: what it takes, beside matrix products, reading, and another build.

    python -m benchmarks.attention [--shape demo peer] [--chunks 64 128 512] [--decode 1 4 16] [--context 20000] [--rounds 9]
                                   [--base LIBRARY] [--isa NAME] [--record]
    python -m benchmarks.attention --model DIR [--chunks 128] [--context 20000] [--rounds 9] [--base LIBRARY] [--record]

--chunks: so many rows of one sequence; --decode: so many sequences with a row each, every one behind the context. Heads of
the demo model or of peer_model.py, pages of 64 in random order, bf16, one thread, processor time. --base: the library of
another build (`cmake --build` elsewhere); within a round the two take turns, and the ratio is above 1 where this one is faster.
--model: a whole pass of that model over each chunk and over one token, behind a context of random keys and values.

`products_ms` is what as much arithmetic takes as a product of f32 matrices, `reading_ms` how long as many bytes as the keys and
values have take as one long bf16 matrix, both at the best rate of the same rounds. No attention takes less than the second.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import report, spread
from benchmarks.runners import Ours
from engine.errors import EngineError
from engine.kernels import cpu, native, records
from examples.demo_model.config import Shape

PAGE = 64
SCALE = 0.125


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int


DEMO = Shape()
SHAPES = {"demo": Heads(DEMO.heads, DEMO.kv_heads, DEMO.head_dim), "peer": Heads(16, 4, 64)}


def attention_record(shape: Heads, sequences: int, rows: int, context: int) -> tuple[bytes, list[torch.Tensor]]:
    """Attention of `rows` rows each of `sequences` sequences, and the tensors that its record points to."""
    pages = -(-(context + rows) // PAGE)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(sequences * pages, generator=generator).int().view(sequences, pages)
    k, v = (cpu.huge_empty(sequences * pages, PAGE, shape.kv_heads, shape.dim, dtype=torch.bfloat16) for _ in range(2))
    for pool in (k, v):
        pool.normal_(generator=generator)
    q = torch.randn(sequences * rows, shape.heads, shape.dim, generator=generator).bfloat16()
    out = torch.empty(sequences * rows, shape.heads * shape.dim, dtype=torch.bfloat16)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * rows
    contexts = torch.full((sequences,), context, dtype=torch.int32)
    record = records.attention(q, k, v, table, starts, contexts, out, SCALE, sequences)
    return record, [k, v, table, q, out, starts, contexts]


def processor_s(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


class Rates:
    """What the machine does at best, in the rounds that attention is measured in."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(512, 2048), torch.randn(512, 2048)
        self._product = torch.empty(512, 512)
        self._matrix = cpu.huge_empty(1 << 14, 1 << 11, dtype=torch.bfloat16).fill_(0.5)
        self._row, self._out = torch.ones(1, 1 << 11, dtype=torch.bfloat16), torch.empty(1, 1 << 14, dtype=torch.bfloat16)
        self.gflops: list[float] = []
        self.gb_per_s: list[float] = []

    def measure(self) -> None:
        taken = processor_s(lambda: cpu.linear(self._a, self._b, out=self._product))
        self.gflops.append(2 * self._a.numel() * self._b.shape[0] / taken / 1e9)
        taken = processor_s(lambda: cpu.linear(self._row, self._matrix, out=self._out))
        self.gb_per_s.append(self._matrix.numel() * 2 / taken / 1e9)


def libraries(base: Path | None, isa: str) -> dict[str, ctypes.CDLL]:
    """This build's library, and that of another one, both with one thread and the same instruction set."""
    found: dict[str, ctypes.CDLL] = {}
    for name, path in [("base", base)] * (base is not None) + [("this", native.candidates()[0])]:
        library = native.load(path)
        if library is None:
            raise EngineError(f"{path}: {native.reason()}")
        cpu.set_isa(isa)
        cpu.set_threads(1)
        found[name] = library
    return found


@contextlib.contextmanager
def using(library: ctypes.CDLL) -> Iterator[None]:
    """The engine's kernels come from this library."""
    before, native._library = native._library, library
    try:
        yield
    finally:
        native._library = before


def take_turns(arms: dict[str, Callable[[], object]], rounds: int, between: Callable[[], object]) -> dict[str, list[float]]:
    """Processor milliseconds of each arm, one round after the other; the first round is not counted."""
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_index in range(rounds + 1):
        between()
        for arm in arms if round_index % 2 else reversed(arms):
            taken[arm].append(processor_s(arms[arm]) * 1e3)
    return {arm: times[1:] for arm, times in taken.items()}


def compared(taken: dict[str, list[float]]) -> dict[str, object]:
    figures: dict[str, object] = {"processor_ms": spread(taken["this"])}
    if "base" in taken:
        figures["base_processor_ms"] = spread(taken["base"])
        figures["ratio"] = spread([b / a for a, b in zip(taken["this"], taken["base"], strict=True)])
    return figures


def measure(
    name: str, sequences: int, rows: int, context: int, rounds: int, builds: dict[str, ctypes.CDLL], keep: bool
) -> None:
    shape, rates = SHAPES[name], Rates()
    record, tensors = attention_record(shape, sequences, rows, context)
    arms = {arm: partial(library.asv_run, record, 1, 0, 0, 0) for arm, library in builds.items()}
    figures = compared(take_turns(arms, rounds, rates.measure))
    pairs = sequences * rows * (context + (rows + 1) / 2) * shape.heads
    flops, read = pairs * shape.dim * 4, sum(t.numel() * t.element_size() for t in tensors[:2])
    figures |= {
        "products_ms": round(flops / max(rates.gflops) / 1e6, 2),
        "reading_ms": round(read / max(rates.gb_per_s) / 1e6, 2),
    }
    workload = {"sequences": sequences, "rows": rows, "context": context, "page": PAGE, "dtype": "bf16", "isa": cpu.isa()}
    report("attention", f"{shape.heads} heads on {shape.kv_heads} of {shape.dim} ({name})", workload, figures, keep)


def measure_model(directory: Path, rows: int, context: int, rounds: int, builds: dict[str, ctypes.CDLL], keep: bool) -> None:
    tokens, arms = torch.randint(0, 1000, (rows,), generator=torch.Generator().manual_seed(0)).tolist(), {}

    def one_pass(library: ctypes.CDLL, model: Ours) -> None:
        with using(library):
            model.go_on(context, tokens)

    for arm, library in builds.items():
        with using(library):
            arms[arm] = partial(one_pass, library, Ours(directory, 1, context + rows))
    figures = compared(take_turns(arms, rounds, lambda: None))
    report("attention", directory.name, {"rows": rows, "context": context, "isa": cpu.isa()}, figures, keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["demo"])
    parser.add_argument("--chunks", type=int, nargs="*", default=[64, 128, 512])
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--base", type=Path, metavar="LIBRARY", help="the library of another build to compare with")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a whole pass of this model instead of attention alone")
    parser.add_argument("--isa", choices=cpu.ISAS, help="instruction set (default: the best)")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if not cpu.available():
        parser.exit(1, f"no C++ library: {cpu.reason()}\n")
    torch.set_num_threads(1)
    builds = libraries(arguments.base, arguments.isa or cpu.isa())
    if arguments.model is not None:
        for rows in [*arguments.chunks, 1]:
            measure_model(arguments.model, rows, arguments.context, arguments.rounds, builds, arguments.record)
        return
    cases = [(1, rows) for rows in arguments.chunks] + [(sequences, 1) for sequences in arguments.decode]
    for name in arguments.shape:
        for sequences, rows in cases:
            measure(name, sequences, rows, arguments.context, arguments.rounds, builds, arguments.record)


if __name__ == "__main__":
    main()
