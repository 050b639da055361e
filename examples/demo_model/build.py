"""Builds the demo checkpoint from nothing: tokenizer, five training runs, evaluation. Needs one CUDA device.

    python -m examples.demo_model.build --out agentserve/demo_model

About 40 minutes on one H200: runs of 495 s, 450 s, 140 s, 340 s and 440 s, each with a minute of compilation. The second and the third are
averaged; the fourth goes on from their average, the fifth from the fourth.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from examples.demo_model import tokenizer
from examples.demo_model.config import Shape

FILES = ("config.json", "generation_config.json", "model.safetensors")


def run(module: str, *arguments: str) -> None:
    """Run one of our modules in its own process, so that it starts with a fresh device."""
    subprocess.run([sys.executable, "-m", f"examples.demo_model.{module}", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("agentserve/demo_model"))
    parser.add_argument("--work", type=Path, default=Path(".scratch/demo_model"), help="for weights in f32 and logs")
    parser.add_argument("--share", type=float, default=1.0, help="scale all training times")
    options = parser.parse_args()
    tokenizer.write(tokenizer.train(), options.out, Shape().positions)
    vocabulary = str(options.out / "tokenizer.json")
    first, second, third, averaged, fourth, fifth = (
        options.work / name for name in ("first", "second", "third", "averaged", "fourth", "fifth")
    )
    seconds = [str(s * options.share) for s in (495, 450, 140, 340, 440)]
    run("train", "--out", str(first), "--tokenizer", vocabulary, "--seconds", seconds[0], "--seed", "11")
    run(
        "train", "--out", str(second), "--tokenizer", vocabulary, "--seconds", seconds[1], "--seed", "23",
        "--start", str(first), "--peak", "0.0025",
    )  # fmt: skip
    run(
        "train", "--out", str(third), "--tokenizer", vocabulary, "--seconds", seconds[2], "--seed", "31",
        "--start", str(second), "--peak", "0.0015", "--mix", "broad=0.5,everyday=0.5",
    )  # fmt: skip
    run("average", "--first", str(second), "--second", str(third), "--share", "0.6", "--out", str(averaged))
    run(
        "train", "--out", str(fourth), "--tokenizer", vocabulary, "--seconds", seconds[3], "--seed", "41",
        "--start", str(averaged), "--peak", "0.0025", "--mix", "broad=0.42,everyday=0.20,plain=0.38",
    )  # fmt: skip
    run(
        "train", "--out", str(fifth), "--tokenizer", vocabulary, "--seconds", seconds[4], "--seed", "57",
        "--start", str(fourth), "--peak", "0.0018", "--mix", "broad=0.62,everyday=0.14,plain=0.24",
    )  # fmt: skip
    for name in FILES:
        shutil.copyfile(fifth / name, options.out / name)
    run("evaluate", "--model", str(options.out), "--sessions", "30")
    run("routing", "--model", str(options.out))


if __name__ == "__main__":
    main()
