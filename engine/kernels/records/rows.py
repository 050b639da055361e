"""Operations on rows by themselves: embeddings, norms, products, rotations, gates."""

from __future__ import annotations

import torch

from engine.errors import ShapeMismatch
from engine.kernels import native
from engine.kernels.records.build import bit, enough, expect, pointer, record, row_head, whole

Tensor = torch.Tensor


def gather(table: Tensor, ids: Tensor, out: Tensor, count: int) -> bytes:
    """out[i] = table[ids[i]]. table [n, width], ids int64 [count], out [count, width]. Ids outside give zeros."""
    expect("table", table, None, None)
    expect("out", out, None, table.shape[1])
    enough(count, ids=ids, out=out)
    return record(
        native.GATHER,
        bit(0, "table", table) | bit(1, "out", out),
        (pointer("table", table), whole("ids", ids, torch.int64), pointer("out", out)),
        (count, table.shape[1], table.shape[0], table.stride(0), out.stride(0)),
    )


def rms_norm(
    x: Tensor, weight: Tensor, out: Tensor, eps: float, count: int, gate: Tensor | None = None, one_plus: bool = False
) -> bytes:
    """out = x / rms(x) · weight (or · (1 + weight)), times silu(gate). x, out, gate: [rows, n] or [rows, heads, n]."""
    if x.dim() not in (2, 3) or out.shape[1:] != x.shape[1:] or weight.shape != x.shape[-1:]:
        raise ShapeMismatch(f"x {list(x.shape)}, weight {list(weight.shape)} and out {list(out.shape)} do not fit together")
    if gate is not None and gate.shape[1:] != x.shape[1:]:
        raise ShapeMismatch(f"gate {list(gate.shape)} does not fit x {list(x.shape)}")
    enough(count, x=x, out=out, gate=gate)
    heads = x.shape[1] if x.dim() == 3 else 1
    flags = bit(0, "x", x) | bit(1, "weight", weight) | bit(2, "out", out) | one_plus << 8
    pointers = (pointer("x", x), whole("weight", weight), pointer("out", out))
    numbers = (count, heads, x.shape[-1], *row_head(x), *row_head(out))
    if gate is not None:
        flags |= bit(3, "gate", gate)
        pointers, numbers = (*pointers, pointer("gate", gate)), (*numbers, *row_head(gate))
    return record(native.RMSNORM, flags, pointers, numbers, (eps,))


def linear(
    x: Tensor, weight: Tensor, out: Tensor, count: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> bytes:
    """out = x · weightᵀ (+ bias) (+ residual), summed in f32. x [rows, k], weight [n, k], out and residual [rows, n]."""
    expect("weight", weight, None, None)
    n, k = weight.shape
    expect("x", x, None, k)
    expect("out", out, None, n)
    enough(count, x=x, out=out, residual=residual)
    flags = bit(0, "x", x) | bit(1, "weight", weight) | bit(2, "out", out)
    residual_at = residual_stride = bias_at = 0
    if residual is not None:
        expect("residual", residual, None, n)
        flags |= bit(3, "residual", residual)
        residual_at, residual_stride = pointer("residual", residual), residual.stride(0)
    if bias is not None:
        expect("bias", bias, n)
        flags |= bit(4, "bias", bias)
        bias_at = whole("bias", bias)
    return record(
        native.LINEAR,
        flags,
        (pointer("x", x), whole("weight", weight), pointer("out", out), residual_at, bias_at),
        (count, n, k, x.stride(0), out.stride(0), residual_stride),
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, count: int, positions: Tensor | None = None) -> bytes:
    """Rotate dimension i with i + r in place, r = cos.shape[1]. x [rows, heads, n]; cos, sin f32 [positions, r].

    positions: int64 [rows]; None: row i reads row i of the tables.
    """
    expect("x", x, None, None, None)
    r = cos.shape[-1]
    expect("sin", sin, *cos.shape)
    if 2 * r > x.shape[2]:
        raise ShapeMismatch(f"cannot rotate {2 * r} of {x.shape[2]} dimensions")
    enough(count, x=x, positions=positions)
    if positions is None:
        enough(count, cos=cos)
    return record(
        native.ROPE,
        bit(0, "x", x),
        (
            pointer("x", x),
            0 if positions is None else whole("positions", positions, torch.int64),
            whole("cos", cos, torch.float32),
            whole("sin", sin, torch.float32),
        ),
        (count, x.shape[1], 2 * r, x.stride(0), x.stride(1), cos.shape[0]),
    )


def silu_mul(gate: Tensor, up: Tensor, out: Tensor, count: int) -> bytes:
    """out = silu(gate) · up, all [rows, n]."""
    expect("up", up, None, gate.shape[1])
    expect("out", out, None, gate.shape[1])
    enough(count, gate=gate, up=up, out=out)
    return record(
        native.SILU_MUL,
        bit(0, "gate", gate) | bit(1, "up", up) | bit(2, "out", out),
        (pointer("gate", gate), pointer("up", up), pointer("out", out)),
        (count, gate.shape[1], gate.stride(0), up.stride(0), out.stride(0)),
    )


def sigmoid_mul(x: Tensor, gate: Tensor, out: Tensor, count: int) -> bytes:
    """out = x · sigmoid(gate), all [rows, n] or all [rows, heads, n]."""
    if x.dim() not in (2, 3) or gate.shape[1:] != x.shape[1:] or out.shape[1:] != x.shape[1:]:
        raise ShapeMismatch(f"x {list(x.shape)}, gate {list(gate.shape)} and out {list(out.shape)} do not fit together")
    enough(count, x=x, gate=gate, out=out)
    return record(
        native.SIGMOID_MUL,
        bit(0, "x", x) | bit(1, "gate", gate) | bit(2, "out", out),
        (pointer("x", x), pointer("gate", gate), pointer("out", out)),
        (count, x.shape[1] if x.dim() == 3 else 1, x.shape[-1], *row_head(x), *row_head(gate), *row_head(out)),
    )


def gated_add(a: Tensor | None, gate: Tensor | None, b: Tensor, out: Tensor, count: int) -> bytes:
    """out = a + sigmoid(gate) · b with one gate per row. a, b, out [rows, n]; gate [rows, any], its first column counts.

    a of None is zero, a gate of None is the factor one.
    """
    expect("out", out, None, b.shape[1])
    enough(count, a=a, gate=gate, b=b, out=out)
    flags = bit(2, "b", b) | bit(3, "out", out)
    a_at = a_stride = gate_at = gate_stride = 0
    if a is not None:
        expect("a", a, None, b.shape[1])
        flags |= bit(0, "a", a)
        a_at, a_stride = pointer("a", a), a.stride(0)
    if gate is not None:
        flags |= bit(1, "gate", gate)
        gate_at, gate_stride = gate.data_ptr(), gate.stride(0)
    return record(
        native.GATED_ADD,
        flags,
        (a_at, gate_at, pointer("b", b), pointer("out", out)),
        (count, b.shape[1], a_stride, gate_stride, b.stride(0), out.stride(0)),
    )
