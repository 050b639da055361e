"""The bytes of keys and values, in pages. Chooses nothing; see allocator.py for which page is whose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.models.base import ModelSpec


class KvPools:
    """k[ordinal], v[ordinal]: [num_pages, page_size, kv_heads, head_dim], contiguous, spec.dtype.

    Rows that no live position maps to hold anything, NaN included: a reader must not touch them.
    As bytes, one token is its keys then its values of layer ordinal 0, then of ordinal 1, and so on.
    """

    def __init__(self, spec: ModelSpec, num_pages: int, page_size: int) -> None:
        layers = len(spec.attention_layers)
        shape = (num_pages, page_size, spec.kv_heads, spec.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.k = [torch.zeros(shape, dtype=spec.dtype) for _ in range(layers)]
        self.v = [torch.zeros(shape, dtype=spec.dtype) for _ in range(layers)]
        # The same memory as plain words, one row per token: [num_pages, page_size, width]. Words of eight bytes where the
        # rows allow it: moving them one byte at a time takes six times as long.
        row_bytes = spec.kv_heads * spec.head_dim * spec.dtype.itemsize
        self._word = torch.int64 if row_bytes % 8 == 0 else torch.uint8
        self._words = [
            pool.view(num_pages, page_size, -1).view(self._word) for pair in zip(self.k, self.v, strict=True) for pool in pair
        ]
        # And as numpy sees it, beside the columns of a token's bytes that belong there: slices cost a third of torch's.
        width = row_bytes // self._word.itemsize
        self._columns = [(pool.numpy(), at * width, (at + 1) * width) for at, pool in enumerate(self._words)]
        self.token_bytes = len(self._words) * row_bytes

    def copy_head(self, source: int, dest: int, rows: int) -> None:
        """Copy the first `rows` positions of page source to page dest."""
        for pool, _, _ in self._columns:
            pool[dest, :rows] = pool[source, :rows]

    def fill(self, pages: np.ndarray, value: float) -> None:
        """Overwrite whole pages (poison)."""
        ids = torch.from_numpy(pages).long()
        for pool in (*self.k, *self.v):
            pool[ids] = value

    def read(self, pages: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Bytes of positions [start, stop) of a sequence whose page table is pages. uint8 [stop − start, token_bytes]."""
        size, itemsize = self.page_size, self._word.itemsize
        out = np.empty((stop - start, self.token_bytes // itemsize), np.int64 if itemsize == 8 else np.uint8)
        at = start
        while at < stop:
            page, offset = divmod(at, size)
            count = min(size - offset, stop - at)
            rows = out[at - start : at - start + count]
            for pool, first, end in self._columns:
                rows[:, first:end] = pool[pages[page], offset : offset + count]
            at += count
        return out.view(np.uint8)

    def write(self, pages: np.ndarray, start: int, rows: np.ndarray) -> None:
        """Inverse of read: put rows (uint8 [tokens, token_bytes]) at positions [start, start + tokens).

        Straight from where they lie, read-only or not: a context joined first needs as much memory again, and touching that
        for the first time cost ten times what the copy costs (10 ms for 4 MB on a virtual machine).
        """
        words = rows.view(np.int64 if self._word is torch.int64 else np.uint8)
        size, at = self.page_size, 0
        while at < len(words):
            page, offset = divmod(start + at, size)
            count = min(size - offset, len(words) - at)
            for pool, first, end in self._columns:
                pool[pages[page], offset : offset + count] = words[at : at + count, first:end]
            at += count

    def write_all(self, pages: np.ndarray, start: int, runs: Sequence[np.ndarray]) -> None:
        """write() of rows that follow one another."""
        for rows in runs:
            self.write(pages, start, rows)
            start += len(rows)
