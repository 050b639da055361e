"""Copies of whole expert records from pinned host memory into slots, driven by the device: the list's length lies there too."""

from __future__ import annotations

# Kernel bodies are Triton's language, which only looks like Python to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import config
from engine.kernels.triton.base import launch


@triton.jit
def _fetch(bank, pool, work, counts, words, bank_row, pool_row, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    pieces = tl.cdiv(words, WORDS)
    # Pieces of one record go to neighbouring blocks, so that the first record is whole first.
    for i in range(tl.program_id(0), tl.load(counts) * pieces, BLOCKS):
        record = i // pieces
        source, slot = tl.load(work + 2 * record).to(tl.int64), tl.load(work + 2 * record + 1).to(tl.int64)
        at = (i % pieces) * WORDS + tl.arange(0, WORDS)
        x = tl.load(bank + source * bank_row + at, mask=at < words)
        tl.store(pool + slot * pool_row + at, x, mask=at < words)


def fetch(bank: torch.Tensor, pool: torch.Tensor, work: torch.Tensor, counts: torch.Tensor, ctas: int = 8) -> None:
    """pool[work[i, 1]] = bank[work[i, 0]] for i < counts[0].

    bank: uint8 [rows, record bytes], pinned host memory (or device memory). pool: uint8 [slots, record bytes]. Records and
    strides are multiples of 16 bytes. work: int32 [W, 2]. ctas: blocks; 8 fill a link of 50 GB/s and leave the GPU alone.
    """
    record = bank.shape[1]
    if pool.shape[1] != record or record % 16 or bank.stride(0) % 16 or pool.stride(0) % 16 or not work.is_contiguous():
        raise ShapeMismatch(f"fetch of records of {record} bytes into slots of {pool.shape[1]}: multiples of 16 are needed")
    source, dest = bank.view(torch.int64), pool.view(torch.int64)
    words = record // 8
    launch(
        _fetch, (ctas,), source, dest, work, counts, words, source.stride(0), dest.stride(0),
        BLOCKS=ctas, WORDS=min(config.FETCH_WORDS, config.power(words)), num_warps=16,
    )  # fmt: skip
