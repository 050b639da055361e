"""Routing, and the experts that a row is routed to."""

from __future__ import annotations

import torch

from engine.errors import ShapeMismatch
from engine.kernels import native
from engine.kernels.records.build import bit, enough, expect, pointer, record, rows_whole, whole
from engine.kernels.reference import WHOLE

Tensor = torch.Tensor


def route(logits: Tensor, ids: Tensor, weights: Tensor, normalize: bool, count: int) -> bytes:
    """Softmax in f32, then the best of each row: ids int32 and weights f32 [rows, top_k], best first."""
    expect("logits", logits, None, None)
    expect("weights", weights, *ids.shape)
    if not 0 < ids.shape[1] <= logits.shape[1]:
        raise ShapeMismatch(f"top {ids.shape[1]} of {logits.shape[1]} experts")
    enough(count, logits=logits, ids=ids)
    return record(
        native.ROUTE,
        bit(0, "logits", logits) | normalize << 8,
        (pointer("logits", logits), whole("ids", ids, torch.int32), whole("weights", weights, torch.float32)),
        (count, logits.shape[1], ids.shape[1], logits.stride(0)),
    )


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    out: Tensor,
    count: int,
    residual: Tensor | None = None,
    part: slice = WHOLE,
) -> bytes:
    """out = Σ weight · down(silu(gate x) · up x) over each row's experts (+ residual), summed in f32. ids of −1 are skipped.

    x, out [rows, hidden]; ids int32, weights f32 [rows, top_k]; gate_up [E, 2·inter, hidden], down [E, hidden, inter], any
    distance from one expert to the next. part: as reference.experts_forward.
    """
    expect("gate_up", gate_up, None, None, None)
    n, twice, hidden = gate_up.shape
    first, stop, step = part.indices(twice // 2)
    if step != 1 or stop <= first:
        raise ShapeMismatch(f"{part} is no part of {twice // 2} inner rows")
    expect("down", down, n, hidden, twice // 2)
    if gate_up.dtype != down.dtype:
        raise ShapeMismatch(f"gate_up is {gate_up.dtype}, down {down.dtype}")
    expect("x", x, None, hidden)
    expect("out", out, None, hidden)
    expect("ids", ids, None, None)
    expect("weights", weights, *ids.shape)
    enough(count, x=x, ids=ids, out=out, residual=residual)
    flags = bit(0, "x", x) | bit(1, "gate_up", gate_up) | bit(2, "out", out)
    residual_at = residual_stride = 0
    if residual is not None:
        expect("residual", residual, None, hidden)
        flags |= bit(3, "residual", residual)
        residual_at, residual_stride = pointer("residual", residual), residual.stride(0)
    pointers = (
        pointer("x", x),
        whole("ids", ids, torch.int32),
        whole("weights", weights, torch.float32),
        rows_whole("gate_up", gate_up) + first * hidden * gate_up.itemsize,
        rows_whole("down", down) + first * down.itemsize,
        pointer("out", out),
        residual_at,
    )
    strides = (x.stride(0), out.stride(0), residual_stride, gate_up.stride(0), down.stride(0))
    numbers = (count, hidden, stop - first, ids.shape[1], n, *strides, twice // 2)
    return record(native.EXPERTS, flags, pointers, numbers)
