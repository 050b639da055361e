"""Speed of saving and restoring one long context, beside a plain copy and a plain read of the same bytes.

    python -m benchmarks.saved_states [--tokens 16384] [--record]

Sized like a 35B hybrid model: 20,480 B of KV per token, 61 MiB of recurrent state. Ratios on one machine, best of `--rounds`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.common import report
from statecache.durable import DiskSettings, SavedStates, open_states
from statecache.types import Boundary, BoundaryKind, KvRun, Layout, Payload

LAYOUT = Layout(kv_token_bytes=20_480, state=(("recurrent", 64_382_566),), vocab_size=248_320)
GIB = 1 << 30


def reader_s(work: Callable[[], object], rounds: int) -> float:
    """Processor time of this thread alone: what a read takes where another core sums up what has arrived."""
    seconds: list[float] = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds)


def best_s(work: Callable[[], object], rounds: int, before: Callable[[], None] = lambda: None) -> float:
    seconds: list[float] = []
    for _ in range(rounds):
        before()
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure(tokens: int, rounds: int) -> dict[str, float]:
    rows = np.random.default_rng(1).integers(0, 255, (tokens, LAYOUT.kv_token_bytes), dtype=np.uint8)
    state = {name: np.ones(size, np.uint8) for name, size in LAYOUT.state}
    ids = np.random.default_rng(0).integers(0, 50_000, tokens + 1)
    out = np.zeros_like(rows)
    nbytes = rows.nbytes + sum(a.nbytes for a in state.values())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        disk = DiskSettings(root, 64 * GIB, 0, index_url=f"sqlite:///{root / 'index.db'}")

        def opened() -> SavedStates:
            return open_states(b"n" * 32, LAYOUT, 4 * nbytes, disk)

        def restore(states: SavedStates) -> None:
            with states.cache.match(ids, b"s") as match:
                assert match.read(out).position == tokens

        states = opened()
        copy_s = best_s(lambda: np.copyto(out, rows), rounds)
        payload = Payload(tokens, (KvRun(0, rows),), state)
        states.cache.put(ids, b"s", Boundary(tokens, BoundaryKind.TURN), payload)
        ram_s = best_s(lambda: restore(states), rounds)
        began = time.perf_counter()
        states.cache.write_back()
        write_s = time.perf_counter() - began
        states.close()
        began = time.perf_counter()
        states = opened()
        open_s = time.perf_counter() - began
        files = sorted(root.glob("*/??/*.safetensors"))
        buffer = np.empty(64 << 20, np.uint8)

        def plain() -> None:
            for file in files:
                with file.open("rb", buffering=0) as source:
                    while source.readinto(buffer.data):
                        pass

        def forget() -> None:
            """Let the kernel drop what it has cached of the files."""
            for file in files:
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

        plain_s, disk_s = best_s(plain, rounds, forget), best_s(lambda: restore(states), rounds, forget)
        reader = reader_s(plain, rounds) / reader_s(lambda: restore(states), rounds)
        warm_plain_s, warm_disk_s = best_s(plain, rounds), best_s(lambda: restore(states), rounds)
        states.close()
    return {
        "ram_restore_of_memcpy": round(copy_s / ram_s * nbytes / rows.nbytes, 3),
        "disk_restore_of_plain_read": round(plain_s / disk_s, 3),
        "disk_restore_of_plain_read_in_page_cache": round(warm_plain_s / warm_disk_s, 3),
        "disk_restore_of_plain_read_in_page_cache_reader_cpu": round(reader, 3),
        "disk_restore_gb_per_s": round(nbytes / disk_s / 1e9, 2),
        "write_back_gb_per_s": round(nbytes / write_s / 1e9, 2),
        "start_ms": round(1000 * open_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    figures = measure(options.tokens, options.rounds)
    print("  ".join(f"{name} {value}" for name, value in figures.items()))
    model = "hybrid 35B, 20,480 B KV a token, 61.4 MiB state"
    report("saved_states", model, {"tokens": options.tokens, "rounds": options.rounds}, figures, options.record)


if __name__ == "__main__":
    main()
