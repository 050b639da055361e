"""A device that fails while serving: the worker says why before it ends, at the first failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentserve.worker.main import Worker
from agentserve.worker.messages import LoadFailed
from engine.errors import DeviceError


class Pipe:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.flushed = 0

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    def flush(self) -> None:
        self.flushed = len(self.sent)


class Turns:
    running = 1

    def __init__(self, error: Exception) -> None:
        self._error = error

    def step(self) -> bool:
        raise self._error


def worker(error: Exception) -> tuple[Worker, Pipe]:
    pipe, anything = Pipe(), SimpleNamespace(memory=None, set_beside=lambda work: None)
    return Worker(pipe, anything, Turns(error), anything), pipe  # type: ignore[arg-type]


def test_a_device_error_is_told_and_ends_the_worker_at_once():
    made, pipe = worker(DeviceError("board: CUDA error: an illegal memory access"))
    with pytest.raises(DeviceError):
        made._step()
    assert pipe.sent == [LoadFailed("board: CUDA error: an illegal memory access", permanent=False)]
    assert pipe.flushed == 1


def test_another_error_is_survived():
    made, pipe = worker(RuntimeError("shapes"))
    assert made._step() is False
    assert pipe.sent == []
