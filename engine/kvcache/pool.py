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
        # The same memory as plain words, one row per token: [num_pages, page_size, width]. Words of eight bytes where the
        # rows allow it: moving them one byte at a time takes six times as long.
        row_bytes = spec.kv_heads * spec.head_dim * spec.dtype.itemsize
        self._word = torch.int64 if row_bytes % 8 == 0 else torch.uint8
        self._words = [
            pool.view(num_pages, page_size, -1).view(self._word) for pair in zip(self.k, self.v, strict=True) for pool in pair
        ]
        self.token_bytes = len(self._words) * row_bytes

    def copy_head(self, source: int, dest: int, rows: int) -> None:
        """Copy the first `rows` positions of page source to page dest."""
        for pool in self._words:
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
        out = torch.empty(stop - start, self.token_bytes // self._word.itemsize, dtype=self._word)
        at = 0
        for pool in self._words:
            width = pool.shape[2]
            rows = pool.index_select(0, ids).view(-1, width)
            out[:, at : at + width] = rows[skip : skip + stop - start]
            at += width
        return out.view(torch.uint8).numpy()

    def write(self, pages: np.ndarray, start: int, rows: np.ndarray) -> None:
        """Inverse of read: put rows (uint8 [tokens, token_bytes]) at positions [start, start + tokens)."""
        if len(rows) == 0:
            return
        # A copy: rows may come from a read-only mapping, which torch refuses to wrap without a warning, or lie askew.
        fits = rows.flags.writeable and rows.ctypes.data % self._word.itemsize == 0
        source = torch.from_numpy(rows if fits else rows.copy()).view(self._word)
        size, stop = self.page_size, start + len(rows)
        head = min(stop, -(-start // size) * size)
        tail = max(head, stop // size * size)
        body = torch.from_numpy(pages[head // size : tail // size]).long()
        at = 0
        for pool in self._words:
            part = source[:, at : at + pool.shape[2]]
            at += pool.shape[2]
            if start < head:
                pool[int(pages[start // size]), start % size : start % size + head - start] = part[: head - start]
            if len(body):
                pool[body] = part[head - start : tail - start].view(len(body), size, -1)
            if tail < stop:
                pool[int(pages[tail // size]), : stop - tail] = part[tail - start :]
