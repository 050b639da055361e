"""bfloat16 weights, as most checkpoints ship them."""

import torch

from engine.quant.base import Dense

FORMAT = Dense(name="bf16", stored=("BF16", "F32"), dtype=torch.bfloat16, tolerance=5e-3)
