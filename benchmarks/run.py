"""Every benchmark that needs no GPU, one after the other, each in a process of its own.

    python -m benchmarks.run [--record] [--only NAME …]

Ten to thirty minutes on two cores. Nothing else should run: see the load in each line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

BENCHMARKS = (
    "traces",
    "restored_ttft",
    "decode_vs_transformers",
    "peer_model",
    "thread_scaling",
    "executor",
    "event_cost",
    "saved_states",
    "cache_cost",
    "compression",
    "reuse_scenarios",
    "routing",
    "strict_output",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    arguments = parser.parse_args()
    failed = []
    for name in arguments.only:
        print(f"# {name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}"] + ["--record"] * arguments.record
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
