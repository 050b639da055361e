"""Writes the weights between two training runs: (1 - share) · first + share · second, in f32.

    python -m examples.demo_model.average --first DIR --second DIR --share 0.6 --out DIR

The second run must have started from the first. Averages of such runs keep most of what either does well, see Wortsman et al.,
"Robust fine-tuning of zero-shot models" (2022).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from examples.demo_model.config import Shape
from examples.demo_model.export import load_start, save_weights


def average(first: dict[str, Tensor], second: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Raises ValueError if the two do not hold the same names."""
    if first.keys() != second.keys():
        raise ValueError(f"the two runs differ in {sorted(first.keys() ^ second.keys())}")
    return {name: torch.lerp(value, second[name], share) for name, value in first.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Average the weights of two training runs")
    parser.add_argument("--first", type=Path, required=True)
    parser.add_argument("--second", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.6, help="of the second")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    first, second = (load_start(folder, Shape()) for folder in (options.first, options.second))
    save_weights(average(first, second, options.share), Shape(), options.out)


if __name__ == "__main__":
    main()
