"""Routed experts on the CPU: the C++ executor against torch (`F.linear` per expert), same bf16 bank, same routes.

    python -m benchmarks.executor [--threads 1 2] [--tokens 1 8 64 512] [--repeats 15] [--isa NAME …] [--pages file] [--record]
    python -m benchmarks.executor --each 1 4 8 16 32 64 --threads 12 --isa avx512_bf16 amx --pages huge

2048 x 512 experts, top-8 of 256 (1.6 GB). Every round draws new routes, so weights come from memory and not from a cache;
the two alternate within a round and the figure is the ratio of each pair. --pages: where the bank lies, for both. `file` is a
mapped checkpoint, as the engine has it (in huge pages if the file system gives them: `huge_share` says how much is); `small`
and `huge` are memory of its own. --each: instead, GB/s of weights by tokens of an expert, in a pass over 64 of the 256 experts
at a time; the instruction sets alternate within a round, and the ratio is that of the last to the first.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from benchmarks.common import report, spread
from engine.kernels import cpu
from engine.moe.banks import ExpertBank
from engine.moe.cpu_executor import CpuExecutor
from engine.weights.reader import CheckpointReader

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 512, 256, 8


def torch_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """What a plain torch executor does: tokens grouped by expert, two matrix products each, weighted sum in f32."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in torch.unique(ids).tolist():
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(x[token], bank.gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, bank.down[expert])
        out.index_add_(0, token, y.float() * weights[token, choice, None])
    return out


def random_bank(pages: str, scratch: Path) -> ExpertBank:
    """pages: file, small or huge."""
    empty = cpu.huge_empty if pages == "huge" else torch.empty
    generator = torch.Generator().manual_seed(0)
    gate_up = empty(EXPERTS, 2 * INTER, HIDDEN, dtype=torch.bfloat16)
    down = empty(EXPERTS, HIDDEN, INTER, dtype=torch.bfloat16)
    gate_up[0].normal_(std=HIDDEN**-0.5, generator=generator)
    down[0].normal_(std=INTER**-0.5, generator=generator)
    # The values do not matter for speed; copies make a bank of this size in a second instead of twenty.
    gate_up[1:] = gate_up[0]
    down[1:] = down[0]
    if pages != "file":
        return ExpertBank(gate_up, down)
    path = scratch / "model.safetensors"
    save_file({"gate_up": gate_up, "down": down}, path)
    forget(path)
    reader = CheckpointReader(scratch)
    reader.advise(cpu.advise_huge)
    for name in reader.names():
        reader.raw(name).view(torch.int64).sum()  # read it from disk, as loading does
    return ExpertBank(reader.tensor("gate_up"), reader.tensor("down"))


def forget(path: Path) -> None:
    """Drop a file from the page cache, as after a restart of the machine: what was just written lies there in small pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def huge_share(bank: ExpertBank) -> float | None:
    """How much of a bank's memory is mapped in huge pages, None where the system does not say."""
    try:
        maps = Path("/proc/self/smaps").read_text()
    except OSError:
        return None
    places = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (bank.gate_up, bank.down)]
    resident = huge = 0
    for about in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps, flags=re.M)[1:]:
        start, end = (int(x, 16) for x in about.split(" ", 1)[0].split("-"))
        if any(start < b and a < end for a, b in places):
            sizes = {key: int(kib) for key, kib in re.findall(r"^(\w+): +(\d+) kB", about, flags=re.M)}
            resident += sizes["Rss"]
            huge += sizes["AnonHugePages"] + sizes["FilePmdMapped"]
    return round(huge / max(1, resident), 3)


Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def seconds(run: Experts, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Wall time, and processor time of all threads: on a machine with other work the second says more."""
    wall, processor = time.perf_counter(), time.process_time()
    run(*inputs)
    return time.perf_counter() - wall, time.process_time() - processor


def measure(bank: ExpertBank, tokens: int, threads: int, repeats: int, pages: str, record: bool) -> None:
    executor = CpuExecutor(bank)
    cpu.set_threads(threads)
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(tokens)
    runs: dict[str, Experts] = {"executor": executor.forward, "torch": partial(torch_experts, bank=bank)}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    bandwidth = []
    for round_index in range(repeats + 1):
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.int()
        inputs = (x, ids, torch.rand(tokens, TOP_K, generator=generator))
        taken = {name: seconds(run, inputs) for name, run in runs.items()}
        if round_index == 0:
            continue
        for name, (wall_s, processor_s) in taken.items():
            wall[name].append(wall_s * 1e3)
            processor[name].append(processor_s * 1e3)
        bandwidth.append(len(ids.unique()) * bank.record_bytes / taken["executor"][0] / 1e9)
    figures = {f"{name}_ms": spread(values) for name, values in wall.items()}
    figures |= {f"{name}_processor_ms": spread(values) for name, values in processor.items()}
    figures |= {
        "ratio": spread([b / a for a, b in zip(wall["executor"], wall["torch"], strict=True)]),
        "processor_ratio": spread([b / a for a, b in zip(processor["executor"], processor["torch"], strict=True)]),
        "weights_gb_per_s": spread(bandwidth),
    }
    workload = {
        "tokens": tokens,
        "threads": threads,
        "isa": cpu.isa(),
        "experts": EXPERTS,
        "top_k": TOP_K,
        "dtype": "bf16",
        "pages": pages,
        "huge_share": huge_share(bank),
    }
    report("executor", f"experts of {HIDDEN} x {INTER}", workload, figures, record)


EACH_EXPERTS = 64
"""Of a pass with a given number of tokens for each: 0.4 GB, more than caches hold."""


def even_routes(each: int, first: int) -> torch.Tensor:
    """Routes of a pass that gives EACH_EXPERTS experts from `first` on `each` tokens. int32 [tokens, top_k], −1 = no choice."""
    tokens = max(EACH_EXPERTS, EACH_EXPERTS * each // TOP_K)
    ids = torch.full((TOP_K, tokens), -1, dtype=torch.int32)
    chosen = torch.arange(first, first + EACH_EXPERTS, dtype=torch.int32).repeat_interleave(each)
    ids.view(-1)[: len(chosen)] = chosen
    return ids.t().contiguous()


def measure_each(bank: ExpertBank, each: int, threads: int, isas: list[str], repeats: int, pages: str, record: bool) -> None:
    executor = CpuExecutor(bank)
    cpu.set_threads(threads)
    torch.set_num_threads(1)  # inputs are made between calls, and its other threads would go on spinning
    generator = torch.Generator().manual_seed(each)
    rates: dict[str, list[float]] = {isa: [] for isa in isas}
    turn = 0
    for round_index in range(repeats + 2):
        for isa in isas:
            ids = even_routes(each, turn % (EXPERTS // EACH_EXPERTS) * EACH_EXPERTS)
            turn += 1
            x = torch.randn(len(ids), HIDDEN, generator=generator).bfloat16()
            cpu.set_isa(isa)
            wall_s, _ = seconds(executor.forward, (x, ids, torch.rand(ids.shape, generator=generator)))
            if round_index >= 2:
                rates[isa].append(EACH_EXPERTS * bank.record_bytes / wall_s / 1e9)
    figures = {f"{isa}_gb_per_s": spread(values) for isa, values in rates.items()}
    figures["ratio"] = spread([b / a for a, b in zip(rates[isas[0]], rates[isas[-1]], strict=True)])
    workload = {
        "tokens_each": each,
        "threads": threads,
        "experts": EACH_EXPERTS,
        "top_k": TOP_K,
        "dtype": "bf16",
        "pages": pages,
    }
    report("executor", f"experts of {HIDDEN} x {INTER}", workload, figures, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--isa", nargs="+", choices=cpu.ISAS, help="instruction sets to measure (default: the best)")
    parser.add_argument("--pages", choices=("file", "small", "huge"), default="file", help="where the bank lies, for both")
    parser.add_argument("--each", type=int, nargs="+", metavar="TOKENS", help="GB/s of weights by tokens of an expert, instead")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if not cpu.available():
        parser.exit(1, f"no C++ library: {cpu.reason()}\n")
    with tempfile.TemporaryDirectory() as scratch:
        bank = random_bank(arguments.pages, Path(scratch))
        for each in arguments.each or []:
            for threads in arguments.threads:
                isas = arguments.isa or [cpu.isa()]
                measure_each(bank, each, threads, isas, arguments.repeats, arguments.pages, arguments.record)
        if arguments.each:
            return
        for isa in arguments.isa or [None]:
            cpu.set_isa(isa)
            for threads in arguments.threads:
                for tokens in arguments.tokens:
                    measure(bank, tokens, threads, arguments.repeats, arguments.pages, arguments.record)


if __name__ == "__main__":
    main()
