"""Would lossless compression of saved states pay? Byte shuffle and zstd on the demo model's own state, beside the disk.

    python -m benchmarks.compression [--tokens 2048] [--record]

Ratios of sizes, and bytes of state a second of processor time: compressing, and decompressing into place with the checksum. It
pays for a restore where decompressing is faster than the disk: then reading 1 ÷ ratio of the bytes is what is left.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import zstandard

from benchmarks.common import report
from benchmarks.traces.compose import DEMO_MODEL
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import CutReached, Request, SamplingParams

TEXT = "The lamp in the old house by the river is green, and it costs forty two coins today. Bring it to the station at nine. "
LEVELS = (1, 3)
ROUNDS = 5


def states(tokens: int) -> dict[str, tuple[np.ndarray, int]]:
    """Bytes of real state after so many tokens of text, and the width of their numbers in bytes."""
    from agentserve.text.tokenizer import Tokenizer

    engine = Engine.load(EngineConfig(model_dir=DEMO_MODEL, threads=1, kv_tokens=2 * tokens, max_rows=2))
    random = np.random.default_rng(0)
    words = TEXT.split()
    text = " ".join(words[i] for i in random.integers(0, len(words), 2 * tokens))
    ids = Tokenizer.load(DEMO_MODEL).encode(text)[:tokens].astype(np.int32)
    engine.submit(Request("r", ids, SamplingParams(max_tokens=1, temperature=0.0), cuts=(tokens,)))
    found: dict[str, tuple[np.ndarray, int]] = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, CutReached):
                if event.position == tokens and not found:
                    snapshot = engine.copy_out(event.hold)
                    rows = np.concatenate([run.rows for run in snapshot.kv])
                    found["kv bf16"] = (rows.reshape(-1).copy(), 2)
                    for kind, dtype, width in (("delta", "float32", 4), ("conv", "bfloat16", 2)):
                        parts = [p.name for p in engine.layout.state if p.name.endswith(kind) and p.dtype == dtype]
                        layers = [snapshot.state[name].reshape(-1).view(np.uint8) for name in parts]
                        found[f"{kind} {dtype}"] = (np.concatenate(layers), width)
                engine.release(event.hold)
    return found


def shuffled(data: np.ndarray, width: int) -> np.ndarray:
    """First bytes of all numbers, then all second bytes, and so on."""
    return np.ascontiguousarray(data.reshape(-1, width).T).reshape(-1)


def best(work: Any) -> float:
    seconds: list[float] = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def measure(data: np.ndarray, width: int, level: int) -> dict[str, float]:
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    packed = packer.compress(shuffled(data, width).tobytes())
    out = np.empty_like(data)

    def unpack() -> None:
        planes = np.frombuffer(unpacker.decompress(packed), np.uint8).reshape(width, -1)
        np.copyto(out.reshape(-1, width), planes.T)

    unpack()
    assert np.array_equal(out, data)
    return {
        "ratio": round(len(data) / len(packed), 3),
        "compress_gb_per_s": round(len(data) / best(lambda: packer.compress(shuffled(data, width).tobytes())) / 1e9, 3),
        "decompress_gb_per_s": round(len(data) / best(unpack) / 1e9, 3),
        "decompress_without_shuffle_gb_per_s": round(len(data) / best(lambda: unpacker.decompress(packed)) / 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, (data, width) in states(options.tokens).items():
        figures[name] = {"bytes": len(data)}
        for level in LEVELS:
            figures[name][f"zstd {level}"] = measure(data, width, level)
    report("compression", "demo model, byte shuffle + zstd", {"tokens": options.tokens}, figures, options.record)


if __name__ == "__main__":
    main()
