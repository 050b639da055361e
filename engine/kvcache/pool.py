"""The bytes of keys and values, in pages. Chooses nothing; see allocator.py for which page is whose."""

from __future__ import annotations

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
        # The same memory as bytes, one row per token: [num_pages, page_size, width].
        self._bytes = [
            pool.view(num_pages, page_size, -1).view(torch.uint8) for pair in zip(self.k, self.v, strict=True) for pool in pair
        ]
        self.token_bytes = sum(pool.shape[2] for pool in self._bytes)

    def copy_head(self, source: int, dest: int, rows: int) -> None:
        """Copy the first `rows` positions of page source to page dest."""
        for pool in self._bytes:
            pool[dest, :rows] = pool[source, :rows]

    def fill(self, pages: np.ndarray, value: float) -> None:
        """Overwrite whole pages (poison)."""
        ids = torch.from_numpy(pages).long()
        for pool in (*self.k, *self.v):
            pool[ids] = value

    def read(self, pages: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Bytes of positions [start, stop) of a sequence whose page table is pages. uint8 [stop − start, token_bytes]."""
        first = start // self.page_size
        ids = torch.from_numpy(pages[first : -(-stop // self.page_size)]).long()
        skip = start - first * self.page_size
        out = torch.empty(stop - start, self.token_bytes, dtype=torch.uint8)
        at = 0
        for pool in self._bytes:
            width = pool.shape[2]
            rows = pool.index_select(0, ids).view(-1, width)
            out[:, at : at + width] = rows[skip : skip + stop - start]
            at += width
        return out.numpy()

    def write(self, pages: np.ndarray, start: int, rows: np.ndarray) -> None:
        """Inverse of read: put rows (uint8 [tokens, token_bytes]) at positions [start, start + tokens)."""
        position = torch.arange(start, start + len(rows))
        page = torch.from_numpy(pages).long()[position // self.page_size]
        slot = position % self.page_size
        # A copy: rows may come from a read-only mapping, which torch refuses to wrap without a warning.
        source = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        at = 0
        for pool in self._bytes:
            width = pool.shape[2]
            pool[page, slot] = source[:, at : at + width]
            at += width
