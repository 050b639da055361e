"""The pools of pool.py and recurrent.py in a device's memory: same rows, same bytes, other ways of copying.

A page's keys and values of all layers lie together, one page after another, so that the end of the pages is the end of the
memory: that can be given to experts and taken back while the rest is in use.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.budget import kv_token_bytes, state_row_bytes
from engine.errors import OutOfDeviceMemory
from engine.kvcache.pool import KvPools
from engine.kvcache.recurrent import RecurrentPools
from engine.kvcache.staging import Staging
from engine.models.base import ModelSpec

STAGED_BYTES = 64 << 20
"""Copied at a time between device and host, which bounds what a long context takes of both while it moves."""


class DeviceKvPools(KvPools):
    """See KvPools; each pool's pages are contiguous, at the distance of a whole page. memory: [pages, 2 · layers, page_size,
    kv_heads, head_dim], zeroed here if it is not given."""

    def __init__(
        self, spec: ModelSpec, num_pages: int, page_size: int, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        layers = len(spec.attention_layers)
        shape = (num_pages, 2 * layers, page_size, spec.kv_heads, spec.head_dim)
        if memory is None:
            memory = torch.zeros(shape, dtype=spec.dtype, device=device)
        assert memory.shape == shape
        self.num_pages, self.page_size, self.memory = num_pages, page_size, memory
        self.k = [memory[:, 2 * i] for i in range(layers)]
        self.v = [memory[:, 2 * i + 1] for i in range(layers)]
        width = spec.kv_heads * spec.head_dim * spec.dtype.itemsize
        # [pages, 2 · layers, page_size, bytes of one token in one pool]
        self._bytes = memory.view(num_pages, 2 * layers, page_size, -1).view(torch.uint8)
        self.token_bytes = 2 * layers * width
        self._staging = Staging(memory.device, max(STAGED_BYTES, page_size * self.token_bytes))
        self._tokens_at_once = max(page_size, STAGED_BYTES // max(1, self.token_bytes) // page_size * page_size)

    def copy_head(self, source: int, dest: int, rows: int) -> None:
        self.memory[dest, :, :rows].copy_(self.memory[source, :, :rows])

    def fill(self, pages: np.ndarray, value: float) -> None:
        self.memory[torch.from_numpy(pages).long().to(self.memory.device)] = value

    def move(self, sources: np.ndarray, dests: np.ndarray) -> None:
        """Copy whole pages to other, distinct ones, a few at a time."""
        place = self.memory.device
        at_once = max(1, self._tokens_at_once // self.page_size)
        for first in range(0, len(sources), at_once):
            part = slice(first, first + at_once)
            dest = torch.from_numpy(dests[part]).long().to(place)
            self.memory[dest] = self.memory[torch.from_numpy(sources[part]).long().to(place)]

    def read(self, pages: np.ndarray, start: int, stop: int) -> np.ndarray:
        out = torch.empty(stop - start, self.token_bytes, dtype=torch.uint8)
        size, at = self.page_size, start
        while at < stop:
            end = min(stop, at // size * size + self._tokens_at_once)
            first = at // size
            ids = torch.from_numpy(pages[first : -(-end // size)]).long().to(self.memory.device)
            tokens = self._bytes.index_select(0, ids).permute(0, 2, 1, 3).reshape(-1, self.token_bytes)
            out[at - start : end - start].copy_(tokens[at - first * size : end - first * size])
            at = end
        return out.numpy()

    def write(self, pages: np.ndarray, start: int, rows: np.ndarray) -> None:
        size, at, stop = self.page_size, start, start + len(rows)
        parts = self._bytes.shape[1]
        while at < stop:
            end = min(stop, at // size * size + self._tokens_at_once)
            staged = self._staging.send(rows[at - start : end - start])
            tokens = staged.view(end - at, parts, -1)
            positions = np.arange(at, end)
            page = torch.from_numpy(pages[positions // size]).long().to(self.memory.device)
            offset = torch.from_numpy(positions % size).to(self.memory.device)
            self._bytes[page, :, offset] = tokens
            at = end


class DeviceRecurrentPools(RecurrentPools):
    """See RecurrentPools."""

    def __init__(self, spec: ModelSpec, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._allocate(spec, device)
        self._staging = Staging(device, STAGED_BYTES)
        self._rows = {name: pool.flatten(1).view(torch.uint8) for name, pool in self._named.items()}

    def fill(self, rows: np.ndarray, value: float) -> None:
        for pool in self._named.values():
            pool[torch.from_numpy(rows).long().to(pool.device)] = value

    def read(self, row: int) -> dict[str, np.ndarray]:
        out = {}
        for name, rows in self._rows.items():
            copy = torch.empty(rows.shape[1], dtype=torch.uint8)
            out[name] = copy.copy_(rows[row]).numpy()
        return out

    def write(self, row: int, name: str, source: np.ndarray) -> None:
        place = self._rows[name][row]
        for first in range(0, len(source), STAGED_BYTES):
            place[first : first + STAGED_BYTES].copy_(self._staging.send(source[first : first + STAGED_BYTES]))


def device_pools(
    spec: ModelSpec, pages: int, page_size: int, rows: int, device: torch.device, memory: torch.Tensor | None = None
) -> tuple[DeviceKvPools, DeviceRecurrentPools]:
    """Both. memory: uint8, for the keys and values of all pages. Raises OutOfDeviceMemory."""
    try:
        if memory is not None:
            shape = (pages, 2 * len(spec.attention_layers), page_size, spec.kv_heads, spec.head_dim)
            memory = memory.to(device).view(spec.dtype).view(shape)
        return DeviceKvPools(spec, pages, page_size, device, memory), DeviceRecurrentPools(spec, rows, device)
    except torch.OutOfMemoryError as error:
        needed = pages * page_size * kv_token_bytes(spec) + rows * state_row_bytes(spec)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        raise OutOfDeviceMemory(f"{pages} KV pages and {rows} recurrent rows", needed, free) from error
