"""One CUDA device: two streams and two for what goes on beside them, tapes as launches or as a captured graph, host memory
pinned through the runtime.

torch holds the context; nothing here talks to the driver by itself but for pinning (see vmm.py for virtual memory).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from engine.device.base import DeviceMemory
from engine.device.tape import Lane, Tape
from engine.device.vmm import CudaVirtualMemory
from engine.errors import DeviceError, Unsupported

_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_LEAST_CAPABILITY = (8, 0)  # bf16 arithmetic
_PIECE_CALLS = 64
"""Of a captured tape, in one graph: enough for the device to be busy with while the next one is launched."""


class CudaDevice:
    """See base.py. Becomes torch's current device. Raises Unsupported if there is no device that will do."""

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise Unsupported("device: got 'cuda', but torch sees no CUDA device here")
        if torch.cuda.get_device_capability(index) < _LEAST_CAPABILITY:
            found = ".".join(map(str, torch.cuda.get_device_capability(index)))
            raise Unsupported(f"device: {torch.cuda.get_device_name(index)} has compute capability {found}, needed: 8.0")
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._main = torch.cuda.Stream(self.torch_device)
        self._side = torch.cuda.Stream(self.torch_device)
        self._aside = torch.cuda.Stream(self.torch_device)
        self._soon = torch.cuda.Stream(self.torch_device)
        # Everything that torch does by itself (copies, sampling) follows on the same stream.
        torch.cuda.set_stream(self._main)

    def adopt(self) -> None:
        if torch.cuda.current_stream(self.torch_device) != self._main:
            torch.cuda.set_stream(self._main)

    def memory(self) -> DeviceMemory:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return DeviceMemory(free, total)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def virtual(self) -> CudaVirtualMemory:
        return CudaVirtualMemory(self.torch_device)

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> str | None:
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE_MAPPED))
        if status in (0, _ALREADY_REGISTERED):
            return None
        reason = runtime.cudaGetErrorString(runtime.cudaError(status))
        # The refused call leaves its error behind, and the next launch would report it as its own.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)
        return f"{reason} (CUDA error {status})"

    def unpin(self, memory: torch.Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(memory.data_ptr())

    def run(self, tape: Tape) -> None:
        self._enqueue(tape, self._main)

    def _enqueue(self, tape: Tape, main: torch.cuda.Stream) -> None:
        streams = {Lane.MAIN: main, Lane.SIDE: self._side}
        events = [torch.cuda.Event() for _ in range(tape.marks)]
        current = Lane.MAIN
        try:
            for entry in tape.entries:
                stream = streams[entry.lane]
                if entry.awaits is not None:
                    stream.wait_event(events[entry.awaits.index])
                if entry.call is not None:
                    if entry.lane is not current:
                        torch.cuda.set_stream(stream)
                        current = entry.lane
                    entry.call()
                if entry.sets is not None:
                    events[entry.sets.index].record(stream)
        finally:
            torch.cuda.set_stream(main)

    def moment(self) -> CudaMoment:
        event = torch.cuda.Event()
        event.record(self._main)
        return CudaMoment(event)

    def aside(self, call: Callable[[], None]) -> CudaMoment:
        return self._behind_main(self._aside, call)

    def soon(self, call: Callable[[], None]) -> CudaMoment:
        return self._behind_main(self._soon, call)

    def _behind_main(self, stream: torch.cuda.Stream, call: Callable[[], None]) -> CudaMoment:
        stream.wait_stream(self._main)
        torch.cuda.set_stream(stream)
        try:
            call()
        finally:
            # Of half a call, too: what it has enqueued still reads.
            event = torch.cuda.Event()
            event.record(stream)
            torch.cuda.set_stream(self._main)
        return CudaMoment(event)

    def capture(self, tape: Tape) -> CudaGraphs:
        self._enqueue(tape, self._main)
        self.synchronize()
        # A pool dies with its last graph, so each tape has its own; there is next to nothing in it.
        pool, graphs = torch.cuda.graph_pool_handle(), []
        for piece in tape.pieces(_PIECE_CALLS):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._enqueue(piece, self._main)
            finally:
                graph.capture_end()
            graphs.append(graph)
        return CudaGraphs(graphs)

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: {error}") from error


class CudaGraphs:
    """A tape as graphs in a row: the first runs while the others are being launched, which takes 0.3 µs and more a node."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        self._graphs = graphs

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()


class CudaMoment:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise DeviceError(str(error)) from error

    def reached(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError as error:
            raise DeviceError(str(error)) from error
