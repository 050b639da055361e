"""Every GPU kernel at a model's geometry: time on the device beside the floor that its bytes and its arithmetic set.

    python -m benchmarks.gpu.kernels [NAME …] [--variants] [--milliseconds 20] [--peak-gb-per-s N] [--peak-tflops N] [--record]

NAME picks cases by a part of their name. Each case exists eight times with tensors of its own, so that weights come from memory
and not from the L2 cache; calls of all eight are captured as one graph, and the figure is the median replay over its calls.
--variants also tries other block sizes (kernel_variants.py).
Peaks default to what a plain copy and a plain bf16 product reach in the same run. Without a GPU it runs tiny shapes under the
interpreter of Triton, once each.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.common import report
from benchmarks.gpu.kernel_cases import QWEN36, TINY, Case, cases
from benchmarks.gpu.kernel_variants import Variant, applied, with_variants

_REPLAYS = 9
_COPIES = 8


def device_us(runs: Sequence[Callable[[], object]], milliseconds: float) -> float:
    """Median time of one call in microseconds, from replays of a graph that goes round the calls for `milliseconds`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in (*runs, *runs):
            run()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for run in runs:
            run()
        end.record()
    side.synchronize()
    rounds = max(1, min(50, int(milliseconds / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for run in [*runs] * rounds:
            run()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / rounds / len(runs))
    return statistics.median(times)


def peaks(milliseconds: float) -> tuple[float, float]:
    """GB/s of a copy (read and written bytes) and TFLOP/s of a bf16 product of random 8192 × 8192 matrices."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    copy = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    moved = device_us([lambda: copy.copy_(source)], milliseconds)
    multiplied = device_us([lambda: torch.mm(a, b, out=product)], milliseconds)
    return 2 * source.numel() / moved / 1e3, 2 * 8192**3 / multiplied / 1e6


def floor_us(case: Case, gb_per_s: float, tflops: float) -> float:
    """The larger of what the bytes and what the arithmetic take."""
    return max(case.bytes / gb_per_s / 1e3, case.flops / tflops / 1e6)


def measure(copies: Sequence[Case], milliseconds: float, gb_per_s: float, tflops: float) -> dict[str, float | str]:
    """One row of the table. A case that fails says so: the others still count."""
    case = copies[0]
    floor = floor_us(case, gb_per_s, tflops)
    row: dict[str, float | str] = {"case": case.name, "floor_us": round(floor, 2), "mbytes": round(case.bytes / 1e6, 3)}
    try:
        taken = device_us([copy.run for copy in copies], milliseconds)
    except (RuntimeError, OutOfResources) as error:
        return row | {"failed": str(error).splitlines()[0]}
    return row | {
        "us": round(taken, 2),
        "over_us": round(taken - floor, 2),
        "of_floor": round(taken / floor, 2) if floor else 0.0,
    }


def table(rows: Sequence[dict[str, float | str]]) -> str:
    """The rows for people."""
    lines = [f"{'kernel':36} {'µs':>10} {'floor µs':>10} {'beyond µs':>10} {'× floor':>8}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['case']:36} failed: {row['failed']}")
        else:
            lines.append(f"{row['case']:36} {row['us']:>10} {row['floor_us']:>10} {row['over_us']:>10} {row['of_floor']:>8}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--variants", action="store_true", help="try other block sizes too")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="length of one replay")
    parser.add_argument("--peak-gb-per-s", type=float)
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)

    def wanted(case: Case) -> bool:
        return not given.names or any(name in case.name for name in given.names)

    def ways(copies: Sequence[Case]) -> Iterable[tuple[Variant | None, list[Case]]]:
        return with_variants(copies) if given.variants else [(None, list(copies))]

    if not torch.cuda.is_available():
        for case in filter(wanted, cases(TINY, "cpu", torch.bfloat16)):
            for variant, (tried,) in ways([case]):
                with applied(variant):
                    tried.run()
                print(f"{tried.name}: ran")
        return
    gb_per_s, tflops = given.peak_gb_per_s, given.peak_tflops
    if gb_per_s is None or tflops is None:
        copied, multiplied = peaks(given.milliseconds)
        gb_per_s, tflops = gb_per_s or copied, tflops or multiplied
    rows: list[dict[str, float | str]] = []
    for same in zip(*(cases(QWEN36, "cuda", torch.bfloat16) for _ in range(_COPIES)), strict=True):
        if not wanted(same[0]):
            continue
        for variant, copies in ways(same):
            with applied(variant):
                rows.append(measure(copies, given.milliseconds, gb_per_s, tflops))
        if any("illegal" in str(row.get("failed")) for row in rows):
            break  # the context is gone, and nothing else can run
    print(table(rows))
    workload = {"gb_per_s": round(gb_per_s, 1), "tflops": round(tflops, 1), "dtype": "bf16"}
    workload |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for row in rows:
        report("gpu_kernels", "Qwen3.6-35B-A3B geometry", {**workload, "case": row.pop("case")}, dict(row), given.record)


if __name__ == "__main__":
    main()
