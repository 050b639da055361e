"""Operations that know of sequences: keys and values in their pages, attention, recurrent state."""

from __future__ import annotations

import torch

from engine.errors import ShapeMismatch
from engine.kernels import native
from engine.kernels.records.build import bit, enough, expect, pointer, record, whole

Tensor = torch.Tensor


def kv_store(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, starts: Tensor, context: Tensor, count: int
) -> bytes:
    """Write keys and values [rows, kv_heads, n] of `count` sequences to their pages.

    page_table int32 [sequences, pages]; starts int32 [sequences + 1], rows of the batch; context int32 [sequences].
    """
    _check_pools(k_pool, v_pool)
    heads, n = k_pool.shape[2:]
    for name, tensor in (("k", k), ("v", v)):
        expect(name, tensor, None, heads, n)
        if tensor.stride(1) != n and heads > 1:
            raise ShapeMismatch(f"{name} has stride {tensor.stride(1)} between heads, must be {n}")
    if k.dtype != v.dtype:
        raise ShapeMismatch(f"k is {k.dtype}, v {v.dtype}")
    return record(
        native.KV_STORE,
        bit(0, "k", k) | bit(1, "k_pool", k_pool),
        (
            pointer("k", k),
            pointer("v", v),
            whole("k_pool", k_pool),
            whole("v_pool", v_pool),
            *_slices(count, page_table, starts, context),
        ),
        (count, heads, n, k_pool.shape[1], page_table.shape[1], k.stride(0), v.stride(0)),
    )


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    starts: Tensor,
    context: Tensor,
    out: Tensor,
    scale: float,
    count: int,
) -> bytes:
    """Causal attention of each sequence's rows over its pages. q [rows, heads, n], out [rows, heads · n].

    The rows' own keys are in the pools already; a sequence's first row has position context.
    """
    _check_pools(k_pool, v_pool)
    kv_heads, n = k_pool.shape[2:]
    expect("q", q, None, None, n)
    heads = q.shape[1]
    if heads % kv_heads:
        raise ShapeMismatch(f"{heads} query heads are no multiple of {kv_heads} key heads")
    expect("out", out, None, heads * n)
    return record(
        native.ATTENTION,
        bit(0, "q", q) | bit(1, "k_pool", k_pool) | bit(2, "out", out),
        (
            pointer("q", q),
            whole("k_pool", k_pool),
            whole("v_pool", v_pool),
            *_slices(count, page_table, starts, context),
            pointer("out", out),
        ),
        (count, heads, kv_heads, n, k_pool.shape[1], page_table.shape[1], q.stride(0), q.stride(1), out.stride(0)),
        (scale,),
    )


def conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    rows: Tensor,
    starts: Tensor,
    context: Tensor,
    out: Tensor,
    count: int,
    bias: Tensor | None = None,
    silu: bool = True,
    cuts: Tensor | None = None,
) -> bytes:
    """Depthwise causal convolution and silu. x, out [rows, channels], weight [channels, K], state [n, channels, K − 1].

    rows: int32 [sequences], state row of each. A sequence with context 0 starts from zeros. cuts: int32 {count, then
    (sequence, offset, destination row) each}: after `offset` rows of its slice a sequence's state is also copied there.
    """
    channels, kernel = weight.shape
    expect("x", x, None, channels)
    expect("out", out, None, channels)
    expect("state", state, None, channels, kernel - 1)
    if not 2 <= kernel <= 8:
        raise ShapeMismatch(f"a convolution over {kernel} tokens, accepted: 2 to 8")
    flags = bit(0, "x", x) | bit(1, "weight", weight) | bit(2, "state", state) | bit(3, "out", out) | silu << 8
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        raise ShapeMismatch(f"bias {list(bias.shape)} {bias.dtype} does not fit weight {list(weight.shape)} {weight.dtype}")
    pointers = (
        pointer("x", x),
        whole("weight", weight),
        0 if bias is None else whole("bias", bias),
        whole("state", state),
        *_recurrent(count, rows, starts, context),
        pointer("out", out),
        0 if cuts is None else whole("cuts", cuts, torch.int32),
    )
    return record(native.CONV, flags, pointers, (count, channels, kernel, x.stride(0), out.stride(0)))


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    state: Tensor,
    rows: Tensor,
    starts: Tensor,
    context: Tensor,
    out: Tensor,
    count: int,
    cuts: Tensor | None = None,
) -> bytes:
    """Gated delta rule, token after token. q, k [rows, H_k, d_k], v [rows, H_v, d_v], state f32 [n, H_v, d_k, d_v].

    gates: (A_log, dt_bias), each [H_v], and a, b [rows, H_v] are projections; or None, and a is the log decay g, b is beta.
    q and k are divided by their norms here, q by √d_k too. out: [rows, H_v, d_v]. rows, starts, context, cuts: as in conv.
    """
    expect("state", state, None, None, None, None)
    v_heads, d_k, d_v = state.shape[1:]
    expect("q", q, None, None, d_k)
    k_heads = q.shape[1]
    expect("k", k, None, k_heads, d_k)
    expect("v", v, None, v_heads, d_v)
    expect("out", out, None, v_heads, d_v)
    expect("a", a, None, v_heads)
    expect("b", b, None, v_heads)
    if v_heads % k_heads:
        raise ShapeMismatch(f"{v_heads} value heads are no multiple of {k_heads} key heads")
    for name, tensor, width in (("q", q, d_k), ("k", k, d_k), ("v", v, d_v), ("out", out, d_v)):
        if tensor.shape[1] > 1 and tensor.stride(1) != width:
            raise ShapeMismatch(f"{name} has stride {tensor.stride(1)} between heads, must be {width}")
    if q.dtype != k.dtype or q.dtype != v.dtype or a.dtype != b.dtype:
        raise ShapeMismatch(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} and a, b {a.dtype}, {b.dtype}: must agree")
    flags = bit(0, "q", q) | bit(1, "a", a) | bit(2, "out", out)
    a_log = dt_bias = 0
    if gates is None:
        flags |= 1 << 8
    else:
        expect("A_log", gates[0], v_heads)
        expect("dt_bias", gates[1], v_heads)
        flags |= bit(3, "A_log", gates[0]) | bit(4, "dt_bias", gates[1])
        a_log, dt_bias = whole("A_log", gates[0]), whole("dt_bias", gates[1])
    pointers = (
        pointer("q", q),
        pointer("k", k),
        pointer("v", v),
        pointer("a", a),
        pointer("b", b),
        a_log,
        dt_bias,
        whole("state", state, torch.float32),
        *_recurrent(count, rows, starts, context),
        pointer("out", out),
        0 if cuts is None else whole("cuts", cuts, torch.int32),
    )
    strides = (q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), out.stride(0))
    return record(native.DELTA, flags, pointers, (count, k_heads, v_heads, d_k, d_v, *strides), (1e-6, d_k**-0.5))


def _slices(count: int, page_table: Tensor, starts: Tensor, context: Tensor) -> tuple[int, int, int]:
    enough(count, page_table=page_table, context=context)
    enough(count + 1 if count > 0 else 1, starts=starts)
    return (
        whole("page_table", page_table, torch.int32),
        whole("starts", starts, torch.int32),
        whole("context", context, torch.int32),
    )


def _check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    expect("k_pool", k_pool, None, None, None, None)
    expect("v_pool", v_pool, *k_pool.shape)
    if k_pool.dtype != v_pool.dtype:
        raise ShapeMismatch(f"k_pool is {k_pool.dtype}, v_pool {v_pool.dtype}")


def _recurrent(count: int, rows: Tensor, starts: Tensor, context: Tensor) -> tuple[int, int, int]:
    enough(count, rows=rows, context=context)
    enough(count + 1 if count > 0 else 1, starts=starts)
    return (
        whole("rows", rows, torch.int32),
        whole("starts", starts, torch.int32),
        whole("context", context, torch.int32),
    )
