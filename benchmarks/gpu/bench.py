"""The engine as the benchmarks use it: one bank of experts in pinned memory, and engines of any size and variant over it.

Loading and pinning 32 GB takes a minute; so the bank stays while engines come and go, and both variants share it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.geometry import Shape
from engine.ahead import Ahead
from engine.config import EngineConfig
from engine.device.base import Device, Graph
from engine.device.tape import Entry, Lane, Tape
from engine.engine import Engine
from engine.gpu.experts import ExpertPool
from engine.gpu.load import open_device, place
from engine.gpu.model import GpuModel
from engine.kernels import cpu
from engine.models import registry
from engine.models.decoder import Decoder
from engine.models.hf_config import HfConfig
from engine.moe.cost import Rates
from engine.moe.host_bank import BankLoader, HostBank, Record
from engine.moe.split import MissSplit
from engine.sampling import Sampler
from engine.types import SamplingParams
from engine.weights.digests import Digests
from engine.weights.loader import Weights, read_config
from engine.weights.reader import CheckpointReader

HYBRID, WHOLE = "hybrid", "hybrid, whole experts"
ASKED = ", each step asked for"
DRAWN = ", drawn"
ARMS = ("fetch", "cpu", HYBRID, WHOLE, "auto", "hybrid, no overlap", "auto" + ASKED, "auto" + DRAWN, "auto" + DRAWN + ASKED)
"""Ways to deal with misses. auto: hybrid with its fall-back. no overlap: fetches and compute in one stream. each step asked
for: none is begun before the tokens of the one before it were read. drawn: with a temperature (SAMPLING), not greedily."""
RESIDENT_ARMS = ("resident", "resident" + ASKED, "resident" + DRAWN, "resident" + DRAWN + ASKED)
SAMPLING = SamplingParams(1, temperature=0.7, top_k=20, top_p=0.95, seed=1)
"""As many models' generation_config has it."""


class KeptBank(HostBank):
    """Stays loaded and pinned when an engine is closed, and when all its experts lie on the device."""

    def unpin(self, device: Device) -> None:
        pass

    def discard(self) -> None:
        pass

    def release(self, device: Device) -> None:
        super().unpin(device)


class KeepingLoader(BankLoader):
    """Loads the bank with the first variant; for the others, which have the same experts, nothing is copied."""

    def __init__(self) -> None:
        super().__init__()
        self._complete = False

    def done(self) -> None:
        self._complete = True

    def place(
        self, capacity: int, count: int, inter: int, hidden: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._complete:
            gate_up = torch.empty(count, 2 * inter, hidden, dtype=dtype, device="meta")
            return gate_up, torch.empty(count, hidden, inter, dtype=dtype, device="meta")
        if self.bank is None:
            self.bank = KeptBank(capacity, Record(hidden, inter, dtype))
        return super().place(capacity, count, inter, hidden, dtype)


class LanedDevice:
    """A device whose tapes can be told to run in one stream, in the order of recording: what overlap is worth."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.overlap = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, tape: Tape) -> None:
        self._device.run(tape if self.overlap else one_lane(tape))

    def capture(self, tape: Tape) -> Graph:
        return self._device.capture(tape if self.overlap else one_lane(tape))


def one_lane(tape: Tape) -> Tape:
    """The calls of a tape in the order of recording, all on MAIN."""
    flat = Tape()
    flat.entries = [Entry(Lane.MAIN, call=entry.call) for entry in tape.entries if entry.call is not None]
    return flat


@dataclass
class Arms:
    """Switches a running engine between ways of dealing with misses, and of choosing tokens. Each way keeps what it has
    learned."""

    engine: Engine
    model: GpuModel
    device: LanedDevice
    rates: Rates
    max_rows: int
    ahead: Ahead | None
    _splits: dict[str, MissSplit] = field(default_factory=dict)
    _graphs: dict[bool, Any] = field(default_factory=dict)

    def use(self, arm: str) -> None:
        pool = self.model.experts
        assert pool is not None
        if self.ahead is not None:
            self.ahead.on = ASKED not in arm
        self._draw(DRAWN in arm)
        if pool.resident:
            return
        arm = arm.removesuffix(ASKED).removesuffix(DRAWN)
        mode: Any = arm.split(",")[0]
        if arm not in self._splits:
            inter = 0 if arm == WHOLE else pool.divisible
            self._splits[arm] = MissSplit(self.rates, pool.bank.record.nbytes, pool.top_k, self.max_rows, mode, inter)
        pool.split = self._splits[arm]
        pool._tables.clear()
        self.overlap("no overlap" not in arm)

    def _draw(self, on: bool) -> None:
        """Let all that run choose their tokens so from now on."""
        self.model.look_ahead(None)  # what was begun rests on how they were chosen before
        for seq in self.engine.outcomes.requests.values():
            params = SAMPLING if on else seq.request.sampling
            seq.sampler = Sampler(params, seq.request.token_ids, self.model.spec.vocab_size)

    def chosen(self, rows: int) -> str:
        """What `auto` has come to for steps of so many rows."""
        return self._splits["auto"].mode(rows)

    def overlap(self, on: bool) -> None:
        """Graphs of both kinds are kept, so that switching costs nothing."""
        if on == self.device.overlap:
            return
        self._graphs[self.device.overlap] = self.model.steps.graphs
        self.model.steps.graphs = self._graphs.get(on, {})
        self.device.overlap = on


@dataclass(frozen=True)
class Sizes:
    """Of an engine: see EngineConfig."""

    max_rows: int = 4
    page_size: int = 64
    kv_tokens: int = 1 << 18
    max_context: int = 70_000
    snapshot_rows: int = 16
    pass_tokens: int = 16384


TINY_SIZES = Sizes(max_rows=2, page_size=16, kv_tokens=2048, max_context=512, snapshot_rows=8, pass_tokens=64)


@dataclass
class Running:
    """An engine that serves. slots: of experts. arms: how misses are dealt with."""

    engine: Engine
    arms: Arms
    slots: int

    @property
    def pool(self) -> ExpertPool:
        model = self.engine.model
        assert isinstance(model, GpuModel)
        assert model.experts is not None
        return model.experts


class Bench:
    """directory: as checkpoint.make left it. host: compute on host memory in the device's place. rates: as calibrated."""

    def __init__(
        self,
        directory: Path,
        shape: Shape,
        *,
        rates: Rates,
        sizes: Sizes,
        host: bool = False,
        kernels: Any = None,
        threads: int = 1,
        elastic: Literal["manual", "off"] = "manual",
        tell: Callable[[str], None] = print,
    ) -> None:
        self.shape, self.sizes, self.rates = shape, sizes, rates
        self._directory, self._tell = directory, tell
        self.config = EngineConfig(
            backend="cuda",
            threads=threads,
            host_device=host,
            elastic=elastic,
            kernels=kernels,
            page_size=sizes.page_size,
            kv_tokens=sizes.kv_tokens,
            max_rows=sizes.max_rows,
            max_context=sizes.max_context,
            snapshot_rows=sizes.snapshot_rows,
            pass_tokens=sizes.pass_tokens,
        )
        if cpu.available():
            cpu.set_threads(threads)
        self._plain = open_device(self.config)
        self.device = LanedDevice(self._plain)
        self._loader = KeepingLoader()
        self._decoders: dict[str, Decoder] = {}

    @property
    def bank(self) -> KeptBank:
        assert isinstance(self._loader.bank, KeptBank)
        return self._loader.bank

    def decoder(self, variant: str) -> Decoder:
        if variant not in self._decoders:
            self._tell(f"loading {variant}")
            directory = self._directory / variant
            described = read_config(directory)
            _, build = registry.find(described)
            digests = Digests(self._directory / "digests.json")
            weights = Weights(CheckpointReader(directory), torch.bfloat16, digests=digests, store=self._loader)
            self._decoders[variant] = build(HfConfig(described, {}), weights)
            digests.save()
            self._loader.done()
            self.bank.pin(self._plain, None, lambda done, what: self._tell(what))
        return self._decoders[variant]

    def slots(self, share: float) -> int:
        return max(self.shape.top_k, round(share * self.shape.layers * self.shape.experts))

    @contextmanager
    def engine(self, variant: str, share: float) -> Iterator[Running]:
        """An engine with slots for `share` of all experts, its graphs captured."""
        gc.collect()  # an engine before this one may still be held by its own cycles
        decoder = self.decoder(variant)
        self.device.overlap = True
        config = replace(self.config, slots=self.slots(share))
        device: Any = self.device
        placed = place(decoder, self.bank, config, device, lambda done, what: self._tell(what))
        model = placed.model
        try:
            engine = Engine(model, placed.config, "", None, device, placed.divided)
            pools: Any = engine.store
            model.warm_up(pools.kv, pools.states)
            if self.device.torch_device.type == "cuda":
                model.rehearse(pools.kv, pools.states, config.rehearse_tokens)  # as a server does: no turn meets the compiler
            arms = Arms(engine, model, self.device, self.rates, self.sizes.max_rows, engine.passes.ahead)
            arms.use("auto")  # prefill, too, goes by the measured rates from here on
            gc.collect()
            gc.freeze()  # as a worker does
            yield Running(engine, arms, self.slots(share))
        finally:
            gc.unfreeze()
            model.close()
            del placed, model
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def close(self) -> None:
        if self._loader.bank is not None:
            self.bank.release(self._plain)
