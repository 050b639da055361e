"""Fast CPU kernels: the functions of reference.py on the C++ library, and programs of many operations in one call.

Functions here take and return what reference.py says. A Program is for a step that runs again and again: record its
operations once over fixed buffers, then `run()` with the counts of the moment; nothing of Python runs in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch

from engine.errors import EngineError, ShapeMismatch
from engine.kernels import native, records
from engine.kernels.native import ISAS, OUTPUTS, ROWS, SEQS
from engine.kernels.reference import WHOLE, combine, delta_gates

NAME: Final = "cpu"

__all__ = [
    "ISAS",
    "NAME",
    "OUTPUTS",
    "ROWS",
    "SEQS",
    "Program",
    "advise_huge",
    "available",
    "causal_conv",
    "combine",
    "delta_gates",
    "expert_outputs",
    "experts_forward",
    "gated_delta_chunk",
    "gated_delta_step",
    "huge_empty",
    "isa",
    "isas",
    "linear",
    "paged_attention",
    "pool_stats",
    "reason",
    "rms_norm",
    "rope",
    "route",
    "run",
    "set_isa",
    "set_threads",
    "sigmoid_gate",
    "swiglu",
    "threads",
    "write_kv",
]

Tensor = torch.Tensor


def available() -> bool:
    """Whether the library is there. The first call that finds it missing logs one warning."""
    return native.load() is not None


def reason() -> str | None:
    """Why it is not there, for `doctor`; None when it is."""
    return native.reason()


def _library() -> ctypes.CDLL:
    library = native.load()
    if library is None:
        raise EngineError(f"CPU kernels are not available: {native.reason()}")
    return library


def isas() -> list[str]:
    """Instruction sets that this machine can run, plainest first."""
    library = _library()
    return [name for index, name in enumerate(ISAS) if library.asv_isa_supported(index)]


def isa() -> str:
    return ISAS[_library().asv_get_isa()]


def set_isa(name: str | None) -> None:
    """Use one instruction set, or with None the best. Raises EngineError if the machine lacks it."""
    if _library().asv_set_isa(-1 if name is None else ISAS.index(name)) != 0:
        raise EngineError(f"this machine has no {name}; it has {', '.join(isas())}")


def set_threads(threads: int, pin: bool = True) -> None:
    """Threads per operation, the caller's included. pin: bind each helper to one core (never the caller)."""
    if _library().asv_set_threads(threads, int(pin)) != 0:
        raise EngineError(f"cannot run {threads} threads")


def threads() -> int:
    return _library().asv_get_threads()


def pool_stats() -> dict[str, int]:
    """Loops run in parallel, loops run alone because helpers did not pay, microseconds waited for helpers."""
    out = (ctypes.c_uint64 * 3)()
    _library().asv_pool_stats(out)
    return {"parallel": out[0], "alone": out[1], "waited_us": out[2]}


def _check(status: int) -> None:
    if status != 0:
        raise EngineError("no memory for the kernels' scratch" if status < 0 else f"operation {status - 1} has an unknown code")


def advise_huge(tensor: Tensor) -> None:
    """Ask for 2 MiB pages behind memory, or a mapped file, that nothing has read yet; nothing happens where there are none.

    Decoding reads weights once per token, and with 4 KiB pages address translation limits it: 26 against 32 GB/s on one core of
    a Zen 5. A file gets them where its file system has large folios (ext4 and xfs on Linux 6.16 do) and only for what is not in
    the page cache in small pages already.
    """
    library = native.load()
    if library is not None:
        library.asv_advise_huge(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def huge_empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """torch.empty in 2 MiB pages where the system has them."""
    out = torch.empty(*shape, dtype=dtype)
    advise_huge(out)
    return out


def run(operation: Callable[..., bytes], *args: object, **kwargs: object) -> None:
    """Run one operation of records.py now. The tensors stay alive until it has finished."""
    _check(_library().asv_run(operation(*args, **kwargs), 1, 0, 0, 0))


class Program:
    """Operations recorded once and run as one native call: `program.add(records.linear, x, w, out, count=ROWS)`.

    Buffers stay where they are; ids, positions, page tables and so on are rewritten in place between runs. The tensors are
    kept alive here. Buffers must hold the largest counts that a run gives: the records cannot check those.
    """

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._tensors: list[object] = []
        self._packed: bytes | None = None
        self._call = _library().asv_run

    def __len__(self) -> int:
        return len(self._records)

    def add(self, operation: Callable[..., bytes], *args: object, **kwargs: object) -> None:
        """Append one operation of records.py. Raises ShapeMismatch like it."""
        self._records.append(operation(*args, **kwargs))
        self._tensors.append((args, kwargs))
        self._packed = None

    def run(self, rows: int, seqs: int = 1, outputs: int = 1) -> None:
        """Run every operation in order. rows: tokens in the batch; seqs: sequences; outputs: rows whose logits are wanted."""
        if self._packed is None:
            self._packed = b"".join(self._records)
        _check(self._call(self._packed, len(self._records), rows, seqs, outputs))


def rms_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, one_plus: bool = False) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    flat = out if out.dim() == 3 else out.view(-1, out.shape[-1])
    if x.dim() not in (2, 3):
        x, gate = x.reshape(flat.shape), None if gate is None else gate.reshape(flat.shape)
    run(records.rms_norm, x, weight, flat, eps, flat.shape[0], gate, one_plus)
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    run(records.linear, x, weight, out, x.shape[0], bias, residual)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    run(records.rope, out, cos.contiguous(), sin.contiguous(), x.shape[0])
    return out


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    k_pool.view(-1, *k_pool.shape[2:])[slots] = k.to(k_pool.dtype)
    v_pool.view(-1, *v_pool.shape[2:])[slots] = v.to(v_pool.dtype)


def paged_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, context: int, scale: float) -> Tensor:
    tokens, heads, n = q.shape
    needed = -(-(context + tokens) // k_pool.shape[1])
    if page_table.numel() < needed:
        raise ShapeMismatch(f"{page_table.numel()} pages cannot hold {context + tokens} tokens, {needed} are needed")
    out = torch.empty(tokens, heads * n, dtype=q.dtype)
    starts, contexts = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    run(records.attention, q, k_pool, v_pool, page_table.view(1, -1), starts, contexts, out, scale, 1)
    return out.view(tokens, heads, n)


def _one_sequence(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """State row 0, one slice of `tokens`, not fresh."""
    return (
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
    )


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    run(records.conv, x, weight, state[None], *_one_sequence(x.shape[0]), out, 1)
    return out


def gated_delta_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    out = torch.empty(v.shape, dtype=torch.float32)
    run(records.delta, q, k, v, g, beta, None, state[None], *_one_sequence(v.shape[0]), out, 1)
    return out


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    return gated_delta_chunk(q[None], k[None], v[None], g[None], beta[None], state)[0]


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32)
    weights = torch.empty(logits.shape[0], top_k, dtype=torch.float32)
    run(records.route, logits, ids, weights, normalize, logits.shape[0])
    return ids, weights


def experts_forward(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, part: slice = WHOLE) -> Tensor:
    out = torch.empty(x.shape[0], x.shape[1], dtype=torch.float32)
    run(records.experts, x, ids, weights, gate_up, down, out, x.shape[0], part=part)
    return out


def expert_outputs(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, out: Tensor) -> None:
    # Each choice as a token of its own with one expert of weight one.
    top_k, each = ids.shape[1], torch.empty(ids.numel(), x.shape[1])
    alone = ids.reshape(-1, 1).contiguous()
    run(records.experts, x.repeat_interleave(top_k, 0), alone, torch.ones(alone.shape), gate_up, down, each, alone.shape[0])
    chosen = ids >= 0
    out[chosen] = each.view(*ids.shape, -1)[chosen]


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    both = linear(x, gate_up)
    inner = torch.empty(x.shape[0], down.shape[1], dtype=x.dtype)
    run(records.silu_mul, both[:, : down.shape[1]], both[:, down.shape[1] :], inner, x.shape[0])
    return linear(inner, down)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    if gate.shape != x.shape:
        return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    run(records.sigmoid_mul, x, gate, out, x.shape[0])
    return out
