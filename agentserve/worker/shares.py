"""What each worker gets of one machine: memory for saved states, and which GPU. Pure functions of the settings.

Processors, engine memory, disk and a GPU that several use are divided by the workers themselves, who are told by how many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Share:
    """One worker. number: among those of its model. gpu: index of its device, None = the model's `device` decides.

    sharers, gpu_sharers: workers on this machine, and with the same device, this one among them. ram_cache_bytes: its own part.
    """

    model: ModelConfig
    number: int
    gpu: int | None
    sharers: int
    gpu_sharers: int
    ram_cache_bytes: int

    @property
    def label(self) -> str:
        return f"{self.model.name}/{self.number}"


def shares(models: Sequence[ModelConfig]) -> tuple[Share, ...]:
    """All workers of all models, in order."""
    places = [
        (model, number, model.gpus[number % len(model.gpus)] if model.gpus else None)
        for model in models
        for number in range(model.worker_count)
    ]
    # Without a choice CUDA takes the first device.
    users = Counter(gpu or 0 for model, _, gpu in places if model.device != "cpu")
    return tuple(
        Share(
            model,
            number,
            gpu,
            len(places),
            users[gpu or 0] if model.device != "cpu" else 1,
            model.ram_cache_bytes // model.worker_count,
        )
        for model, number, gpu in places
    )


def visible_device(gpu: int, visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES is to say for the gpu-th of the devices that it lists now (None: all). Raises ValueError."""
    if not visible:
        return str(gpu)
    listed = [name.strip() for name in visible.split(",")]
    if gpu >= len(listed):
        raise ValueError(f"model.gpus: got {gpu}; CUDA_VISIBLE_DEVICES lists {len(listed)}, from 0 on")
    return listed[gpu]
