"""Stage `calibrate`: the rates that every floor is made of, how the link's depends on what is moved at a time, and what a part
of an expert takes on either side."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch

from engine.device.base import Device
from engine.device.host import HostDevice
from engine.gpu.calibrate import TOP_K, CpuSide, measure, together
from engine.gpu.direct import LEAST_ROWS, DirectReads
from engine.moe.cost import Rates
from engine.moe.host_bank import HostBank

SIZES = tuple(1 << shift for shift in (16, 18, 20, 22, 24, 26, 28))
CTAS = (1, 2, 4, 8, 16, 32)
PARTS = (8, 4, 2, 1)
"""Of an expert's inner rows, as fractions: 64, 128, 256 and all of 512."""
MOVED_BYTES = 1 << 30
"""By one timed round, where the bank has as much."""


def calibrate(device: Device, ops: ModuleType, bank: HostBank, seconds: float) -> tuple[Rates, dict[str, Any]]:
    """The engine's own measurement, and tables beside it: GB/s of copies by size, of gathers by kernel width. bank: pinned."""
    rates = measure(device, ops, bank, HostDevice(), seconds)
    figures: dict[str, Any] = dict(asdict(rates))
    figures["copy_gb_s_by_bytes"] = {str(size): rate for size, rate in copies(device, bank, seconds).items()}
    figures["gather_gb_s_by_ctas"] = {str(ctas): rate for ctas, rate in gathers(device, ops, bank, seconds).items()}
    figures["parts"] = parts(device, ops, bank, seconds)
    return rates, figures


def _gb_s(device: Device, work: Callable[[], int], seconds: float) -> float:
    """work enqueues and returns its bytes. Best of rounds that take `seconds` together, after one that does not count."""
    work()
    device.synchronize()
    best, until = 0.0, time.perf_counter() + seconds / 4
    while True:
        began = time.perf_counter()
        nbytes = work()
        device.synchronize()
        now = time.perf_counter()
        best = max(best, nbytes / (now - began) / 1e9)
        if now > until:
            return float(f"{best:.4g}")


def copies(device: Device, bank: HostBank, seconds: float) -> dict[int, float]:
    """By copy engine from the pinned bank, size by size."""
    flat = bank.bytes[next(bank.runs(0, bank.pinned_rows))].view(-1)
    out: dict[int, float] = {}
    for size in SIZES:
        if size > len(flat):
            break
        count = max(1, min(256, MOVED_BYTES // size, len(flat) // size))
        target = torch.empty(size, dtype=torch.uint8, device=device.torch_device)

        def work(size: int = size, count: int = count, target: torch.Tensor = target) -> int:
            for index in range(count):
                target.copy_(flat[index * size : (index + 1) * size], non_blocking=True)
            return size * count

        out[size] = _gb_s(device, work, seconds)
    return out


def gathers(device: Device, ops: ModuleType, bank: HostBank, seconds: float) -> dict[int, float]:
    """Whole records read by a kernel over the link, by the number of its programs: few leave the rest of the device to compute.
    Empty for kernels that have no width (the plain ones)."""
    if "ctas" not in inspect.signature(ops.fetch).parameters:
        return {}
    record = bank.record.nbytes
    count = max(1, min(bank.pinned_rows, MOVED_BYTES // record))
    place = device.torch_device
    slots = torch.empty(count, record, dtype=torch.uint8, device=place)
    rows = torch.arange(count, dtype=torch.int32, device=place)
    work = torch.stack([rows, rows], 1).contiguous()
    counts = torch.tensor([count, 0, 0, 0], dtype=torch.int32, device=place)

    def fetch(ctas: int) -> int:
        ops.fetch(bank.bytes, slots, work, counts, ctas)
        return count * record

    return {ctas: _gb_s(device, lambda ctas=ctas: fetch(ctas), seconds) for ctas in CTAS}


def parts(device: Device, ops: ModuleType, bank: HostBank, seconds: float) -> dict[str, dict[str, float]]:
    """The last r inner rows of one expert, by r: µs of a call and GB/s of the experts' own kernels reading them over the link,
    alone and beside the executor's load, what the executor reads meanwhile, and µs that it takes alone for as many rows."""
    reads, out = DirectReads(device, ops, bank, TOP_K), {}
    side = CpuSide(bank, HostDevice())
    try:
        for rows in sorted({reads.inter // part // LEAST_ROWS * LEAST_ROWS for part in PARTS} - {0}):
            reads.use(rows)
            nbytes = reads.nbytes(rows)

            def work(nbytes: int = nbytes) -> int:
                reads.replay()
                return nbytes

            alone = _gb_s(device, work, seconds)
            beside, cpu = together(device, reads.replay, nbytes, side, seconds / 2)
            out[str(rows)] = {
                "us": round(nbytes / reads.calls / alone / 1000, 2),
                "gb_s": alone,
                "us_beside_cpu": round(nbytes / reads.calls / beside, 2),
                "gb_s_beside_cpu": beside / 1000,
                "cpu_gb_s_beside": cpu / 1000,
                "cpu_us": side.request_ns(1, 1, seconds / 4, taken=reads.inter - rows) / 1000,
            }
    finally:
        side.close()
    return out
