"""Compare placement policies of experts on identical routes. CPU only.

    python -m benchmarks.routing [NAME ...] [--resident 25 38 50 84] [--machine server] [--trace FILE.npz] [--plot FILE.png]
                                 [--record]

NAME: demo, uniform, local; all of them by default. The demo model's routes are recorded: python -m benchmarks.routing.record
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import report
from benchmarks.routing import plot, sources, trace
from benchmarks.routing.figures import RATES, compare, show

MAKERS = {"demo": lambda: trace.load(trace.DEMO), "uniform": sources.uniform, "local": sources.local}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MAKERS))
    parser.add_argument("--resident", type=int, nargs="+", default=(25, 38, 50, 84), help="per cent of all experts")
    parser.add_argument("--machine", choices=tuple(RATES), default="server", help="whose rates the cost model takes")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a recording of your own")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(MAKERS):
        parser.error(f"unknown trace {sorted(unknown)[0]!r}; there are {', '.join(MAKERS)}")
    traces = [trace.load(path) for path in options.trace]
    names = options.names or (() if traces else MAKERS)
    traces += [MAKERS[name]() for name in names]
    console = Console(width=128)
    drawn: dict[str, Any] = {}
    for one in traces:
        results: list[dict[str, Any]] = []
        for share in options.resident:
            results += compare(one, share / 100, RATES[options.machine])
        show(console, one, options.machine, results)
        workload = {
            "trace": one.name,
            "tokens": len(one.routes),
            "generated": int(one.generated.sum()),
            "layers": one.layers,
            "overlap": round(one.overlap(), 3),
            "rates_of": options.machine,
        }
        for line in results:
            report("routing", f"top {one.top_k} of {one.experts}", workload, line, options.record)
        drawn[one.name] = (one.layers, results)
    if options.plot is not None:
        plot.draw(drawn, options.machine, options.plot)
        console.print(f"picture: {options.plot}")


if __name__ == "__main__":
    main()
