"""Settings of one engine. Frozen; `resolve` decides every "auto" and returns a copy.

Reads no environment and no files except /proc/meminfo (`Machine.here`); the sizes of pools are worked out in budget.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from engine import budget
from engine.errors import InvalidRequest
from engine.models.base import ModelSpec

Backend = Literal["cpu", "exact", "reference", "cuda"]
Auto = Literal["auto"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What "auto" is decided from. cores: usable by this process. available_bytes: memory that may be taken."""

    cores: int
    available_bytes: int

    def threads(self, device: bool) -> int:
        """CPU threads that compute: all cores, but for one that waits for the device if there is one."""
        return max(1, self.cores - int(device))

    @classmethod
    def here(cls) -> Machine:
        """This machine now. Without /proc/meminfo (not Linux) 4 GiB are assumed."""
        try:
            cores = len(os.sched_getaffinity(0))
        except AttributeError:
            cores = os.cpu_count() or 1
        available = 4 << 30
        try:
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) << 10
        except OSError:
            pass
        return cls(cores, available)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and how much may run at once.

    model_dir: directory with config.json and *.safetensors.
    backend: "cpu" is fast. For tests, in f32 and one token at a time, so that a token's result depends on its prefix alone, to
        the bit: "exact" by the same kernels, on one thread and without slots, and "reference" by the plain ones.
    dtype: of weights, activations and KV; "auto" = as the checkpoint stores them. f32 on the exact and reference backends.
    threads: CPU threads; "auto" = all cores of this process.
    page_size: token positions per KV page.
    chunk_tokens: prefill chunks end at multiples of this, counted from position 0 whatever was restored.
    step_tokens: tokens per step, decode rows first; a step that has prefill takes at least one chunk. "auto" = chunk_tokens.
    restore_bytes: of saved states, how many one step copies back into the pools at most; the rest follows in the next steps.
    decode_gap_ms: how long a step with prefill may take while others generate or wait: chunks are cut in halves for it, as far
    as that helps. 0 = no limit.
    max_rows: requests that run at once.
    max_context: tokens of prompt and output together; "auto" = the model's, if the pages allow it.
    memory_bytes: for KV pages and recurrent rows; "auto" = a quarter of what is available.
    kv_tokens: token positions over all pages; "auto" = from memory_bytes.
    snapshot_rows: recurrent rows beside the running ones, for held states; "auto" = from memory_bytes, at most 64.
    digests: file to remember the weights' digests in, so that a load need not compute them; None = compute them.
    verify_weights: compute them all the same, and warn of one that differs from what was remembered.
    slots: expert slots over all MoE layers; "auto" = every expert resident.
    slot_policy: who is evicted from the slots.
    poison_freed: fill freed pages and rows with NaN (tests), so that a stale read shows.

    Of the cuda backend alone:
    vram_bytes: device memory that this engine may take in all; None = what is free, less a reserve.
    pin_bytes: most host memory that is pinned for the experts; None = all of them, as far as the system allows.
    pass_tokens: prompt tokens that go through the layers together; takes the place of chunk_tokens and step_tokens there. None
    = 16384 or what a sixteenth of the device's memory holds.
    rehearse_tokens: longest of the prompts that a CUDA device computes before the engine is ready, so that no request waits for
    a compiler; 0 = none.
    elastic: whether expert slots and KV pages may trade memory while serving: "auto" = the engine does it by itself, "manual" =
    only when it is told to, "off" = each keeps its own.
    expert_mode: how decode misses are divided; "auto" = hybrid, fetch or cpu by what is seen to be fastest.
    divide_experts: whether a miss may also be divided within the expert, which is done where measured rates say that it pays.
    ahead_rows: requests that the device may compute one token ahead of what the host has read, all that run or none; each
    takes a recurrent row. 0 = it waits for the host after every token.
    rates: file of measured rates; without an entry for this machine they are measured at the start, for a second or two, and
    kept there. None = assumed rates.
    kernels: "triton", or "plain" torch; None = triton on a device. host_device: compute on host memory in the device's place
    (tests); host_seed: of the order in which its two lanes run.
    """

    model_dir: Path | None = None
    backend: Backend = "cpu"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: int | Auto = "auto"
    page_size: int = 64
    chunk_tokens: int = 512
    step_tokens: int | Auto = "auto"
    restore_bytes: int = 32 << 20
    decode_gap_ms: int = 80
    max_rows: int = 16
    max_context: int | Auto = "auto"
    memory_bytes: int | Auto = "auto"
    kv_tokens: int | Auto = "auto"
    snapshot_rows: int | Auto = "auto"
    digests: Path | None = None
    verify_weights: bool = False
    slots: int | Auto = "auto"
    slot_policy: Literal["lru", "lru_floor", "frequency"] = "lru_floor"
    poison_freed: bool = False
    vram_bytes: int | None = None
    pin_bytes: int | None = None
    pass_tokens: int | None = None
    expert_mode: Literal["auto", "hybrid", "fetch", "cpu"] = "auto"
    divide_experts: bool = True
    ahead_rows: int = 4
    rehearse_tokens: int = 4096
    elastic: Literal["auto", "manual", "off"] = "auto"
    rates: Path | None = None
    kernels: Literal["triton", "plain"] | None = None
    host_device: bool = False
    host_seed: int | None = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(EngineConfig).items():  # files hold texts where numbers belong
            accepted = tuple(_accepted(kind))
            if not any(_is(getattr(self, name), one) for one in accepted):
                raise InvalidRequest(name, getattr(self, name), " or ".join(_named(one) for one in accepted))
        for name in ("page_size", "chunk_tokens", "restore_bytes", "max_rows"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, getattr(self, name), "an integer ≥ 1")
        for name in ("threads", "step_tokens", "max_context", "memory_bytes", "kv_tokens", "slots"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise InvalidRequest(name, value, 'an integer ≥ 1 or "auto"')
        if self.decode_gap_ms < 0:
            raise InvalidRequest("decode_gap_ms", self.decode_gap_ms, "an integer ≥ 0")
        for name, least in (
            ("vram_bytes", 1),
            ("pin_bytes", 0),
            ("pass_tokens", 1),
            ("rehearse_tokens", 0),
            ("ahead_rows", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidRequest(name, value, f"an integer ≥ {least}")
        if self.snapshot_rows != "auto" and self.snapshot_rows < 0:
            raise InvalidRequest("snapshot_rows", self.snapshot_rows, 'an integer ≥ 0 or "auto"')

    @property
    def spare_rows(self) -> int:
        """Recurrent rows that running requests may have beside their own, where the model can look ahead."""
        return min(self.ahead_rows, self.max_rows)

    def resolve(self, machine: Machine, spec: ModelSpec | None = None) -> EngineConfig:
        """A copy in which nothing that can be known yet is "auto".

        Without spec (before the weights are read) only threads, step_tokens and memory_bytes are decided, and dtype and
        slots stay as they are for the loader; with it everything is.
        """
        known = replace(
            self,
            threads=machine.threads(self.backend == "cuda") if self.threads == "auto" else self.threads,
            step_tokens=self.chunk_tokens if self.step_tokens == "auto" else self.step_tokens,
            memory_bytes=machine.available_bytes // 4 if self.memory_bytes == "auto" else self.memory_bytes,
        )
        if spec is None:
            return known
        assert known.memory_bytes != "auto"
        sizes = budget.pool_sizes(
            memory_bytes=known.memory_bytes,
            kv_token_bytes=budget.kv_token_bytes(spec),
            state_row_bytes=budget.state_row_bytes(spec),
            page_size=self.page_size,
            max_rows=self.max_rows,
            max_context=spec.max_context if self.max_context == "auto" else min(self.max_context, spec.max_context),
            kv_tokens=None if self.kv_tokens == "auto" else self.kv_tokens,
            snapshot_rows=None if self.snapshot_rows == "auto" else self.snapshot_rows,
        )
        return replace(
            known,
            dtype=str(spec.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            max_context=sizes.max_context,
            kv_tokens=sizes.pages * self.page_size,
            snapshot_rows=sizes.snapshot_rows,
            slots=known.slots if spec.slots is None else spec.slots,
        )


def _accepted(kind: Any) -> Iterator[Any]:
    """Types and single values that a field may have."""
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _accepted(one)
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        yield kind


def _is(value: Any, accepted: Any) -> bool:
    if not isinstance(accepted, type):
        return type(value) is type(accepted) and value == accepted
    return isinstance(value, accepted) and (accepted is bool or not isinstance(value, bool))


def _named(accepted: Any) -> str:
    words = {int: "an integer", bool: "true or false", NoneType: "nothing", Path: "a path"}
    return words.get(accepted, f'"{accepted}"')
