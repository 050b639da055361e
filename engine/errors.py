"""Errors of the engine, one tree.

EngineError
├── CheckpointError        a model directory cannot be loaded (names file, tensor, what was found, what is accepted)
├── Unsupported            a feature, format or architecture that this engine does not have, by name
├── ContextTooLong         prompt + 1 exceeds what the engine can hold
├── InvalidRequest         a request field is out of range (names the field)
├── ShapeMismatch          a kernel was given tensors that do not fit together
├── OutOfPages             too few free KV pages; the scheduler leaves the request queued
├── OutOfRows              no free recurrent-state row; likewise
├── SnapshotMismatch       a snapshot does not fit this model or position
├── UnknownHold            a hold id that was never given out or was released
├── NumericalError         NaN or infinity in a request's logits
├── MaskFailed             a request's token mask has no answer, or allows nothing
├── OutOfDeviceMemory      the device cannot hold what was asked for (names what, and how much was free)
└── DeviceError            the device or the CPU executor beside it failed; the process has to be started again
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class CheckpointError(EngineError):
    """A model directory that cannot be served."""


class Unsupported(EngineError):
    """Something this engine does not do, named."""


class ContextTooLong(EngineError):
    """The prompt does not fit. Never queued: it would wait for ever."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"prompt has {tokens} tokens, this engine holds at most {limit}")
        self.tokens = tokens
        self.limit = limit


class InvalidRequest(EngineError):
    """A request field out of range."""

    def __init__(self, field: str, got: object, accepted: str) -> None:
        super().__init__(f"{field}: got {got!r}, accepted: {accepted}")
        self.field = field


class ShapeMismatch(EngineError):
    """Tensors that do not fit together."""


class OutOfPages(EngineError):
    """Too few free KV pages. The scheduler leaves the request queued."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"need {needed} KV pages, {free} free")
        self.needed = needed
        self.free = free


class OutOfRows(EngineError):
    """No free recurrent-state row. The scheduler leaves the request queued."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"need {needed} recurrent-state rows, {free} free")


class SnapshotMismatch(EngineError):
    """A snapshot that does not fit this model or its claimed position."""


class UnknownHold(EngineError):
    """A hold id that was never given out, or was released."""

    def __init__(self, hold: int) -> None:
        super().__init__(f"hold {hold} is unknown or was released")


class NumericalError(EngineError):
    """NaN or infinity in the logits of one request; that request ends, others go on."""


class MaskFailed(EngineError):
    """A request's token mask has no answer, or allows no token; that request ends, others go on."""


class OutOfDeviceMemory(EngineError):
    """The device is too small, or another program holds its memory. Starting again may help, a smaller budget does."""

    def __init__(self, what: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{what}: needs {needed_bytes / 1e9:.2f} GB of device memory, {free_bytes / 1e9:.2f} GB are free")
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class DeviceError(EngineError):
    """The device, or the CPU executor that works beside it, failed. What it held is lost: the worker process is started
    again."""
