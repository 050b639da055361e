"""The hand-off between the device and the CPU executor: where what lies in the mailbox, and the thread that answers it.

The device (kernels publish, wait_reply and merge) writes a request's payload and, last, its epoch; the executor computes the
experts where they lie in the host bank, writes the partial result and, last, the same epoch. Epochs rise by one and lie in the
payload, so that a late reply can never satisfy a later request. Nothing of a decode step runs in Python.

The layout is also in engine/csrc/handoff.h; a test compares them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.device.base import Device
from engine.errors import DeviceError
from engine.kernels import cpu, native, reference
from engine.moe.host_bank import HostBank

REQUEST_EPOCH, REQUEST_LAYER, REQUEST_TOKENS, REQUEST_TAKEN = 0, 4, 8, 12
REPLY_EPOCH, REPLY_STATUS, REPLY_BUSY_NS = 64, 68, 72
PAYLOAD = 128
_ALIGN = 256
SPIN_US = 5000
"""The executor looks for a request this long before it parks: the time between two requests of an answer, not between two
turns. A step announces itself once, at its begin: where most experts are resident, the first layer that needs the CPU may come
milliseconds later, and a parked executor finds it up to half a millisecond late."""


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """Byte offsets of the payload for up to `tokens` tokens. Integers only."""

    tokens: int
    hidden: int
    top_k: int
    item_bytes: int

    @property
    def x(self) -> int:
        return -(-PAYLOAD // _ALIGN) * _ALIGN

    @property
    def ids(self) -> int:
        return self._after(self.x, self.tokens * self.hidden * self.item_bytes)

    @property
    def weights(self) -> int:
        return self._after(self.ids, self.tokens * self.top_k * 4)

    @property
    def out(self) -> int:
        return self._after(self.weights, self.tokens * self.top_k * 4)

    @property
    def nbytes(self) -> int:
        return self._after(self.out, self.tokens * self.hidden * 4)

    @staticmethod
    def _after(start: int, nbytes: int) -> int:
        return -(-(start + nbytes) // _ALIGN) * _ALIGN


class Mailbox:
    """Memory that device and executor both see, and the device's own counter.

    request, reply: int32 [16], the flag lines. x [tokens, hidden] in the model's dtype, ids int32 and weights f32
    [tokens, top_k], out f32 [tokens, hidden]. epoch: int32 [1] on the device. status: int32 [4] on the device: 0 or what went
    wrong (FAULTS), epoch at which. status_host: where a step leaves a copy of it.
    """

    def __init__(self, device: Device, tokens: int, hidden: int, top_k: int, dtype: torch.dtype) -> None:
        layout = BoxLayout(tokens, hidden, top_k, dtype.itemsize)
        self.tokens, self.top_k = tokens, top_k
        self.token_bytes = hidden * (dtype.itemsize + 4)
        """What crosses the link for a token: its activation there, its sum over the executor's experts back."""
        self.memory = device.pinned(layout.nbytes, dtype=torch.uint8)
        assert self.memory.data_ptr() % 64 == 0

        def view(start: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            count = dtype.itemsize
            for size in shape:
                count *= size
            return self.memory[start : start + count].view(dtype).view(shape)

        self.request = view(REQUEST_EPOCH, torch.int32, 16)
        self.reply = view(REPLY_EPOCH, torch.int32, 16)
        self.x = view(layout.x, dtype, tokens, hidden)
        self.ids = view(layout.ids, torch.int32, tokens, top_k)
        self.weights = view(layout.weights, torch.float32, tokens, top_k)
        self.out = view(layout.out, torch.float32, tokens, hidden)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self.status = torch.zeros(4, dtype=torch.int32, device=device.torch_device)
        self.status_host = device.pinned(4, dtype=torch.int32)

    @property
    def busy_ns(self) -> int:
        """What the last reply took."""
        return int(self.reply[2:4].view(torch.int64)[0])


TIMED_OUT, FAILED = 1, 2


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """alive: its thread runs. served: requests answered. busy_ns: spent on them. silent_us: since it last showed life. parks:
    times it went to sleep. bytes: weights read."""

    alive: bool
    served: int
    busy_ns: int
    silent_us: int
    parks: int
    bytes: int


class Executor(Protocol):
    """Answers a mailbox."""

    def wake(self) -> None:
        """A step begins: requests will come."""
        ...

    def state(self) -> ExecutorState: ...

    def fault(self, kind: int, epoch: int) -> None:
        """For tests. At the request with this epoch: 1 = its thread ends, 2 = it hangs, 3 = it replies with a failure."""
        ...

    def stop(self) -> bool:
        """False if the thread hangs and was left behind."""
        ...


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("box", "x", "ids", "weights", "out", "bank")),
        ("record_bytes", ctypes.c_uint64),
        *(
            (name, ctypes.c_int32)
            for name in ("hidden", "inter", "top_k", "experts", "layers", "max_tokens", "bf16", "spin_us")
        ),
    )


class NativeExecutor:
    """The C++ library's thread (engine/csrc/server.cpp)."""

    def __init__(self, box: Mailbox, bank: HostBank, experts: int, spin_us: int = SPIN_US) -> None:
        library = native.load()
        assert library is not None
        assert library.asv_serve_config_bytes() == ctypes.sizeof(_Config)
        record = bank.record
        self._library = library
        self._keep = (box.memory, bank)
        config = _Config(
            box=box.memory.data_ptr(),
            x=box.x.data_ptr(),
            ids=box.ids.data_ptr(),
            weights=box.weights.data_ptr(),
            out=box.out.data_ptr(),
            bank=bank.bytes.data_ptr(),
            record_bytes=record.nbytes,
            hidden=record.hidden,
            inter=record.inter,
            top_k=box.top_k,
            experts=experts,
            layers=bank.rows // experts,
            max_tokens=box.tokens,
            bf16=int(record.dtype == torch.bfloat16),
            spin_us=spin_us,
        )
        self._server: int | None = library.asv_serve_start(ctypes.byref(config))
        if not self._server:
            raise DeviceError("the CPU executor's thread could not be started")

    def wake(self) -> None:
        self._library.asv_serve_wake(self._server)

    def state(self) -> ExecutorState:
        out = (ctypes.c_uint64 * 6)()
        self._library.asv_serve_state(self._server, out)
        return ExecutorState(bool(out[0]), *out[1:])

    def fault(self, kind: int, epoch: int) -> None:
        self._library.asv_serve_fault(self._server, kind, epoch)

    def stop(self) -> bool:
        if self._server is None:
            return True
        server, self._server = self._server, None
        # A thread that hangs goes on reading the mailbox: never free what it may touch.
        ended = self._library.asv_serve_stop(server) == 0
        if not ended:
            _abandoned.append(self._keep)
        return ended


_abandoned: list[object] = []


class PlainExecutor:
    """The same without the C++ library, on torch: many times slower. See Executor."""

    def __init__(self, box: Mailbox, bank: HostBank, experts: int) -> None:
        self._box, self._experts = box, experts
        self._bank = bank.record.views(bank.bytes)
        self._stopping = threading.Event()
        self._fault = (0, 0)
        self._served = self._busy_ns = self._bytes = 0
        self._seen = time.monotonic()
        self._last = int(box.request[0])  # here: a request may come before the thread runs
        self._thread = threading.Thread(target=self._run, name="expert-executor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        request, last = self._box.request.numpy(), self._last
        while not self._stopping.is_set():
            epoch = int(request[0])
            if epoch == last:
                self._seen = time.monotonic()
                time.sleep(0)
                continue
            last = epoch
            kind = self._fault[0] if self._fault[1] == epoch else 0
            if kind == 1:
                return
            if kind == 2:
                self._stopping.wait()
                return
            began = time.monotonic_ns()
            self._compute(int(request[1]), int(request[2]), int(request[3]))
            took = time.monotonic_ns() - began
            self._served += 1
            self._busy_ns += took
            self._seen = time.monotonic()
            reply = self._box.reply.numpy()
            reply[1] = 1 if kind == 3 else 0
            reply[2:4].view("int64")[0] = took
            reply[0] = epoch

    def _compute(self, layer: int, tokens: int, taken: int) -> None:
        box, rows = self._box, slice(layer * self._experts, (layer + 1) * self._experts)
        ids, inter = box.ids[:tokens], self._bank.down.shape[2]
        used = len([e for e in torch.unique(ids).tolist() if e >= 0])
        self._bytes += used * self._bank.record_bytes * (inter - taken) // inter
        out = reference.experts_forward(
            box.x[:tokens],
            ids,
            box.weights[:tokens],
            self._bank.gate_up[rows],
            self._bank.down[rows],
            slice(inter - taken),
        )
        box.out[:tokens] = out

    def wake(self) -> None:
        pass

    def state(self) -> ExecutorState:
        silent = int((time.monotonic() - self._seen) * 1e6)
        return ExecutorState(self._thread.is_alive(), self._served, self._busy_ns, silent, 0, self._bytes)

    def fault(self, kind: int, epoch: int) -> None:
        self._fault = (kind, epoch)

    def stop(self) -> bool:
        self._stopping.set()
        self._thread.join(timeout=2.0)
        return not self._thread.is_alive()


def start_executor(box: Mailbox, bank: HostBank, experts: int) -> Executor:
    """The native one where the library is. experts: of one layer."""
    return NativeExecutor(box, bank, experts) if cpu.available() else PlainExecutor(box, bank, experts)


def explain(status: int, epoch: int, state: ExecutorState) -> str:
    """What went wrong with a request, for the error that ends the step."""
    if not state.alive:
        return f"the CPU executor's thread has ended; request {epoch} was not answered ({state.served} were before)"
    if status == FAILED:
        return f"the CPU executor failed at request {epoch}"
    return (
        f"the CPU executor did not answer request {epoch} in time; it showed no life for {state.silent_us / 1e6:.1f} s "
        f"({state.served} requests answered before)"
    )
