"""Measures what the cost model needs: the link alone, the CPU alone, both together, what the experts' own kernels read over the
link, and what a hand-off costs beside its bytes.

Everything is measured with what serving uses: the same kernels, the same executor, the same kind of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from engine.device.base import Device
from engine.errors import DeviceError
from engine.gpu.direct import LEAST_ROWS, DirectReads, fitted, rate_and_cost
from engine.kernels import plain
from engine.moe.cost import ASSUMED, Rates
from engine.moe.handoff import Executor, Mailbox, start_executor
from engine.moe.host_bank import HostBank, Record

BANK_BYTES = 1 << 30
"""Larger than caches, so that rates are those of memory."""
SECONDS = 0.5
TOP_K = 8
MOST_TOKENS = 256
PASS_ROWS = 32
"""Tokens that make a request a prefill pass for the executor, which computes a decode step's few tokens in another way."""
WAIT_US = 20_000_000
MAILBOX_NS = 6_000
"""From a device's write to the executor's look and back: three crossings of the bus."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CpuRates:
    """See Rates."""

    cpu_mbs: int
    handoff_ns: int
    cpu_tokens: int


class CpuSide:
    """The executor over a bank, asked in Python as the device would ask."""

    def __init__(self, bank: HostBank, host: Device) -> None:
        self.bank = bank
        self.box = Mailbox(host, MOST_TOKENS, bank.record.hidden, TOP_K, bank.record.dtype)
        # Layers of as many experts as one request can name, so that requests walk through the whole bank.
        self.layers = bank.rows // TOP_K
        self._executor: Executor = start_executor(self.box, bank, TOP_K)
        self._counts, self._shares = torch.tensor([0, 1, 0, 0], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self._next = 0

    def ask(self, tokens: int, experts: int, rows: int = 0, taken: int = 0) -> None:
        """Send a request for `experts` different experts, each with `tokens` tokens, without their last `taken` inner rows.
        rows: tokens of the request, with those that choose nothing."""
        rows = max(rows, tokens)
        self._shares.fill_(taken)
        ids = torch.full((rows, TOP_K), -1, dtype=torch.int32)
        ids[:tokens, :experts] = torch.arange(experts, dtype=torch.int32)
        weights = torch.full((rows, TOP_K), 1 / TOP_K)
        x = torch.ones(rows, self.bank.record.hidden, dtype=self.bank.record.dtype)
        box, layer = self.box, self._next % self.layers
        request = (box.request, box.x, box.ids, box.weights)
        self._next += 1
        self._executor.wake()
        plain.publish(x, ids, weights, self._counts, self._shares, box.epoch, layer, *request)

    def wait(self) -> None:
        plain.wait_reply(self._counts, self.box.epoch, self.box.reply, WAIT_US, self.box.status)
        if int(self.box.status[0]):
            raise DeviceError("the CPU executor did not answer while it was measured")

    def answered(self) -> bool:
        return int(self.box.reply[0]) == int(self.box.epoch[0])

    def request_ns(self, tokens: int, experts: int, seconds: float, rows: int = 0, taken: int = 0) -> int:
        """Median time that such a request takes the executor, without the asking, which is slow in Python."""
        times, until = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < until:
            self.ask(tokens, experts, rows, taken)
            self.wait()
            times.append(self.box.busy_ns)
        return sorted(times)[len(times) // 2]

    def done(self) -> tuple[int, int]:
        """Nanoseconds spent on requests, and bytes of weights read, since the start."""
        state = self._executor.state()
        return state.busy_ns, state.bytes

    def close(self) -> None:
        self._executor.stop()


def synthetic_bank(record: Record, nbytes: int = BANK_BYTES) -> HostBank:
    """Numbers of no meaning, at least two requests' worth of experts."""
    count = max(2 * TOP_K, nbytes // record.nbytes // TOP_K * TOP_K)
    bank = HostBank(count, record)
    bank.layer(count, record.inter, record.hidden, record.dtype)
    views = record.views(bank.bytes)
    views.gate_up.fill_(0.01)
    views.down.fill_(0.01)
    return bank


@contextmanager
def quiet_torch() -> Iterator[None]:
    """One thread for torch's own operations on the host: the others go on spinning after each of them, on the cores that the
    executor is measured on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@quiet_torch()
def measure_cpu(side: CpuSide, seconds: float = SECONDS) -> CpuRates:
    """The CPU alone."""
    record = side.bank.record.nbytes
    side.request_ns(1, TOP_K, seconds / 4)  # threads, pages and clocks warm up
    empty = side.request_ns(1, 0, seconds / 4)
    one = side.request_ns(1, TOP_K, seconds)
    return CpuRates(max(1, TOP_K * record * 1000 // max(1, one - empty)), MAILBOX_NS + empty, tokens_for_free(side, seconds))


def tokens_for_free(side: CpuSide, seconds: float) -> int:
    """Tokens of each expert, doubled as long as a pass takes at most a quarter more than one with a token of each."""
    one = side.request_ns(1, TOP_K, seconds / 4, PASS_ROWS)
    tokens = 1
    while 2 * tokens <= MOST_TOKENS and 4 * side.request_ns(2 * tokens, TOP_K, seconds / 8, PASS_ROWS) <= 5 * one:
        tokens *= 2
    return tokens


def measure(
    device: Device, ops: ModuleType, bank: HostBank, host: Device, seconds: float = SECONDS, tell: Tell = lambda what: None
) -> Rates:
    """Everything. bank: pinned at least in part. Raises DeviceError.

    host: where the mailbox of this measurement lies: host memory, since here the asking is Python's, and must not wait for the
    device.
    """
    record, count = bank.record.nbytes, next((run.stop for run in bank.runs(0, min(bank.pinned_rows, 64))), 0)
    if count < 1:
        raise DeviceError("no expert is pinned, so the link cannot be measured")
    place = device.torch_device
    slots = torch.zeros(count, record, dtype=torch.uint8, device=place)
    other = torch.zeros_like(slots)
    counts = torch.tensor([count, 0, 0, 0], dtype=torch.int32, device=place)
    rows = torch.arange(count, dtype=torch.int32, device=place)
    parts = max(1, bank.pinned_rows // count)
    work = [torch.stack([rows + count * (i % parts), rows], 1).contiguous() for i in range(min(parts, 16))]
    turn = 0

    def fetch() -> None:
        nonlocal turn
        turn += 1
        ops.fetch(bank.bytes, slots, work[turn % len(work)], counts)

    def timed(what: Callable[[], object], nbytes: int) -> int:
        what()
        device.synchronize()
        calls, began = 0, time.perf_counter_ns()
        while not calls or time.perf_counter_ns() - began < seconds * 1e9:
            what()
            device.synchronize()
            calls += 1
        return max(1, calls * nbytes * 1000 // (time.perf_counter_ns() - began))

    tell("the link alone")
    link = timed(fetch, count * record)
    copy = timed(lambda: slots.copy_(bank.bytes[:count], non_blocking=True), count * record)
    tell("the device's memory")
    hbm = timed(lambda: other.copy_(slots), 2 * count * record)
    side = CpuSide(bank, host)
    try:
        tell("the CPU alone")
        cpu = measure_cpu(side, seconds)
        tell("link and CPU together")
        both_link, both_cpu = together(device, fetch, count * record, side, seconds)
        tell("parts of experts")
        direct_mbs, direct_ns = _direct(device, DirectReads(device, ops, bank, TOP_K), side, seconds)
    finally:
        side.close()
    tell("matrix products")
    return Rates(
        hbm_mbs=hbm,
        link_mbs=link,
        copy_mbs=copy,
        cpu_mbs=cpu.cpu_mbs,
        both_link_mbs=both_link,
        both_cpu_mbs=both_cpu,
        handoff_ns=cpu.handoff_ns,
        cpu_tokens=cpu.cpu_tokens,
        gpu_gflops=_gflops(device, bank.record.dtype, seconds / 2),
        direct_mbs=direct_mbs,
        direct_ns=direct_ns,
    )


def _direct(device: Device, reads: DirectReads, side: CpuSide, seconds: float) -> tuple[int, int]:
    """Rate and fixed cost of reading parts of experts while the CPU works; 0 for experts too small to be divided."""
    if reads.inter < 2 * LEAST_ROWS:
        return 0, 0
    seen = {}
    for rows in fitted(reads.inter):
        reads.use(rows)
        rate, _ = together(device, reads.replay, reads.nbytes(rows), side, seconds / 2)
        seen[rows] = reads.nbytes(rows) * 1000 // rate // reads.calls
    return rate_and_cost(reads.record_bytes, reads.inter, seen)


def together(device: Device, fetch: Callable[[], None], nbytes: int, side: CpuSide, seconds: float) -> tuple[int, int]:
    """Rates of both while both work: one batch of fetches after another, and requests without a pause beside them."""
    fetches, began = 0, time.perf_counter_ns()
    before = side.done()
    side.ask(1, TOP_K)
    while not fetches or time.perf_counter_ns() - began < seconds * 1e9:
        fetch()
        moment = device.moment()
        fetches += 1
        while True:
            if side.answered():
                side.ask(1, TOP_K)
            if moment.reached():
                break
    spent = time.perf_counter_ns() - began
    side.wait()
    busy, read = (after - old for after, old in zip(side.done(), before, strict=True))
    return max(1, fetches * nbytes * 1000 // spent), max(1, read * 1000 // max(1, busy))


def _gflops(device: Device, dtype: torch.dtype, seconds: float) -> int:
    size = 2048 if device.torch_device.type == "cuda" else 128
    a = torch.ones(size, size, dtype=dtype, device=device.torch_device)
    out = a @ a
    device.synchronize()
    calls, began = 0, time.perf_counter_ns()
    while not calls or time.perf_counter_ns() - began < seconds * 1e9:
        for _ in range(8):
            torch.mm(a, a, out=out)
        device.synchronize()
        calls += 8
    return max(1, 2 * size**3 * calls // (time.perf_counter_ns() - began))


def cpu_only(record: Record, host: Device, seconds: float = SECONDS, nbytes: int = BANK_BYTES) -> Rates:
    """The CPU's side measured, the rest assumed."""
    side = CpuSide(synthetic_bank(record, nbytes), host)
    try:
        cpu = measure_cpu(side, seconds)
    finally:
        with suppress(DeviceError):
            side.close()
    return replace(ASSUMED, cpu_mbs=cpu.cpu_mbs, handoff_ns=cpu.handoff_ns, cpu_tokens=cpu.cpu_tokens)
