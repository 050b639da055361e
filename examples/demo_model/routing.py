"""How often consecutive tokens use the same experts, by layer, on held-out sessions.

python -m examples.demo_model.routing --model agentserve/demo_model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

from examples.demo_model.config import Shape
from examples.demo_model.data import make_batch
from examples.demo_model.export import from_hf
from examples.demo_model.model import Forward
from examples.demo_model.rows import Encoder


@torch.inference_mode()
def overlap(folder: Path, rows: int = 6, length: int = 1024) -> list[float]:
    """For each layer the share of a token's experts that the token before it used too."""
    shape = Shape()
    params = from_hf(load_file(folder / "model.safetensors"), shape)
    encoder = Encoder(str(folder / "tokenizer.json"))
    pad = encoder.token("<|endoftext|>")
    ids, mask = make_batch(encoder, Random(5), rows, length, pad, held_out=True)
    if (mask == 0).mean() > 0.2:
        raise ValueError("more than a fifth of the batch is padding, which would flatter the figure")
    shares: list[float] = []
    forward = Forward(shape)
    moe = forward.moe

    def watched(*inputs):
        outputs = moe(*inputs)
        shares.append(outputs[3].item())
        return outputs

    forward._moe = watched
    forward.trunk(params, torch.from_numpy(ids.astype("int64")), length, torch.float32)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("agentserve/demo_model"))
    shares = overlap(parser.parse_args().model)
    shape = Shape()
    chance = shape.top_k / shape.experts
    print(
        json.dumps(
            {
                "by_layer": [round(s, 3) for s in shares],
                "mean": round(sum(shares) / len(shares), 3),
                "chance": chance,
            }
        )
    )


if __name__ == "__main__":
    main()
