"""Turns tensors into the records that the C++ library runs: one function per operation, all checks here.

Each function returns the record's bytes. `count` is the number of rows (or sequences), or one of native.ROWS, SEQS, OUTPUTS
to take it when the record runs. Tensors are CPU tensors, bf16 or f32 unless said otherwise, contiguous in the last dimension.
Raises ShapeMismatch for anything that does not fit.
"""

from __future__ import annotations

from engine.kernels.records.experts import experts, route
from engine.kernels.records.rows import gated_add, gather, linear, rms_norm, rope, sigmoid_mul, silu_mul
from engine.kernels.records.sequences import attention, conv, delta, kv_store

__all__ = [
    "attention",
    "conv",
    "delta",
    "experts",
    "gated_add",
    "gather",
    "kv_store",
    "linear",
    "rms_norm",
    "rope",
    "route",
    "sigmoid_mul",
    "silu_mul",
]
