"""The pools of pool.py and recurrent.py in a device's memory: same rows, same bytes, other ways of copying.

A page's keys and values of all layers lie together, one page after another, so that the end of the pages is the end of the
memory: that can be given to experts and taken back while the rest is in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.budget import kv_token_bytes, state_row_bytes
from engine.device.base import Device
from engine.errors import OutOfDeviceMemory
from engine.kvcache.arriving import STAGED_BYTES, Arrivals
from engine.kvcache.pool import KvPools
from engine.kvcache.recurrent import RecurrentPools
from engine.kvcache.spans import joined
from engine.models.base import ModelSpec


class DeviceKvPools(KvPools):
    """See KvPools; each pool's pages are contiguous, at the distance of a whole page. memory: [pages, 2 · layers, page_size,
    kv_heads, head_dim], zeroed here if it is not given."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        device: Device,
        memory: torch.Tensor | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        layers = len(spec.attention_layers)
        shape = (num_pages, 2 * layers, page_size, spec.kv_heads, spec.head_dim)
        if memory is None:
            memory = torch.zeros(shape, dtype=spec.dtype, device=device.torch_device)
        assert memory.shape == shape
        self.num_pages, self.page_size, self.memory = num_pages, page_size, memory
        self.k = [memory[:, 2 * i] for i in range(layers)]
        self.v = [memory[:, 2 * i + 1] for i in range(layers)]
        width = spec.kv_heads * spec.head_dim * spec.dtype.itemsize
        # [pages, 2 · layers, page_size, words of one token in one pool]. Words of eight bytes where the rows allow it: copies
        # that gather and scatter count elements, not bytes.
        self._word = torch.int64 if width % 8 == 0 else torch.uint8
        self._words = memory.view(num_pages, 2 * layers, page_size, -1).view(self._word)
        self.token_bytes = 2 * layers * width
        self._device = device
        self._arrivals = arrivals or Arrivals(device)
        self._at_once = max(1, STAGED_BYTES // max(1, self.token_bytes) // page_size)
        self._gathered: torch.Tensor | None = None

    def copy_head(self, source: int, dest: int, rows: int) -> None:
        self.memory[dest, :, :rows].copy_(self.memory[source, :, :rows])

    def fill(self, pages: np.ndarray, value: float) -> None:
        self.memory[torch.from_numpy(pages).long().to(self.memory.device)] = value

    def move(self, sources: np.ndarray, dests: np.ndarray) -> None:
        """Copy whole pages to other, distinct ones, a few at a time."""
        for first in range(0, len(sources), self._at_once):
            part = slice(first, first + self._at_once)
            self.memory[self._ids(dests[part])] = self.memory[self._ids(sources[part])]

    def read(self, pages: np.ndarray, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, self.token_bytes), dtype=np.uint8)
        self._device.aside(lambda: self.copy_out(pages, start, stop, (out,))).wait()
        return out

    def copy_out(self, pages: np.ndarray, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Enqueue a copy of positions [start, stop) to arrays on the host, one after another: to be told aside, since what is
        gathered on the way lies in one place for all such copies."""
        size, at, spans = self.page_size, start, _Spans(out)
        while at < stop:
            first = at // size
            end = min(stop, (first + self._at_once) * size)
            count = -(-end // size) - first
            tokens = self._room(count).view(count, size, len(self._words[0]), -1)
            part = pages[first : first + count]
            if int(part[-1]) - int(part[0]) == count - 1 and bool((np.diff(part) == 1).all()):
                # As they mostly lie: no ids are needed there.
                tokens.copy_(self._words[int(part[0]) : int(part[0]) + count].transpose(1, 2))
            else:
                torch.index_select(self._words.transpose(1, 2), 0, self._ids(part), out=tokens)
            flat = tokens.view(count * size, -1).view(torch.uint8)
            spans.fill(flat[at - first * size : end - first * size].reshape(-1))
            at = end

    def write(self, pages: np.ndarray, start: int, rows: np.ndarray) -> None:
        self.write_all(pages, start, (rows,))

    def write_all(self, pages: np.ndarray, start: int, runs: Sequence[np.ndarray]) -> None:
        """Returns before the device has it; what comes from pinned memory is kept until then."""
        size, at = self.page_size, start
        for part in _divided(runs, start, self._at_once * size):
            count = sum(len(rows) for rows in part)
            arrived = torch.empty(count * self.token_bytes, dtype=torch.uint8, device=self.memory.device)
            self._arrivals.send(part, arrived)
            self._scatter(pages, at, arrived.view(self._word).view(count, self._words.shape[1], -1))
            at += count

    def _scatter(self, pages: np.ndarray, start: int, tokens: torch.Tensor) -> None:
        """tokens: words [tokens, 2 · layers, width]. Whole pages at once, the others by slices, which need no ids there."""
        size, at, stop = self.page_size, start, start + len(tokens)
        while at < stop:
            page, offset = divmod(at, size)
            whole = (stop - at) // size if offset == 0 else 0
            count = whole * size if whole else min(size - offset, stop - at)
            part = tokens[at - start : at - start + count]
            if whole:
                by_page = part.view(whole, size, *part.shape[1:]).transpose(1, 2)
                self._words[self._ids(pages[page : page + whole])] = by_page
            else:
                self._words[int(pages[page]), :, offset : offset + count] = part.transpose(0, 1)
            at += count

    def _ids(self, pages: np.ndarray) -> torch.Tensor:
        """On the device, without waiting for what was enqueued before."""
        ids = torch.from_numpy(pages.astype(np.int64))
        if self.memory.device.type == "cpu":
            return ids
        return ids.pin_memory().to(self.memory.device, non_blocking=True)

    def _room(self, pages: int) -> torch.Tensor:
        words = pages * self.page_size * self.token_bytes // self._word.itemsize
        if self._gathered is None or len(self._gathered) < words:
            self._gathered = torch.empty(words, dtype=self._word, device=self.memory.device)
        return self._gathered[:words]


class DeviceRecurrentPools(RecurrentPools):
    """See RecurrentPools."""

    def __init__(self, spec: ModelSpec, rows: int, device: Device, arrivals: Arrivals | None = None) -> None:
        self.rows = rows
        self._allocate(spec, device.torch_device)
        self._device = device
        self._arrivals = arrivals or Arrivals(device)
        self._rows = {name: pool.flatten(1).view(torch.uint8) for name, pool in self._named.items()}

    def copy(self, source: int, dest: int) -> None:
        for pool in self._named.values():
            pool[dest] = pool[source]

    def fill(self, rows: np.ndarray, value: float) -> None:
        for pool in self._named.values():
            pool[torch.from_numpy(rows).long().to(pool.device)] = value

    def read(self, row: int) -> np.ndarray:
        out = np.empty(sum(rows.shape[1] for rows in self._rows.values()), dtype=np.uint8)
        self._device.aside(lambda: self.copy_out(row, out)).wait()
        return out

    def copy_out(self, row: int, out: np.ndarray) -> None:
        """Enqueue a copy of one row, its components one after another, to an array on the host."""
        spans = _Spans((out,))
        for rows in self._rows.values():
            spans.fill(rows[row])

    def write(self, row: int, name: str, source: np.ndarray) -> None:
        self._arrivals.send((source,), self._rows[name][row])


class _Spans:
    """Arrays on the host that are filled one after another."""

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        self._spans = list(joined(arrays))[::-1]

    def fill(self, source: torch.Tensor) -> None:
        """source: uint8 [n] on the device; at most what is left."""
        at = 0
        while at < len(source):
            span = self._spans.pop()
            count = min(len(span), len(source) - at)
            if count < len(span):
                self._spans.append(span[count:])
            torch.from_numpy(span[:count]).copy_(source[at : at + count], non_blocking=True)
            at += count


def copy_to_host(arrays: Iterable[np.ndarray], source: torch.Tensor) -> None:
    """Enqueue a copy of uint8 [n] on the device to arrays of n bytes together; at once where they are not pinned."""
    _Spans(arrays).fill(source)


def _divided(runs: Sequence[np.ndarray], start: int, at_once: int) -> Iterable[list[np.ndarray]]:
    """Rows from position start on, in parts that end at multiples of at_once."""
    part: list[np.ndarray] = []
    at, end = start, start // at_once * at_once + at_once
    for rows in runs:
        first = 0
        while first < len(rows):
            count = min(len(rows) - first, end - at)
            part.append(rows[first : first + count])
            first, at = first + count, at + count
            if at == end:
                yield part
                part, end = [], end + at_once
    if part:
        yield part


def device_pools(
    spec: ModelSpec,
    pages: int,
    page_size: int,
    rows: int,
    device: Device,
    arrivals: Arrivals,
    memory: torch.Tensor | None = None,
) -> tuple[DeviceKvPools, DeviceRecurrentPools]:
    """Both. memory: uint8, for the keys and values of all pages. Raises OutOfDeviceMemory."""
    place = device.torch_device
    try:
        if memory is not None:
            shape = (pages, 2 * len(spec.attention_layers), page_size, spec.kv_heads, spec.head_dim)
            memory = memory.to(place).view(spec.dtype).view(shape)
        kv = DeviceKvPools(spec, pages, page_size, device, memory, arrivals)
        return kv, DeviceRecurrentPools(spec, rows, device, arrivals)
    except torch.OutOfMemoryError as error:
        needed = pages * page_size * kv_token_bytes(spec) + rows * state_row_bytes(spec)
        free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else 0
        raise OutOfDeviceMemory(f"{pages} KV pages and {rows} recurrent rows", needed, free) from error
