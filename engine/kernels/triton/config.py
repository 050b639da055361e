"""Block sizes, warps and stages of every kernel, by shape: one fixed table, no autotuning.

Chosen by arithmetic for 132 multiprocessors, 227 KiB of shared memory each and 4.3 TB/s, and held to the limits of smaller
parts (99 KiB) where the shape allows. Plain integers: nothing here imports triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def power(n: int) -> int:
    """The least power of two ≥ n, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def blocks(n: int, size: int) -> int:
    """How many of this size cover n. Triton's own, called outside of kernels, takes 4 µs."""
    return -(-n // size)


@dataclass(frozen=True, slots=True)
class Tile:
    """rows × columns of the output (or of a row block), depth: how much of the inner dimension one iteration reads."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 1


def shared_bytes(capability: int) -> int:
    """What one block may have by a device's compute capability; newer ones have at least what their class had before."""
    known = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
    return known.get(capability, 99) * 1024


LARGE_SHARED = 200 * 1024
"""Blocks that may have this much belong to parts whose products read both operands from it (sm_90 and on)."""

GEMV_ROWS = 1
"""Activations with this many rows take the matrix-vector kernels: no tensor cores, every load in flight at once."""

SKINNY_ROWS = 64
"""Up to this many rows our own kernel multiplies; beyond, cuBLAS through torch."""


def gemv(n: int, k: int) -> Tile:
    """One row of activations. A block reads `columns` weight rows, `depth` values at a time."""
    depth = min(1024, power(k))
    columns = 8 if n >= 2048 else 4
    return Tile(1, columns, depth, warps=4)


def skinny(m: int, n: int, k: int, itemsize: int) -> Tile:
    """A few rows of activations. `columns` such that small matrices still fill the multiprocessors."""
    rows = min(64, max(16, power(m)))
    columns = 32 if n >= 8192 else 16
    depth = min(max(16, power(k)), 512 // itemsize if rows <= 16 else 256 // itemsize)
    return Tile(rows, columns, depth, warps=4, stages=4)


def row_warps(n: int) -> int:
    """Warps for a kernel that holds one row of n values."""
    return 1 if n <= 256 else 4 if n <= 2048 else 8


def attention(head_dim: int, group: int, longest: int, itemsize: int, shared: int) -> Tile:
    """rows: queries × heads of a group in one block; columns: keys at a time. depth is unused (the whole head).

    A tile's copies begin when the one `stages` − 1 before it is done with. In decode its page is looked up in a stage of its
    own, two with the copies', so that 5 stages hold two tiles of keys and values at a time.
    """
    wide = head_dim * itemsize
    rows = max(16, min(128 if shared >= LARGE_SHARED else 64, power(group) * power(longest)))
    if itemsize > 2 or wide > 512:
        return Tile(min(rows, 64), 16, head_dim, warps=4, stages=1)
    keys = 64 if wide <= 256 else 32
    if rows > 64:
        return Tile(rows, 64, head_dim, warps=8, stages=2 if wide > 256 else 3)
    stages = 2 if rows > 16 else 5 if longest == 1 else 3
    return Tile(rows, keys, head_dim, warps=8 if rows * wide > 64 * 256 else 4, stages=stages)


def decode_splits(batch: int) -> int:
    """Into how many parts the keys of one sequence are divided in decode."""
    return max(1, min(64, 256 // power(batch)))


def prefill_splits(blocks: int) -> int:
    """Likewise in prefill, where `blocks` query blocks of up to 64 rows × key heads run anyway."""
    return max(1, min(16, 256 // power(blocks)))


def experts_gemv(inter: int, hidden: int) -> tuple[Tile, Tile]:
    """Decode with one token: gate·up, then down."""
    return Tile(1, 8, min(1024, power(hidden)), warps=4), Tile(1, 16, min(512, power(inter)), warps=8)


def experts_few(inter: int, hidden: int, tokens: int, itemsize: int) -> tuple[Tile, Tile]:
    """Decode with more tokens, 16 … 64 in a block: gate·up, then down."""
    rows = max(16, min(64, power(tokens)))
    depth = 512 // itemsize if rows == 16 else 256 // itemsize
    return (
        Tile(rows, 16, min(depth, max(16, power(hidden))), warps=4, stages=3),
        Tile(rows, 16, min(2 * depth, max(16, power(inter))), warps=4, stages=3),
    )


def grouped(pairs: int, experts: int, itemsize: int) -> tuple[Tile, Tile]:
    """Prefill: rows of one expert's tokens × its outputs. Rows follow the mean number of tokens that an expert gets."""
    mean = pairs // max(1, experts)
    if itemsize > 2:
        return Tile(16, 32, 32, warps=4, stages=2), Tile(16, 32, 32, warps=4, stages=2)
    if mean <= 16:
        return Tile(16, 64, 128, warps=4, stages=3), Tile(16, 64, 128, warps=4, stages=3)
    if mean <= 96:
        return Tile(64, 64, 64, warps=4, stages=3), Tile(64, 128, 64, warps=4, stages=3)
    return Tile(128, 64, 64, warps=8, stages=3), Tile(128, 128, 64, warps=8, stages=3)


CONV_CHANNELS = 256
CONV_TOKENS = 16

DELTA_CHUNK = 64
DELTA_STEP_COLUMNS = 32
DELTA_PREPARE_WARPS = 4


def delta_scan(d_v: int, itemsize: int, shared: int) -> Tile:
    """columns of one head's state that a block walks the chunks with: 32 of 128 keep 128 multiprocessors busy with 32 heads."""
    if itemsize > 2:
        return Tile(0, 16, 0, warps=4, stages=1)
    return Tile(0, min(32, d_v), 0, warps=4, stages=3 if shared >= LARGE_SHARED else 2)


GUESS_MOST = 512
"""Numbers of a row that are looked at for a draw by probability. Their comparisons with each other are 16k a block of 32."""


def guess_block(n: int) -> int:
    """Logits of one block: a row of 248k gives 243 of 1,024, one or two for each multiprocessor."""
    return max(128, min(1024, power(blocks(n, 256))))


def guess_bound(blocks: int) -> int:
    """What is picked is not below so many of the blocks' largest: of numbers in random order half of what there is room for."""
    return math.ceil(blocks * (1 - math.exp(-GUESS_MOST / 2 / blocks)))


FETCH_WORDS = 8192
"""64-bit words that one block of the fetch holds in flight: 8 blocks × 64 KiB cover the latency of the link."""
