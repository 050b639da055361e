"""Triton kernels of the GPU engine: `from engine.kernels import triton as ops`. Importing this needs triton.

Every function writes into tensors that it is given, reads counts and lengths from device tensors, launches fixed grids on the
current stream and never waits for the device, so a step of them can be captured as a CUDA graph. 2-d arguments may be views
with a row stride; the last dimension is contiguous. Without a GPU they run on CPU tensors under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from engine.kernels.triton.admission import admit, union
from engine.kernels.triton.attention import decode_attention, decode_scratch, prefill_attention
from engine.kernels.triton.begin import begin
from engine.kernels.triton.conv import conv
from engine.kernels.triton.delta import delta
from engine.kernels.triton.fetch import fetch
from engine.kernels.triton.group import group
from engine.kernels.triton.grouped_experts import grouped_experts
from engine.kernels.triton.guess import guess
from engine.kernels.triton.handoff import publish, stamp, wait_reply
from engine.kernels.triton.linear import linear
from engine.kernels.triton.norm import add_norm, gated_norm
from engine.kernels.triton.prepare import attend_prepare
from engine.kernels.triton.route import route
from engine.kernels.triton.rows import gather, merge, silu_mul
from engine.kernels.triton.slot_experts import bank_experts, slot_experts

__all__ = [
    "add_norm",
    "admit",
    "attend_prepare",
    "bank_experts",
    "begin",
    "conv",
    "decode_attention",
    "decode_scratch",
    "delta",
    "fetch",
    "gated_norm",
    "gather",
    "group",
    "grouped_experts",
    "guess",
    "linear",
    "merge",
    "prefill_attention",
    "publish",
    "route",
    "silu_mul",
    "slot_experts",
    "stamp",
    "union",
    "wait_reply",
]
