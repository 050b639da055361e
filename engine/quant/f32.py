"""float32 weights: tests, and the reference backend whatever the checkpoint stores."""

import torch

from engine.quant.base import Dense

FORMAT = Dense(name="f32", stored=("F32", "BF16"), dtype=torch.float32, tolerance=1e-6)
