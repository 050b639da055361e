"""Measure the offloaded engine on one GPU, stage by stage.

    python -m benchmarks.gpu [STAGE ...] [--dir DIR] [--out DIR] [--limit-s 540] [--resident 25 84] [--variants random]
    python -m benchmarks.gpu --tiny            # everything at toy size; without a GPU too

STAGE: checkpoint, calibrate, decode, suffix, alternate, interleave, restore, save, resize, table; profile only when named.
`docs/gpu.md` says what each shows. A run that is stopped, or out of time, goes on with the same command: what is done stays in
DIR/results.jsonl. Exit status 3: there is more to do; 1: a stage failed, and the others were run.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import RESULTS
from benchmarks.gpu import checkpoint, geometry, plan, summary
from benchmarks.gpu.bench import ARMS, TINY_SIZES, Bench, Sizes
from benchmarks.gpu.calibration import calibrate
from benchmarks.gpu.context import Context, OutOfTime
from benchmarks.gpu.decode import decode
from benchmarks.gpu.play import EngineFailed
from benchmarks.gpu.profiling import profile
from benchmarks.gpu.results import Results
from benchmarks.gpu.states import resize, restore, save
from benchmarks.gpu.turns import alternate, interleave, suffix
from benchmarks.routing.trace import load
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.gpu.load import choose_kernels
from engine.moe.cost import ASSUMED, Rates

BY_SHARE: dict[str, Callable[[Context], None]] = {"decode": decode}
BY_TURN_SHARE: dict[str, Callable[[Context], None]] = {"suffix": suffix, "alternate": alternate, "interleave": interleave}
ONCE: dict[str, Callable[[Context], None]] = {"restore": restore, "save": save, "resize": resize}
"""Where the variant makes no difference: on the programmed one, whose tokens can be checked."""
STAGES = ("checkpoint", "calibrate", *BY_SHARE, *BY_TURN_SHARE, *ONCE, "table")
BY_NAME: dict[str, Callable[[Context], None]] = {"profile": profile}
"""Only when asked for."""
MORE_TO_DO = 3


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join((*STAGES, *BY_NAME)))
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on host memory where there is no GPU")
    parser.add_argument("--dir", type=Path, help="checkpoints and state (default: /dev/shm or a disk with room)")
    parser.add_argument("--out", type=Path, help=f"gets every result line (default: {RESULTS.name}/ for full runs)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="begin nothing that would end after this")
    parser.add_argument("--resident", type=int, nargs="+", help="per cent of the experts")
    parser.add_argument("--variants", nargs="+", choices=checkpoint.VARIANTS, default=checkpoint.VARIANTS)
    parser.add_argument("--repeats", type=int, help="of everything (default 5)")
    parser.add_argument("--batches", type=int, nargs="+", help="streams at once in `decode` (default 1 4)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=(), help="ways to deal with misses in `decode`")
    parser.add_argument("--threads", type=int, help="of the CPU executor (default: three of four cores)")
    parser.add_argument("--kernels", choices=("triton", "plain"), help="default: triton on a GPU")
    parser.add_argument(
        "--elastic", choices=("manual", "off"), default="manual", help="whether slots and pages lie behind addresses"
    )
    parser.add_argument("--again", action="store_true", help="forget what is done")
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - {*STAGES, *BY_NAME}:
        parser.error(f"unknown stage {sorted(unknown)[0]!r}; there are {', '.join((*STAGES, *BY_NAME))}")
    options.stages = options.stages or list(STAGES)
    return options


def main(arguments: list[str] | None = None) -> int:
    import torch

    options = options_of(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    host = options.tiny and not torch.cuda.is_available()
    shape = geometry.TINY if options.tiny else geometry.HALF_QWEN36
    sizes = TINY_SIZES if options.tiny else Sizes()
    what = plan.TINY if options.tiny else plan.FULL
    if options.repeats:
        what = replace(what, repeats=options.repeats)
    if options.batches:
        what = replace(what, batches=tuple(min(batch, sizes.max_rows) for batch in options.batches))
    what = replace(what, arms=tuple(options.arms))
    directory = checkpoint.place_for(shape, options.dir)
    directory.mkdir(parents=True, exist_ok=True)
    out = options.out or (None if options.tiny else RESULTS)
    name = f"{'tiny' if options.tiny else 'Qwen3.6-35B-A3B at half depth'}, bf16"
    results = Results(directory / "results.jsonl", out, options.limit_s, name, options.again)
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    tell(f"checkpoints in {directory}")
    if "checkpoint" in options.stages:
        place = torch.device("cpu") if host or not torch.cuda.is_available() else torch.device("cuda")
        gb_s = checkpoint.make(shape, directory, place, tell)
        tell(f"checkpoints are complete; written at {gb_s:.1f} GB/s")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    failed: list[str] = []
    threads = options.threads or max(1, 3 * cores // 4)
    try:
        if set(options.stages) - {"checkpoint", "table"}:
            kernels = options.kernels or ("plain" if host else "triton")
            bench = Bench(
                directory,
                shape,
                rates=ASSUMED,
                sizes=sizes,
                host=host,
                kernels=kernels,
                threads=threads,
                elastic=options.elastic,
                tell=tell,
            )
            try:
                _measure(options, bench, what, results, directory, tell, failed)
            finally:
                bench.close()
    except OutOfTime:
        tell("out of time: the same command goes on from here")
        return MORE_TO_DO
    finally:
        if "table" in options.stages:
            summary.show(Console(width=160), results)
            if options.out is not None:
                with (options.out / "gpu_table.txt").open("w") as file:
                    summary.show(Console(width=160, file=file), results)
    if failed:
        tell(f"failed: {'; '.join(failed)}")
    return 1 if failed else 0


def _measure(
    options: argparse.Namespace,
    bench: Bench,
    what: plan.Plan,
    results: Results,
    directory: Path,
    tell: Callable[[str], None],
    failed: list[str],
) -> None:
    """failed: gets the name of each stage that raised; what else that engine had to do is left out."""
    if "calibrate" in options.stages and results.find("calibrate") is None:
        bench.decoder(options.variants[0])
        tell("calibrating")
        host, kernels = bench.config.host_device, bench.config.kernels
        ops = choose_kernels(EngineConfig(backend="cuda", host_device=host, kernels=kernels))
        began = time.monotonic()
        _, figures = calibrate(bench.device, ops, bench.bank, 0.01 if options.tiny else 0.5)
        workload = {"threads": bench.config.threads, "record_bytes": bench.bank.record.nbytes}
        results.add("calibrate", workload, figures, time.monotonic() - began)
    measured = results.find("calibrate")
    if measured is not None:
        bench.rates = Rates(**{key: measured[key] for key in Rates.__dataclass_fields__ if key in measured})
    else:
        tell("not calibrated: the engine divides misses by assumed rates, and the table has no floors")
    trace = load(directory / checkpoint.ROUTES)
    for share in options.resident or what.shares:
        for variant in options.variants:
            stages: dict[str, Callable[[Context], None]] = dict(BY_SHARE)
            if options.resident or share in what.turn_shares:
                stages |= BY_TURN_SHARE
                stages |= ONCE if variant == options.variants[-1] and share < 100 else {}
            stages |= BY_NAME
            stages = {name: stage for name, stage in stages.items() if name in options.stages}
            with ExitStack() as stack:

                def start(variant: str = variant, share: int = share, stack: ExitStack = stack) -> Any:
                    tell(f"{variant}, {share}% resident")
                    return stack.enter_context(bench.engine(variant, share / 100))

                walk = trace if variant == "programmed" else None
                context = Context(start, results, what, bench.shape, directory, variant, share, walk)
                for name, stage in stages.items():
                    tell(f"{variant}, {share}%: {name}")
                    try:
                        stage(context)
                    except (EngineError, EngineFailed, RuntimeError, AssertionError):
                        traceback.print_exc()
                        failed.append(f"{name} ({variant}, {share}%)")
                        break


if __name__ == "__main__":
    raise SystemExit(main())
