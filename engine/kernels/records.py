"""Turns tensors into the records that the C++ library runs: one function per operation, all checks here.

Each function returns the record's bytes. `count` is the number of rows (or sequences), or one of native.ROWS, SEQS, OUTPUTS
to take it when the record runs. Tensors are CPU tensors, bf16 or f32 unless said otherwise, contiguous in the last dimension.
Raises ShapeMismatch for anything that does not fit.
"""

from __future__ import annotations

import torch

from engine.errors import ShapeMismatch
from engine.kernels import native

Tensor = torch.Tensor

_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_NO_POINTERS = (0,) * 14
_INT_MAX = 2**31 - 1


def _record(
    code: int, flags: int, pointers: tuple[int, ...], numbers: tuple[int, ...], floats: tuple[float, ...] = ()
) -> bytes:
    if max(numbers) > _INT_MAX:
        raise ShapeMismatch(f"a dimension or stride of {max(numbers)} exceeds the kernels' limit of {_INT_MAX}")
    return native.RECORD.pack(
        code,
        flags,
        *pointers,
        *_NO_POINTERS[len(pointers) :],
        *numbers,
        *_NO_POINTERS[len(numbers) :],
        *floats,
        *_NO_POINTERS[len(floats) : 4],
    )


def _bit(position: int, name: str, tensor: Tensor) -> int:
    bit = _BF16.get(tensor.dtype)
    if bit is None:
        raise ShapeMismatch(f"{name} is {tensor.dtype}, accepted: float32, bfloat16")
    return bit << position


def _pointer(name: str, tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        raise ShapeMismatch(f"{name} is on {tensor.device}, the CPU kernels need it in host memory")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeMismatch(f"{name} has stride {tensor.stride(-1)} in its last dimension, must be 1")
    return tensor.data_ptr()


def _whole(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    if not tensor.is_contiguous():
        raise ShapeMismatch(f"{name} of shape {list(tensor.shape)} is not contiguous")
    if dtype is not None and tensor.dtype != dtype:
        raise ShapeMismatch(f"{name} is {tensor.dtype}, must be {dtype}")
    if tensor.device.type != "cpu":
        raise ShapeMismatch(f"{name} is on {tensor.device}, the CPU kernels need it in host memory")
    return tensor.data_ptr()


def _rows_whole(name: str, tensor: Tensor) -> int:
    """Each row contiguous, at any distance from the next."""
    if len(tensor):
        _whole(name, tensor[0])
    return tensor.data_ptr()


def _expect(name: str, tensor: Tensor, *shape: int | None) -> None:
    got = tensor.shape
    if len(got) != len(shape) or any(want is not None and want != have for want, have in zip(shape, got, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeMismatch(f"{name} has shape {list(got)}, expected [{wanted}]")


def _enough(count: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[0] < count:
            raise ShapeMismatch(f"{name} has {tensor.shape[0]} rows, {count} are needed")


def gather(table: Tensor, ids: Tensor, out: Tensor, count: int) -> bytes:
    """out[i] = table[ids[i]]. table [n, width], ids int64 [count], out [count, width]. Ids outside give zeros."""
    _expect("table", table, None, None)
    _expect("out", out, None, table.shape[1])
    _enough(count, ids=ids, out=out)
    return _record(
        native.GATHER,
        _bit(0, "table", table) | _bit(1, "out", out),
        (_pointer("table", table), _whole("ids", ids, torch.int64), _pointer("out", out)),
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
    _enough(count, x=x, out=out, gate=gate)
    heads = x.shape[1] if x.dim() == 3 else 1
    flags = _bit(0, "x", x) | _bit(1, "weight", weight) | _bit(2, "out", out) | one_plus << 8
    pointers = (_pointer("x", x), _whole("weight", weight), _pointer("out", out))
    numbers = (count, heads, x.shape[-1], *_row_head(x), *_row_head(out))
    if gate is not None:
        flags |= _bit(3, "gate", gate)
        pointers, numbers = (*pointers, _pointer("gate", gate)), (*numbers, *_row_head(gate))
    return _record(native.RMSNORM, flags, pointers, numbers, (eps,))


def _row_head(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def linear(
    x: Tensor, weight: Tensor, out: Tensor, count: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> bytes:
    """out = x · weightᵀ (+ bias) (+ residual), summed in f32. x [rows, k], weight [n, k], out and residual [rows, n]."""
    _expect("weight", weight, None, None)
    n, k = weight.shape
    _expect("x", x, None, k)
    _expect("out", out, None, n)
    _enough(count, x=x, out=out, residual=residual)
    flags = _bit(0, "x", x) | _bit(1, "weight", weight) | _bit(2, "out", out)
    residual_at = residual_stride = bias_at = 0
    if residual is not None:
        _expect("residual", residual, None, n)
        flags |= _bit(3, "residual", residual)
        residual_at, residual_stride = _pointer("residual", residual), residual.stride(0)
    if bias is not None:
        _expect("bias", bias, n)
        flags |= _bit(4, "bias", bias)
        bias_at = _whole("bias", bias)
    return _record(
        native.LINEAR,
        flags,
        (_pointer("x", x), _whole("weight", weight), _pointer("out", out), residual_at, bias_at),
        (count, n, k, x.stride(0), out.stride(0), residual_stride),
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, count: int, positions: Tensor | None = None) -> bytes:
    """Rotate dimension i with i + r in place, r = cos.shape[1]. x [rows, heads, n]; cos, sin f32 [positions, r].

    positions: int64 [rows]; None: row i reads row i of the tables.
    """
    _expect("x", x, None, None, None)
    r = cos.shape[-1]
    _expect("sin", sin, *cos.shape)
    if 2 * r > x.shape[2]:
        raise ShapeMismatch(f"cannot rotate {2 * r} of {x.shape[2]} dimensions")
    _enough(count, x=x, positions=positions)
    if positions is None:
        _enough(count, cos=cos)
    return _record(
        native.ROPE,
        _bit(0, "x", x),
        (
            _pointer("x", x),
            0 if positions is None else _whole("positions", positions, torch.int64),
            _whole("cos", cos, torch.float32),
            _whole("sin", sin, torch.float32),
        ),
        (count, x.shape[1], 2 * r, x.stride(0), x.stride(1), cos.shape[0]),
    )


def _slices(count: int, page_table: Tensor, starts: Tensor, context: Tensor) -> tuple[int, int, int]:
    _enough(count, page_table=page_table, context=context)
    _enough(count + 1 if count > 0 else 1, starts=starts)
    return (
        _whole("page_table", page_table, torch.int32),
        _whole("starts", starts, torch.int32),
        _whole("context", context, torch.int32),
    )


def _check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    _expect("k_pool", k_pool, None, None, None, None)
    _expect("v_pool", v_pool, *k_pool.shape)
    if k_pool.dtype != v_pool.dtype:
        raise ShapeMismatch(f"k_pool is {k_pool.dtype}, v_pool {v_pool.dtype}")


def kv_store(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, starts: Tensor, context: Tensor, count: int
) -> bytes:
    """Write keys and values [rows, kv_heads, n] of `count` sequences to their pages.

    page_table int32 [sequences, pages]; starts int32 [sequences + 1], rows of the batch; context int32 [sequences].
    """
    _check_pools(k_pool, v_pool)
    heads, n = k_pool.shape[2:]
    for name, tensor in (("k", k), ("v", v)):
        _expect(name, tensor, None, heads, n)
        if tensor.stride(1) != n and heads > 1:
            raise ShapeMismatch(f"{name} has stride {tensor.stride(1)} between heads, must be {n}")
    if k.dtype != v.dtype:
        raise ShapeMismatch(f"k is {k.dtype}, v {v.dtype}")
    return _record(
        native.KV_STORE,
        _bit(0, "k", k) | _bit(1, "k_pool", k_pool),
        (
            _pointer("k", k),
            _pointer("v", v),
            _whole("k_pool", k_pool),
            _whole("v_pool", v_pool),
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
    _expect("q", q, None, None, n)
    heads = q.shape[1]
    if heads % kv_heads:
        raise ShapeMismatch(f"{heads} query heads are no multiple of {kv_heads} key heads")
    _expect("out", out, None, heads * n)
    return _record(
        native.ATTENTION,
        _bit(0, "q", q) | _bit(1, "k_pool", k_pool) | _bit(2, "out", out),
        (
            _pointer("q", q),
            _whole("k_pool", k_pool),
            _whole("v_pool", v_pool),
            *_slices(count, page_table, starts, context),
            _pointer("out", out),
        ),
        (count, heads, kv_heads, n, k_pool.shape[1], page_table.shape[1], q.stride(0), q.stride(1), out.stride(0)),
        (scale,),
    )


def _recurrent(count: int, rows: Tensor, starts: Tensor, context: Tensor) -> tuple[int, int, int]:
    _enough(count, rows=rows, context=context)
    _enough(count + 1 if count > 0 else 1, starts=starts)
    return (
        _whole("rows", rows, torch.int32),
        _whole("starts", starts, torch.int32),
        _whole("context", context, torch.int32),
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
    _expect("x", x, None, channels)
    _expect("out", out, None, channels)
    _expect("state", state, None, channels, kernel - 1)
    if not 2 <= kernel <= 8:
        raise ShapeMismatch(f"a convolution over {kernel} tokens, accepted: 2 to 8")
    flags = _bit(0, "x", x) | _bit(1, "weight", weight) | _bit(2, "state", state) | _bit(3, "out", out) | silu << 8
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape[:1]):
        raise ShapeMismatch(f"bias {list(bias.shape)} {bias.dtype} does not fit weight {list(weight.shape)} {weight.dtype}")
    pointers = (
        _pointer("x", x),
        _whole("weight", weight),
        0 if bias is None else _whole("bias", bias),
        _whole("state", state),
        *_recurrent(count, rows, starts, context),
        _pointer("out", out),
        0 if cuts is None else _whole("cuts", cuts, torch.int32),
    )
    return _record(native.CONV, flags, pointers, (count, channels, kernel, x.stride(0), out.stride(0)))


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
    _expect("state", state, None, None, None, None)
    v_heads, d_k, d_v = state.shape[1:]
    _expect("q", q, None, None, d_k)
    k_heads = q.shape[1]
    _expect("k", k, None, k_heads, d_k)
    _expect("v", v, None, v_heads, d_v)
    _expect("out", out, None, v_heads, d_v)
    _expect("a", a, None, v_heads)
    _expect("b", b, None, v_heads)
    if v_heads % k_heads:
        raise ShapeMismatch(f"{v_heads} value heads are no multiple of {k_heads} key heads")
    for name, tensor, width in (("q", q, d_k), ("k", k, d_k), ("v", v, d_v), ("out", out, d_v)):
        if tensor.shape[1] > 1 and tensor.stride(1) != width:
            raise ShapeMismatch(f"{name} has stride {tensor.stride(1)} between heads, must be {width}")
    if q.dtype != k.dtype or q.dtype != v.dtype or a.dtype != b.dtype:
        raise ShapeMismatch(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} and a, b {a.dtype}, {b.dtype}: must agree")
    flags = _bit(0, "q", q) | _bit(1, "a", a) | _bit(2, "out", out)
    a_log = dt_bias = 0
    if gates is None:
        flags |= 1 << 8
    else:
        _expect("A_log", gates[0], v_heads)
        _expect("dt_bias", gates[1], v_heads)
        flags |= _bit(3, "A_log", gates[0]) | _bit(4, "dt_bias", gates[1])
        a_log, dt_bias = _whole("A_log", gates[0]), _whole("dt_bias", gates[1])
    pointers = (
        _pointer("q", q),
        _pointer("k", k),
        _pointer("v", v),
        _pointer("a", a),
        _pointer("b", b),
        a_log,
        dt_bias,
        _whole("state", state, torch.float32),
        *_recurrent(count, rows, starts, context),
        _pointer("out", out),
        0 if cuts is None else _whole("cuts", cuts, torch.int32),
    )
    strides = (q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), out.stride(0))
    return _record(native.DELTA, flags, pointers, (count, k_heads, v_heads, d_k, d_v, *strides), (1e-6, d_k**-0.5))


def route(logits: Tensor, ids: Tensor, weights: Tensor, normalize: bool, count: int) -> bytes:
    """Softmax in f32, then the best of each row: ids int32 and weights f32 [rows, top_k], best first."""
    _expect("logits", logits, None, None)
    _expect("weights", weights, *ids.shape)
    if not 0 < ids.shape[1] <= logits.shape[1]:
        raise ShapeMismatch(f"top {ids.shape[1]} of {logits.shape[1]} experts")
    _enough(count, logits=logits, ids=ids)
    return _record(
        native.ROUTE,
        _bit(0, "logits", logits) | normalize << 8,
        (_pointer("logits", logits), _whole("ids", ids, torch.int32), _whole("weights", weights, torch.float32)),
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
) -> bytes:
    """out = Σ weight · down(silu(gate x) · up x) over each row's experts (+ residual), summed in f32. ids of −1 are skipped.

    x, out [rows, hidden]; ids int32, weights f32 [rows, top_k]; gate_up [E, 2·inter, hidden], down [E, hidden, inter], any
    distance from one expert to the next.
    """
    _expect("gate_up", gate_up, None, None, None)
    n, twice, hidden = gate_up.shape
    _expect("down", down, n, hidden, twice // 2)
    if gate_up.dtype != down.dtype:
        raise ShapeMismatch(f"gate_up is {gate_up.dtype}, down {down.dtype}")
    _expect("x", x, None, hidden)
    _expect("out", out, None, hidden)
    _expect("ids", ids, None, None)
    _expect("weights", weights, *ids.shape)
    _enough(count, x=x, ids=ids, out=out, residual=residual)
    flags = _bit(0, "x", x) | _bit(1, "gate_up", gate_up) | _bit(2, "out", out)
    residual_at = residual_stride = 0
    if residual is not None:
        _expect("residual", residual, None, hidden)
        flags |= _bit(3, "residual", residual)
        residual_at, residual_stride = _pointer("residual", residual), residual.stride(0)
    pointers = (
        _pointer("x", x),
        _whole("ids", ids, torch.int32),
        _whole("weights", weights, torch.float32),
        _rows_whole("gate_up", gate_up),
        _rows_whole("down", down),
        _pointer("out", out),
        residual_at,
    )
    strides = (x.stride(0), out.stride(0), residual_stride, gate_up.stride(0), down.stride(0))
    numbers = (count, hidden, twice // 2, ids.shape[1], n, *strides)
    return _record(native.EXPERTS, flags, pointers, numbers)


def silu_mul(gate: Tensor, up: Tensor, out: Tensor, count: int) -> bytes:
    """out = silu(gate) · up, all [rows, n]."""
    _expect("up", up, None, gate.shape[1])
    _expect("out", out, None, gate.shape[1])
    _enough(count, gate=gate, up=up, out=out)
    return _record(
        native.SILU_MUL,
        _bit(0, "gate", gate) | _bit(1, "up", up) | _bit(2, "out", out),
        (_pointer("gate", gate), _pointer("up", up), _pointer("out", out)),
        (count, gate.shape[1], gate.stride(0), up.stride(0), out.stride(0)),
    )


def sigmoid_mul(x: Tensor, gate: Tensor, out: Tensor, count: int) -> bytes:
    """out = x · sigmoid(gate), all [rows, n] or all [rows, heads, n]."""
    if x.dim() not in (2, 3) or gate.shape[1:] != x.shape[1:] or out.shape[1:] != x.shape[1:]:
        raise ShapeMismatch(f"x {list(x.shape)}, gate {list(gate.shape)} and out {list(out.shape)} do not fit together")
    _enough(count, x=x, gate=gate, out=out)
    return _record(
        native.SIGMOID_MUL,
        _bit(0, "x", x) | _bit(1, "gate", gate) | _bit(2, "out", out),
        (_pointer("x", x), _pointer("gate", gate), _pointer("out", out)),
        (count, x.shape[1] if x.dim() == 3 else 1, x.shape[-1], *_row_head(x), *_row_head(gate), *_row_head(out)),
    )


def gated_add(a: Tensor | None, gate: Tensor | None, b: Tensor, out: Tensor, count: int) -> bytes:
    """out = a + sigmoid(gate) · b with one gate per row. a, b, out [rows, n]; gate [rows, any], its first column counts.

    a of None is zero, a gate of None is the factor one.
    """
    _expect("out", out, None, b.shape[1])
    _enough(count, a=a, gate=gate, b=b, out=out)
    flags = _bit(2, "b", b) | _bit(3, "out", out)
    a_at = a_stride = gate_at = gate_stride = 0
    if a is not None:
        _expect("a", a, None, b.shape[1])
        flags |= _bit(0, "a", a)
        a_at, a_stride = _pointer("a", a), a.stride(0)
    if gate is not None:
        flags |= _bit(1, "gate", gate)
        gate_at, gate_stride = gate.data_ptr(), gate.stride(0)
    return _record(
        native.GATED_ADD,
        flags,
        (a_at, gate_at, _pointer("b", b), _pointer("out", out)),
        (count, b.shape[1], a_stride, gate_stride, b.stride(0), out.stride(0)),
    )
