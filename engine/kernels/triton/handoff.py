"""The device's side of the hand-off to the CPU executor, through mapped host memory (layout: engine/moe/handoff.py).

A request's payload is written first and its epoch last, with a release at system scope; a reply's epoch is read with an acquire
at system scope. Both are PTX, for Triton has neither as plain loads and stores, and atomics over PCIe cost a round trip more.
The interpreter, which has one thread and no caches, loads and stores. A layer without CPU work does none of it.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import time

import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import INTERPRETED, launch

_ALONE_TOKENS = 4
"""Up to so many rows one block copies the payload and raises the flag; more are spread over the GPU first."""


@triton.jit
def _store_release(pointer, value):
    """Every thread of the block stores the same: call it behind a barrier."""
    if INTERPRETED:
        tl.store(pointer, value)
    else:
        tl.inline_asm_elementwise(
            "{ st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r", [pointer.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _load_acquire(pointer):
    if INTERPRETED:
        return tl.load(pointer)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _clock_ns():
    """Nanoseconds; 0 under the interpreter."""
    if INTERPRETED:
        return tl.zeros((), tl.int64)
    else:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _payload(x, counts, box_x, hidden, x_row, b_row, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.where(tl.load(counts + 1) > 0, hidden, 0)
    value = tl.load(x + tl.program_id(0).to(tl.int64) * x_row + at, mask=inside)
    tl.store(box_x + tl.program_id(0).to(tl.int64) * b_row + at, value, mask=inside)


@triton.jit
def _stamp(clock, counts, host_ns, BEGIN: tl.constexpr):
    """One thread's work: it reads what it adds to."""
    now = host_ns + _clock_ns()
    if BEGIN:
        tl.store(clock + 2, now)
    else:
        fetched = tl.load(counts)
        spent, records = tl.load(clock) + now - tl.load(clock + 2), tl.load(clock + 1) + fetched
        tl.debug_barrier()
        tl.store(clock, spent, mask=fetched > 0)
        tl.store(clock + 1, records, mask=fetched > 0)


@triton.jit(do_not_specialize=["layer", "tokens", "pairs"])
def _publish(
    x, ids, weights, counts, shares, epoch, request, box_x, box_ids, box_weights, layer, tokens, hidden, pairs, entries,
    x_row, b_row,
    COPY: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    if tl.load(counts + 1) <= 0:
        return
    if COPY:
        at = tl.arange(0, BLOCK)
        for token in range(0, tokens):
            for start in range(0, hidden, BLOCK):
                inside = start + at < hidden
                value = tl.load(x + token * x_row + start + at, mask=inside)
                tl.store(box_x + token * b_row + start + at, value, mask=inside)
    p = tl.arange(0, PAIRS)
    for start in range(0, pairs, PAIRS):
        inside = start + p < pairs
        tl.store(box_ids + start + p, tl.load(ids + start + p, mask=inside), mask=inside)
        tl.store(box_weights + start + p, tl.load(weights + start + p, mask=inside), mask=inside)
    now = tl.load(epoch) + 1
    tl.store(request + 1, layer)
    tl.store(request + 2, tokens)
    tl.store(request + 3, tl.load(shares + tl.minimum(tl.load(counts + 3), entries - 1)))
    tl.debug_barrier()
    tl.store(epoch, now)
    _store_release(request, now)


@triton.jit
def _wait_reply(counts, epoch, reply, status, limit):
    if (tl.load(counts + 1) > 0) & (tl.load(status) == 0):
        wanted = tl.load(epoch)
        began = _clock_ns()
        seen = _load_acquire(reply)
        late, polls = 0, 0
        while (seen != wanted) & (late == 0):
            seen = _load_acquire(reply)
            polls += 1
            spent = _clock_ns() - began
            if INTERPRETED:
                spent += polls * 1000
            late = tl.where(spent > limit, 1, 0)
        failed = tl.load(reply + 1, volatile=True)
        fault = tl.where(seen != wanted, 1, tl.where(failed != 0, 2, 0))
        tl.debug_barrier()
        tl.store(status, fault)
        tl.store(status + 1, wanted, mask=fault != 0)


def publish(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    counts: torch.Tensor,
    shares: torch.Tensor,
    epoch: torch.Tensor,
    layer: int,
    request: torch.Tensor,
    box_x: torch.Tensor,
    box_ids: torch.Tensor,
    box_weights: torch.Tensor,
) -> None:
    """If counts[1] says that the CPU has experts: copy the payload, raise the epoch, and publish it, last, as request[0].

    x: [T, H]. ids: int32 [T, k], −1 = not the CPU's. weights: f32 [T, k]. counts: int32 [4]. epoch: int32 [1] on the device.
    request: int32 [16], box_x [≥ T, H], box_ids and box_weights [≥ T, k]: mapped host memory. request[1] is the layer, [2] T.
    shares: int32 [n], how many inner rows the device takes of each expert for m = counts[3] misses (the last entry serves every
    larger m): request[3]. See slot_experts.bank_experts.
    """
    tokens, hidden = x.shape
    if box_x.shape[0] < tokens or box_x.shape[1] != hidden or box_ids.shape[1] != ids.shape[1] or ids.shape[0] != tokens:
        raise ShapeMismatch(f"publish of x {list(x.shape)}, ids {list(ids.shape)} through a box of {list(box_x.shape)}")
    if not all(t.is_contiguous() for t in (ids, weights, box_ids, box_weights)) or box_x.dtype != x.dtype:
        raise ShapeMismatch("publish wants contiguous ids and weights, and a box of x's type")
    block = min(4096, config.power(hidden))
    alone = tokens <= _ALONE_TOKENS
    if not alone:
        # Many rows by many blocks; the launch behind it starts when all of them are written.
        launch(
            _payload, (tokens, config.blocks(hidden, block)),
            x, counts, box_x, hidden, x.stride(0), box_x.stride(0), BLOCK=block,
        )  # fmt: skip
    launch(
        _publish, (1,), x, ids, weights, counts, shares, epoch, request, box_x, box_ids, box_weights,
        layer, tokens, hidden, ids.numel(), len(shares), x.stride(0), box_x.stride(0),
        COPY=alone, BLOCK=block, PAIRS=min(512, config.power(ids.numel())), num_warps=4,
    )  # fmt: skip


def wait_reply(counts: torch.Tensor, epoch: torch.Tensor, reply: torch.Tensor, limit_us: int, status: torch.Tensor) -> None:
    """If the CPU has experts and nothing went wrong before: wait until reply[0] is the epoch, limit_us at most.

    reply: int32 [16], mapped; reply[1] ≠ 0 says that the executor failed. status: int32 [4] on the device: [0] becomes 1 = no
    reply in time, 2 = failed, and [1] the epoch. One block waits, for a GPU has no better way that a graph can hold. Under the
    interpreter a poll counts as a microsecond.
    """
    launch(_wait_reply, (1,), counts, epoch, reply, status, 1000 * limit_us, num_warps=1)


def stamp(clock: torch.Tensor, counts: torch.Tensor, begin: bool) -> None:
    """Time the fetch between two stamps, for the link's measured rate.

    clock: int64 [4]: nanoseconds of fetches, records fetched, when the last one began. Without a fetch nothing is added.
    """
    host_ns = time.monotonic_ns() if INTERPRETED.value else 0
    launch(_stamp, (1,), clock, counts, host_ns, BEGIN=begin, num_warps=1)
