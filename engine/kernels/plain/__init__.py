"""The device's operations in plain torch: what the offloaded engine asks of a set of kernels, and what it runs on where there
is no other set.

Everything is written into tensors that the caller gives; nothing is returned, so a captured graph can replay the calls. `live`
and `contexts` of −1 mark rows that pad a batch to a graph's size: they change no state. A set of kernels must agree with this
one up to float rounding, and to the integer where there are only integers. Shapes: T tokens, B rows of a decode step, S
sequences.
"""

from __future__ import annotations

from engine.kernels.plain.admission import admit, union
from engine.kernels.plain.attention import attend_prepare, decode_attention, decode_scratch, prefill_attention
from engine.kernels.plain.delta import conv, delta
from engine.kernels.plain.dense import add_norm, begin, gated_norm, gather, linear, merge, silu_mul
from engine.kernels.plain.experts import bank_experts, group, grouped_experts, route, slot_experts
from engine.kernels.plain.guess import guess
from engine.kernels.plain.handoff import fetch, publish, stamp, wait_reply

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
