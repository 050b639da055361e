"""bfloat16 weights, as most checkpoints ship them."""

import torch

from engine.quant.base import Format

FORMAT = Format(name="bf16", stored=("BF16", "F32"), dtype=torch.bfloat16, bits=16.0)
