"""What benchmarks share: one JSON line per result, the machine in words, medians with p10 and p90."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median with p10 and p90 (nearest rank)."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "n": len(ordered),
    }


def machine() -> dict[str, Any]:
    """CPU model, usable cores, load before the run. Bare times mean nothing elsewhere; ratios from one run do."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": name, "cores": cores, "load": round(os.getloadavg()[0], 2)}


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads so far, from the scheduler's nanosecond counters."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def commit() -> str:
    """The short hash that is being measured, with + if files differ from it; empty outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def report(name: str, model: str, workload: dict[str, Any], figures: dict[str, Any], record: bool) -> dict[str, Any]:
    """Print the result as one JSON line; with `record` also append it to results/<name>.jsonl."""
    line = {
        "benchmark": name,
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "model": model,
        "workload": workload,
        "figures": figures,
    }
    text = json.dumps(line)
    print(text, flush=True)
    if record:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(text + "\n")
    return line
