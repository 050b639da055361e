"""One call of every kernel at a model's geometry, with the bytes and the arithmetic that it cannot avoid.

Used with real tensors (to time), with tiny ones (to see that the cases run), and with meta tensors (to compile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from engine.kernels import triton as ops
from engine.moe.device_state import SlotState


@dataclass(frozen=True, slots=True)
class Geometry:
    """slots: of the expert pool. context: tokens in the state before. prefill: tokens of a long suffix."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    k_heads: int
    v_heads: int
    d_k: int
    d_v: int
    experts: int
    top_k: int
    inter: int
    vocab: int
    slots: int
    layers: int
    page: int
    context: int
    prefill: int

    @property
    def projected(self) -> int:
        return (2 * self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.k_heads * self.d_k + self.v_heads * self.d_v


QWEN36 = Geometry(2048, 16, 2, 256, 64, 16, 32, 128, 128, 256, 8, 512, 248320, 1280, 20, 64, 8192, 2048)
"""Qwen3.6-35B-A3B at half depth, a quarter of the experts resident."""

TINY = Geometry(64, 4, 2, 32, 16, 2, 4, 16, 16, 8, 2, 32, 128, 6, 2, 16, 40, 40)


@dataclass(frozen=True, slots=True)
class Case:
    """run launches the kernel once. bytes: weights, state and activations that must move. flops: multiply-adds times two."""

    name: str
    run: Callable[[], None]
    bytes: int
    flops: int = 0


class Maker:
    """Tensors on one device; on meta nothing is filled."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        return out if self.device == "meta" else out.normal_(std=0.05)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def ints(self, values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def cases(geometry: Geometry, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Every kernel, decode with one and with four tokens, prefill. Built one at a time: tensors are freed between them."""
    make = Maker(device, dtype)
    for tokens in (1, 4):
        yield from _dense(geometry, make, tokens)
        yield from _decode_attention(geometry, make, tokens)
        yield from _recurrent(geometry, make, [1] * tokens)
        yield from _admission(geometry, make, tokens)
        yield from _experts(geometry, make, tokens)
        yield from _handoff(geometry, make, tokens)
    suffixes = sorted({min(tokens, geometry.prefill) for tokens in (64, 256, 1024, geometry.prefill)})
    for tokens in suffixes:
        yield from _prefill_attention(geometry, make, tokens)
        yield from _recurrent(geometry, make, [tokens])
    yield from _union(geometry, make)
    for tokens in sorted({min(64, geometry.prefill), geometry.prefill}):
        yield from _grouped(geometry, make, tokens)


def _dense(g: Geometry, make: Maker, tokens: int) -> Iterator[Case]:
    f32 = torch.float32
    residual, delta, norm = (
        make.values(tokens, g.hidden, dtype=f32),
        make.values(tokens, g.hidden),
        make.values(g.hidden, dtype=f32),
    )
    normed = make.empty(tokens, g.hidden)
    run = partial(ops.add_norm, residual, delta, norm, 1e-6, normed)
    yield Case(f"add_norm t{tokens}", run, size(residual, residual, delta, normed))
    scores, ids = make.values(tokens, g.experts + 1, dtype=f32), make.ints([[0] * g.top_k] * tokens)
    weights = make.empty(tokens, g.top_k, dtype=f32)
    yield Case(f"route t{tokens}", partial(ops.route, scores, g.experts, True, None, ids, weights), size(scores, ids, weights))
    table, ids = make.values(g.vocab, g.hidden), make.ints([0] * tokens)
    yield Case(f"gather t{tokens}", partial(ops.gather, table, ids, residual), size(residual, delta))
    for name, n, k, out in (
        ("delta in", g.conv_dim + g.v_heads * (g.d_v + 2), g.hidden, None),
        ("delta out", g.hidden, g.v_heads * g.d_v, None),
        ("router", g.experts + 1, g.hidden, f32),
        ("head", g.vocab, g.hidden, f32),
    ):
        x, weight, y = make.values(tokens, k), make.values(n, k), make.empty(tokens, n, dtype=out)
        run = partial(ops.linear, x, weight, None, y)
        yield Case(f"linear {name} t{tokens}", run, size(x, weight, y), 2 * tokens * n * k)
    both, inner = make.values(tokens, 2 * g.inter), make.empty(tokens, g.inter)
    yield Case(f"silu_mul t{tokens}", partial(ops.silu_mul, both, inner), size(both, inner))
    z, x, out = (make.values(tokens, g.v_heads, g.d_v, dtype=d) for d in (None, f32, None))
    run = partial(ops.gated_norm, x, z, make.values(g.d_v, dtype=f32), 1e-6, out)
    yield Case(f"gated_norm t{tokens}", run, size(x, z, out))
    projected = make.values(tokens, g.projected)
    weights = [make.values(g.head_dim, dtype=f32) for _ in range(2)]
    angles = [make.values(64, g.rotated // 2, dtype=f32) for _ in range(2)]
    pools = [make.values(4, g.page, g.kv_heads, g.head_dim) for _ in range(2)]
    where = make.ints(list(range(tokens)))
    q = make.empty(tokens, g.heads, g.head_dim)
    run = partial(ops.attend_prepare, projected, *weights, 1e-6, *angles, where, where, *pools, q, True)
    yield Case(f"attend_prepare t{tokens}", run, 2 * size(projected))
    box, counts, status = make.values(tokens, g.hidden, dtype=f32), make.ints([0, 1, 0, 0]), make.ints([0, 0, 0, 0])
    run = partial(ops.merge, residual, residual, box, counts, status, delta, make.values(tokens, 1, dtype=f32))
    yield Case(f"merge t{tokens}", run, size(residual, residual, residual, box, delta))
    logits, guesses, turn = make.values(tokens, g.vocab, dtype=f32), make.ints([0] * tokens), make.ints([0])
    found = make.ints([[0] * (tokens + 1)] * 2)
    for name, setting in (("greedy", (0.0, 0.0, 1.0)), ("top-k", (0.7, 20.0, 0.95)), ("whole row", (0.7, 0.0, 1.0))):
        draws = make.ints([[value] * tokens for value in (*setting, 0.0, 0.5, 0.0)], f32)
        run = partial(ops.guess, logits, draws, turn, guesses, found)
        yield Case(f"guess {name} t{tokens}", run, size(logits))
    told, tables = make.ints([[[0] * tokens] * 11] * 2), make.ints([[0] * tokens] * 11)
    yield Case(f"begin t{tokens}", partial(ops.begin, told, guesses, turn, tables, found), 2 * size(tables))


def _pages(g: Geometry, make: Maker, seqs: int, tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Pools that hold `tokens` positions of each sequence, and the page table."""
    each = -(-tokens // g.page)
    pools = [make.values(seqs * each, g.page, g.kv_heads, g.head_dim) for _ in range(2)]
    return pools, make.ints([list(range(s * each, (s + 1) * each)) for s in range(seqs)])


def _decode_attention(g: Geometry, make: Maker, batch: int) -> Iterator[Case]:
    pools, pages = _pages(g, make, batch, g.context + 1)
    q, gate = make.values(batch, g.heads, g.head_dim), make.values(batch, g.heads, g.head_dim)
    out = make.empty(batch, g.heads * g.head_dim)
    scratch = make.empty(ops.decode_scratch(batch, g.heads, g.head_dim), dtype=torch.float32)
    run = partial(ops.decode_attention, q, *pools, pages, make.ints([g.context] * batch), 0.06, gate, out, scratch)
    yield Case(f"decode_attention t{batch}", run, size(*pools, q, gate, out), 4 * q.numel() * g.context)


def _prefill_attention(g: Geometry, make: Maker, tokens: int) -> Iterator[Case]:
    pools, pages = _pages(g, make, 1, g.context + tokens)
    q, gate = make.values(tokens, g.heads, g.head_dim), make.values(tokens, g.heads, g.head_dim)
    out = make.empty(tokens, g.heads * g.head_dim)
    where = (pages, make.ints([0, tokens]), make.ints([g.context]), tokens)
    run = partial(ops.prefill_attention, q, *pools, *where, 0.06, gate, out)
    yield Case(f"prefill_attention {tokens}", run, size(*pools, q, gate, out), 4 * q.numel() * (g.context + tokens // 2))


def _recurrent(g: Geometry, make: Maker, lengths: list[int]) -> Iterator[Case]:
    tokens, seqs, longest, kernel = sum(lengths), len(lengths), max(lengths), 4
    name = f"t{tokens}" if longest == 1 else str(tokens)
    starts, contexts = make.ints([sum(lengths[:s]) for s in range(seqs + 1)]), make.ints([g.context] * seqs)
    rows = make.ints(list(range(seqs)))
    x, weight, out = make.values(tokens, g.conv_dim), make.values(g.conv_dim, kernel), make.empty(tokens, g.conv_dim)
    tails = make.values(seqs, g.conv_dim, kernel - 1)
    run = partial(ops.conv, x, weight, tails, starts, contexts, rows, longest, out)
    yield Case(f"conv {name}", run, size(x, out, tails, tails))
    a, b = make.values(tokens, g.v_heads), make.values(tokens, g.v_heads)
    gates = [make.values(g.v_heads, dtype=torch.float32) for _ in range(2)]
    states = make.values(seqs, g.v_heads, g.d_k, g.d_v, dtype=torch.float32)
    y = make.empty(tokens, g.v_heads, g.d_v, dtype=torch.float32)
    run = partial(ops.delta, x, a, b, *gates, states, starts, contexts, rows, longest, g.k_heads, y)
    flops = 6 * tokens * states[0].numel()
    yield Case(f"delta {name}", run, size(x, y, states, states), flops)


def _slots(g: Geometry, make: Maker, policy: str) -> SlotState:
    return SlotState.empty(g.layers, g.experts, g.slots, policy, torch.device(make.device))


def _routes(g: Geometry, make: Maker, tokens: int) -> torch.Tensor:
    """Distinct random experts for each token."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, g.experts, generator=generator).topk(g.top_k).indices.int().to(make.device)


def _admission(g: Geometry, make: Maker, tokens: int) -> Iterator[Case]:
    ids, table = _routes(g, make, tokens), make.ints(list(range(g.experts + 1)))
    outputs, work = [make.empty(*ids.shape, dtype=torch.int32) for _ in range(3)], make.ints([[0, 0]] * g.experts)
    counts = make.ints([0] * 4)
    for policy in ("lru", "lru_floor", "frequency"):
        state = _slots(g, make, policy)
        run = partial(ops.admit, state, 0, ids, table, *outputs, work, counts)
        yield Case(f"admit {policy} t{tokens}", run, size(state.id_of_slot, state.last_use))


def _union(g: Geometry, make: Maker) -> Iterator[Case]:
    ids, state = _routes(g, make, g.prefill), _slots(g, make, "lru_floor")
    table = make.ints(list(range(g.experts + 1)))
    slot_of, cpu = make.ints([0] * g.experts), make.empty(*ids.shape, dtype=torch.int32)
    work, counts = make.ints([[0, 0]] * g.experts), make.ints([0] * 4)
    for first in (True, False):
        run = partial(ops.union, state, 0, ids, 64, table, first, 0, slot_of, cpu, work, counts)
        yield Case(f"union {'first' if first else 'later'}", run, size(ids, cpu) if first else 0)


def _record(g: Geometry, make: Maker, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down as views of records, one a row: as a slot pool holds them."""
    values = memory.view(make.dtype)
    split = 2 * g.inter * g.hidden
    gate_up = values[:, :split].unflatten(1, (2 * g.inter, g.hidden))
    return gate_up, values[:, split : split + g.inter * g.hidden].unflatten(1, (g.hidden, g.inter))


def _record_bytes(g: Geometry, make: Maker) -> int:
    return -(-3 * g.inter * g.hidden * make.dtype.itemsize // 4096) * 4096


def _experts(g: Geometry, make: Maker, tokens: int) -> Iterator[Case]:
    slots = min(g.slots, tokens * g.top_k * 8)
    record = _record_bytes(g, make)
    memory = make.values(slots, record // make.dtype.itemsize).view(torch.uint8)
    ids = make.ints([[(t * g.top_k + j) * 7 % slots for j in range(g.top_k)] for t in range(tokens)])
    weights = make.values(tokens, g.top_k, dtype=torch.float32)
    x, inner = make.values(tokens, g.hidden), make.empty(tokens * g.top_k, g.inter)
    out = make.empty(tokens, g.hidden, dtype=torch.float32)
    run = partial(ops.slot_experts, x, ids, weights, *_record(g, make, memory), inner, out, False)
    pairs = ids.numel()
    yield Case(f"slot_experts t{tokens}", run, pairs * record, 6 * pairs * g.inter * g.hidden)
    bank = make.empty(8, record, dtype=torch.uint8)
    if make.device == "cuda":
        bank = torch.empty(8, record, dtype=torch.uint8, pin_memory=True)
    # Two experts on the CPU, a good third of which the device takes.
    there = make.ints([[t % 2 if j == 0 else -1 for j in range(g.top_k)] for t in range(tokens)])
    on_cpu, taken = min(tokens, 2), 3 * g.inter // 8
    counts, shares = make.ints([0, on_cpu, g.top_k - on_cpu, on_cpu]), make.ints([0, taken, taken])
    if make.device != "meta":
        bank.view(make.dtype).fill_(0.05)
    run = partial(ops.bank_experts, x, there, weights, counts, shares, *_record(g, make, bank), inner, out)
    yield Case(f"bank_experts t{tokens}", run, on_cpu * record * taken // g.inter, 6 * tokens * taken * g.hidden)
    if tokens == 1:
        work, counts = make.ints([[i, i] for i in range(4)]), make.ints([4, 0, 0, 0])
        yield Case("fetch 4 records", partial(ops.fetch, bank, memory, work, counts), 4 * record)


def _handoff(g: Geometry, make: Maker, tokens: int) -> Iterator[Case]:
    x, ids = make.values(tokens, g.hidden), _routes(g, make, tokens)
    weights, counts, epoch = make.values(tokens, g.top_k, dtype=torch.float32), make.ints([0, 1, 0, 0]), make.ints([0])

    def mapped(like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=True) if make.device == "cuda" else torch.empty_like(like)

    request, reply = mapped(make.ints([0] * 16)), mapped(make.ints([0] * 16))
    shares = make.ints([0])
    run = partial(ops.publish, x, ids, weights, counts, shares, epoch, 0, request, mapped(x), mapped(ids), mapped(weights))
    yield Case(f"publish t{tokens}", run, size(x, ids, weights))
    if tokens == 1:
        clock = make.ints([0] * 4, torch.int64)
        for begin in (True, False):
            yield Case(f"stamp {'begin' if begin else 'end'}", partial(ops.stamp, clock, counts, begin), size(clock))
        many, routes = make.values(64, g.hidden), _routes(g, make, 64)
        some = make.values(64, g.top_k, dtype=torch.float32)
        box = (mapped(many), mapped(routes), mapped(some))
        run = partial(ops.publish, many, routes, some, counts, shares, epoch, 0, request, *box)
        yield Case("publish t64", run, size(many, routes, some))
    if make.device != "meta":
        reply.zero_()
    run = partial(ops.wait_reply, counts, make.ints([0]), reply, 1_000_000, make.ints([0] * 4))
    yield Case(f"wait_reply t{tokens}", run, 64)


def _grouped(g: Geometry, make: Maker, tokens: int) -> Iterator[Case]:
    ids, pairs = _routes(g, make, tokens), tokens * g.top_k
    order, offsets = make.empty(pairs, dtype=torch.int32), make.empty(g.experts + 1, dtype=torch.int32)
    yield Case(f"group {tokens}", partial(ops.group, ids, g.experts, order, offsets), size(ids, order))
    record = _record_bytes(g, make)
    memory = make.values(g.experts, record // make.dtype.itemsize).view(torch.uint8)
    slot_of, weights = make.ints(list(range(g.experts))), make.values(tokens, g.top_k, dtype=torch.float32)
    x, inner = make.values(tokens, g.hidden), make.empty(pairs, g.inter)
    out = make.values(tokens, g.hidden, dtype=torch.float32)
    if make.device != "meta":
        ops.group(ids, g.experts, order, offsets)
    args = (x, ids, order, offsets, slot_of, weights, *_record(g, make, memory), inner, out)
    read = (len(torch.unique(ids)) if make.device != "meta" else g.experts) * record
    moved = read + size(x, out, out) + 2 * size(inner) + 2 * pairs * g.hidden * x.element_size()
    yield Case(f"grouped_experts {tokens}", partial(ops.grouped_experts, *args), moved, 6 * pairs * g.inter * g.hidden)
