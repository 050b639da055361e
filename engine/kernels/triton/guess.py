"""Which token will be drawn from each row of logits, and whether all of it is finite: what most steps want of them, in four
bytes a row.

A row of temperature 0 is the index of its largest, which every kernel here agrees on to the bit. Of the others the host draws
(engine/sampling.py), and this only has to be right nearly always. Without top-k and top-p the host goes through the row by id:
blocks of ids are weighed, then the one is gone through that holds the number. Else it goes by probability: what can come first
is picked, as many as MOST, by a bound that the largest of many blocks give; then each of these finds what comes before it by
looking at all others, which for a few hundred is quicker than sorting them. A nucleus that is wider than what was picked is
taken to end right where its mass does.
"""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import launch, workspace

TOGETHER = tl.constexpr(32)
"""Ids that lie in one block; the next ones are the next block's. Vocabularies begin with what is frequent, and a bound from the
blocks' largest is good where no block has many of the best."""
EACH = tl.constexpr(8)
"""Numbers that all others are compared with at a time, in registers."""


@triton.jit
def _spread(block, blocks, SIZE: tl.constexpr):
    """The ids of a block."""
    i = tl.arange(0, SIZE)
    return (i // TOGETHER * blocks + block) * TOGETHER + i % TOGETHER


@triton.jit
def _best_of_blocks(logits, tops, firsts, picked, n, blocks, l_row, SIZE: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = _spread(block, blocks, SIZE)
    inside = at < n
    x = tl.load(logits + row * l_row + at, mask=inside, other=0.0)
    finite = tl.abs(x) < float("inf")  # not so for NaN
    x = tl.where(inside & finite, x, float("-inf"))
    top = tl.max(x, 0)
    first = tl.min(tl.where(x == top, at, n), 0)
    broken = tl.max(tl.where(finite, 0, 1), 0)
    tl.store(tops + row * blocks + block, top)
    tl.store(firsts + row * blocks + block, tl.where(broken > 0, -1, first))
    if block == 0:
        tl.store(picked + row, 0)


@triton.jit
def _ranked(draws, row, n, d_row):
    """Whether the host goes by probability."""
    top_k = tl.load(draws + d_row + row)
    return ((top_k > 0) & (top_k < n)) | (tl.load(draws + 2 * d_row + row) < 1.0)


@triton.jit
def _weigh_blocks(
    logits, tops, draws, masses, picked, values, ids, n, blocks, bound, l_row, d_row,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(draws + row)
    if temperature > 0.0:
        other = tl.arange(0, BLOCKS)
        all_tops = tl.load(tops + row * blocks + other, mask=other < blocks, other=float("-inf"))
        top = tl.maximum(tl.max(all_tops, 0), -3e38)  # also where nothing is finite
        ranked = _ranked(draws, row, n, d_row)
        at = tl.where(ranked, _spread(block, blocks, SIZE), block * SIZE + tl.arange(0, SIZE))
        x = tl.load(logits + row * l_row + at, mask=at < n, other=float("-inf"))
        x = tl.where(tl.abs(x) < float("inf"), x, float("-inf"))
        weight = tl.exp((x - top) / temperature)
        limit = tl.where(ranked, 0.0, tl.load(draws + 3 * d_row + row))  # min-p, which ranked ones mind later
        tl.store(masses + row * blocks + block, tl.sum(tl.where(weight >= limit, weight, 0.0).to(tl.float64), 0))
        if ranked:
            # The k-th largest of the blocks' largest: k numbers at least are not below it, and not many more.
            top_k = tl.load(draws + d_row + row)
            k = tl.minimum(tl.where((top_k > 0) & (top_k < bound), top_k, bound * 1.0), blocks)
            above = tl.zeros([BLOCKS], dtype=tl.int32)
            for first in range(0, blocks, EACH):
                some = first + tl.arange(0, EACH)
                some_tops = tl.load(tops + row * blocks + some, mask=some < blocks, other=float("-inf"))
                above += tl.sum((some_tops[None, :] > all_tops[:, None]).to(tl.int32), 1)
            least = tl.min(tl.where((above < k) & (other < blocks), all_tops, float("inf")), 0)
            least = tl.where(n <= MOST, float("-inf"), least)
            pick = (x >= least) & (at < n)
            count = tl.sum(pick.to(tl.int32), 0)
            if count > 0:
                place = tl.atomic_add(picked + row, count) + tl.cumsum(pick.to(tl.int32), 0) - 1
                tl.store(values + row * MOST + place, x, mask=pick & (place < MOST))
                tl.store(ids + row * MOST + place, at, mask=pick & (place < MOST))


@triton.jit
def _by_rank(values, ids, count, total_mass, top, temperature, top_k, top_p, min_p, uniform, n, MOST: tl.constexpr):
    """Of what was picked: numbers and their ids, in any order."""
    at = tl.arange(0, MOST)
    inside = at < count
    x = tl.load(values + at, mask=inside, other=float("-inf"))
    mine = tl.load(ids + at, mask=inside, other=n)
    weight = tl.exp((x - top) / temperature)
    rank = tl.zeros([MOST], dtype=tl.int32)
    before = tl.zeros([MOST], dtype=tl.float32)
    for first in range(0, count, EACH):
        some = first + tl.arange(0, EACH)
        other_x = tl.load(values + some, mask=some < count, other=float("-inf"))[None, :]
        other_id = tl.load(ids + some, mask=some < count, other=n)[None, :]
        earlier = (other_x > x[:, None]) | ((other_x == x[:, None]) & (other_id < mine[:, None]))
        rank += tl.sum(earlier.to(tl.int32), 1)
        before += tl.sum(tl.where(earlier, tl.exp((other_x - top) / temperature), 0.0), 1)
    whole = (top_k <= 0) | (top_k >= n)  # top-p is of all tokens, not of the k best
    inside = inside & (rank < tl.where(whole, count, top_k.to(tl.int32)))
    covered = tl.sum(tl.where(inside, weight, 0.0), 0)
    reach = tl.where(top_p < 1.0, top_p * tl.where(whole, total_mass, covered), float("inf"))
    keep = inside & ((before < reach) | (rank == 0)) & (weight >= min_p)
    total = tl.sum(tl.where(keep, weight, 0.0), 0)
    least = tl.min(tl.where(inside, weight, 1.0), 0)
    total = tl.where(whole & (covered < reach) & (least >= min_p), reach, total)
    last = tl.max(tl.where(keep & (before <= uniform * total), rank, 0), 0)
    return tl.min(tl.where((at < count) & (rank == last), mine, n), 0)


@triton.jit
def _by_id(logits, mass, block, top, temperature, min_p, uniform, n, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """logits: of the row. mass: of its blocks, whose numbers are in `block`."""
    sums = tl.cumsum(mass, 0)
    target = uniform * tl.sum(mass, 0)
    here = tl.min(tl.where((sums > target) & (mass > 0.0), block, BLOCKS), 0)
    here = tl.where(here < BLOCKS, here, tl.max(tl.where(mass > 0.0, block, 0), 0))
    rest = target - tl.sum(tl.where(block == here, sums - mass, 0.0), 0)
    at = here * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + at, mask=at < n, other=float("-inf"))
    weight = tl.exp((x - top) / temperature)
    weight = tl.where(weight >= min_p, weight, 0.0).to(tl.float64)
    first = tl.min(tl.where((tl.cumsum(weight, 0) > rest) & (weight > 0.0), at, n), 0)
    return tl.where(first < n, first, tl.max(tl.where(weight > 0.0, at, 0), 0))


@triton.jit
def _choose(
    logits, tops, firsts, draws, masses, picked, values, ids, turn, guesses, found, n, blocks, l_row, d_row, f_row,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    all_tops = tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf"))
    all_firsts = tl.load(firsts + row * blocks + block, mask=block < blocks, other=n)
    top = tl.max(all_tops, 0)
    chosen = tl.min(tl.where(all_tops == top, all_firsts, n), 0)
    broken = tl.min(all_firsts, 0) < 0
    temperature = tl.load(draws + row)
    if (temperature > 0.0) & (broken == 0):
        top_k, top_p = tl.load(draws + d_row + row), tl.load(draws + 2 * d_row + row)
        min_p = tl.load(draws + 3 * d_row + row)
        uniform = tl.load(draws + 4 * d_row + row).to(tl.float64) + tl.load(draws + 5 * d_row + row).to(tl.float64)
        mass = tl.load(masses + row * blocks + block, mask=block < blocks, other=0.0)
        if _ranked(draws, row, n, d_row):
            count, total_mass = tl.minimum(tl.load(picked + row), MOST), tl.sum(mass, 0).to(tl.float32)
            chosen = _by_rank(
                values + row * MOST, ids + row * MOST, count, total_mass, top, temperature, top_k, top_p, min_p,
                uniform.to(tl.float32), n, MOST,
            )  # fmt: skip
        else:
            chosen = _by_id(logits + row * l_row, mass, block, top, temperature, min_p, uniform, n, SIZE, BLOCKS)
    chosen = tl.where(broken, -1, chosen)
    tl.store(guesses + row, chosen)
    tl.store(found + (tl.load(turn) & 1) * f_row + row, chosen)


def guess(logits: torch.Tensor, draws: torch.Tensor, turn: torch.Tensor, guesses: torch.Tensor, found: torch.Tensor) -> None:
    """guesses[r] = found[turn & 1, r] = the token that is probably drawn from logits[r]: the index of the largest, the lowest
    of several, where the temperature is 0; -1 where a value is NaN or infinite.

    logits: f32 [R, n]. draws: f32 [6, ≥ R]: temperature, top-k, top-p, min-p, and a number in [0, 1) as the sum of two.
    turn: int32 [1]. guesses: int32 [≥ R]. found: int32 [2, ≥ R], may be mapped host memory.
    """
    rows, n = logits.shape
    if len(guesses) < rows or found.shape[0] != 2 or found.shape[1] < rows or draws.shape[0] != 6 or draws.shape[1] < rows:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (logits, draws, guesses, found))
        raise ShapeMismatch(f"guess of logits, draws, guesses and found {shapes}")
    size, most = config.guess_block(n), config.GUESS_MOST
    blocks = config.blocks(n, size)
    tops = workspace("guess tops", rows * blocks, torch.float32, logits)
    firsts = workspace("guess firsts", rows * blocks, torch.int32, logits)
    masses = workspace("guess masses", rows * blocks, torch.float64, logits)
    picked = workspace("guess picked", rows, torch.int32, logits)
    values = workspace("guess values", rows * most, torch.float32, logits)
    ids = workspace("guess ids", rows * most, torch.int32, logits)
    l_row, d_row, padded = logits.stride(0), draws.stride(0), config.power(blocks)
    launch(_best_of_blocks, (rows, blocks), logits, tops, firsts, picked, n, blocks, l_row, SIZE=size)
    launch(
        _weigh_blocks, (rows, blocks), logits, tops, draws, masses, picked, values, ids, n, blocks,
        config.guess_bound(blocks), l_row, d_row, SIZE=size, BLOCKS=padded, MOST=most,
    )  # fmt: skip
    launch(
        _choose, (rows,), logits, tops, firsts, draws, masses, picked, values, ids, turn, guesses, found, n, blocks,
        l_row, d_row, found.stride(0), SIZE=size, BLOCKS=padded, MOST=most, num_warps=8,
    )  # fmt: skip
