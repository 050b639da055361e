"""Loads a checkpoint and runs its forward passes on the backend that was asked for.

Knows neither requests nor schedules: engine.py does, and hands over flat batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.batch import ForwardBatch, SeqSlice, StateCut
from engine.config import EngineConfig, Machine
from engine.errors import CheckpointError, Unsupported
from engine.kernels import cpu
from engine.layers.eager import EagerStep
from engine.layers.program import Limits, ProgramStep, needs
from engine.models import registry
from engine.models.base import KvPools, Logits, Model, ModelSpec, RecurrentPools, SlotCounters
from engine.models.decoder import Decoder
from engine.models.hf_config import HfConfig
from engine.moe.layer import Moe
from engine.moe.offload import ExpertOffload
from engine.moe.slots import SlotMap, make_policy
from engine.quant import registry as formats
from engine.weights.digests import Digests
from engine.weights.loader import Weights, read_config
from engine.weights.reader import CheckpointReader

if TYPE_CHECKING:
    from engine.device.base import Device
    from engine.elastic.boundary import Divided
    from engine.moe.host_bank import HostBank

log = logging.getLogger(__name__)

# Bumped by hand when a change of kernels or of the order of operations changes results beyond rounding: saved state of an
# older number is not used again.
NUMERICS_VERSION = "1"

# What the first recorded step has room for; later ones grow in powers of two.
FIRST_LIMITS = Limits(rows=64, seqs=8, pages=64, cuts=16, positions=4096)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. weights_digest: see fingerprint.py. slots: counters of the expert slots, None if all are resident.

    config: what was asked for, with what loading decided. device: where states lie, None = host memory. divided: its memory
    that can change hands.
    """

    model: Model
    weights_digest: str
    slots: SlotCounters | None
    config: EngineConfig
    device: Device | None = None
    divided: Divided | None = None


def load_model(config: EngineConfig, tell: Callable[[float, str], None] = lambda fraction, what: None) -> LoadedModel:
    """Read config.model_dir. tell(fraction, what): progress.

    Raises CheckpointError or Unsupported, naming the file, tensor or field at fault; OutOfDeviceMemory.
    """
    if config.model_dir is None:
        raise CheckpointError("no model directory was given")
    directory = Path(config.model_dir)
    threads = config.resolve(Machine.here()).threads
    assert threads != "auto"
    if config.backend == "exact":
        if not cpu.available():
            raise Unsupported("backend exact: needs the C++ library; accepted without it: reference, which is slower")
        if config.slots != "auto":
            raise Unsupported(f"backend exact: slots={config.slots}, whose experts add up in another order; accepted: auto")
        cpu.set_threads(1)  # sums over a long context may be divided among threads
    elif config.backend in ("cpu", "cuda") and cpu.available():
        cpu.set_threads(threads)  # and leave torch alone: its threads spin, and all that it still does here is small
    elif config.backend == "cpu":
        torch.set_num_threads(threads)
    described = read_config(directory)
    _, build = registry.find(described)
    reader = CheckpointReader(directory)
    wanted = "float32" if config.backend in ("exact", "reference") else config.dtype
    fast = config.backend in ("cpu", "exact")
    form = formats.choose(described, _embedding_dtype(reader), wanted)
    store = device = None
    if config.backend == "cuda":
        from engine.gpu.load import open_device
        from engine.moe.host_bank import BankLoader

        store, device = BankLoader(), open_device(config)
    elif fast:
        reader.advise(cpu.advise_huge)
    digests = Digests(config.digests, verify=config.verify_weights)
    empty = cpu.huge_empty if fast else torch.empty
    weights = Weights(reader, form.dtype, empty=empty, digests=digests, store=store)
    decoder = build(HfConfig(described, _generation_config(directory)), weights)
    digests.save()
    own = {"backend": config.backend, "format": form.name, "version": NUMERICS_VERSION}
    if fast:
        own["kernels"] = cpu.isa() if cpu.available() else "torch"
    numerics = {**decoder.spec.numerics, **own}
    decoder = replace(decoder, spec=replace(decoder.spec, numerics=numerics))
    if device is not None and store is not None:
        return _on_device(decoder, weights.digest(), store.bank, config, device, tell)
    slots: SlotMap | None = None
    if config.slots != "auto":
        decoder, slots = offload_experts(decoder, config)
    whole = PlainModel(decoder) if config.backend == "reference" else CpuModel(decoder)
    model = whole if config.backend == "cpu" else TokenByToken(whole)
    return LoadedModel(model, weights.digest(), slots, config)


def _on_device(
    decoder: Decoder,
    digest: str,
    bank: HostBank | None,
    config: EngineConfig,
    device: Device,
    tell: Callable[[float, str], None],
) -> LoadedModel:
    from engine.gpu.load import place

    placed = place(decoder, bank, config, device, tell)
    for line in placed.lines:
        log.info("%s", line)
    offloaded = placed.model.experts is not None and not placed.model.experts.resident
    slots = placed.model.experts if offloaded else None
    return LoadedModel(placed.model, digest, slots, placed.config, device, placed.divided)


def offload_experts(decoder: Decoder, config: EngineConfig) -> tuple[Decoder, SlotMap | None]:
    """Put the routed experts behind config.slots slots (at most one for each expert)."""
    moes = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Moe)]
    if not moes or config.slots == "auto":
        return decoder, None
    slots = min(int(config.slots), sum(moe.bank.rows for moe in moes))
    policy = make_policy(config.slot_policy, slots, len(moes))
    native = config.backend == "cpu" and cpu.available()
    offload = ExpertOffload([moe.bank for moe in moes], slots, policy, native)
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, offload=offload)) if isinstance(layer.mlp, Moe) else layer
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers, spec=replace(decoder.spec, slots=slots)), offload.map


class CpuModel:
    """The fast backend: whole flat batches, as native programs where the C++ kernels are there."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._native = cpu.available()
        self._step: ProgramStep | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        if not self._native:
            return Logits(self._decoder.run(EagerStep(batch, kv, states, self._decoder.rope)))
        return Logits(self._recorded(needs(batch), kv, states).run(batch))

    def _recorded(self, wanted: Limits, kv: KvPools, states: RecurrentPools) -> ProgramStep:
        """The recorded step, recorded again when a batch outgrows it or comes with other pools."""
        step = self._step
        if step is not None and step.kv is kv and step.states is states and step.limits.hold(wanted):
            return step
        limits = (FIRST_LIMITS if step is None else step.limits).grown(wanted)
        step = self._step = ProgramStep(limits, self.spec.dtype, kv, states, self._decoder.rope)
        self._decoder.run(step)
        return step


class PlainModel:
    """Whole batches by the plain kernels of kernels/reference.py."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a matrix product's order of sums may follow the number of threads
        try:
            return Logits(self._decoder.run(EagerStep(batch, kv, states, self._decoder.rope)))
        finally:
            torch.set_num_threads(threads)


class TokenByToken:
    """The backends that repeat to the bit: one token at a time, so that every operation has the same shape whatever the batch
    looks like. A token's result then depends on its prefix alone, by the plain kernels (reference) as by the fast ones (exact).
    """

    def __init__(self, model: PlainModel | CpuModel) -> None:
        self._model = model
        self._decoder = model._decoder

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        rows = batch.logit_rows.tolist()
        logits = torch.empty(len(rows), self.spec.vocab_size)
        for seq in batch.seqs:
            for offset in range(seq.length):
                wanted = seq.start + offset in rows
                result = self._model.forward(one_token(batch, seq, offset, wanted), kv, states).rows
                if wanted:
                    logits[rows.index(seq.start + offset)] = result[0]
        return Logits(logits)


def one_token(batch: ForwardBatch, seq: SeqSlice, offset: int, wanted: bool) -> ForwardBatch:
    """The batch that holds only token `offset` of `seq`."""
    row = seq.start + offset
    cuts = tuple(StateCut(1, cut.dest_row) for cut in seq.cuts if cut.offset == offset + 1)
    single = seq._replace(start=0, length=1, context=seq.context + offset, fresh=seq.fresh and offset == 0, cuts=cuts)
    return ForwardBatch(
        batch.token_ids[row : row + 1].clone(),
        batch.positions[row : row + 1].clone(),
        (single,),
        torch.zeros(int(wanted), dtype=torch.int64),
    )


def _embedding_dtype(reader: CheckpointReader) -> str:
    name = next((n for n in reader.names() if n.endswith("embed_tokens.weight")), None)
    return "BF16" if name is None else reader.entry(name).dtype


def _generation_config(directory: Path) -> dict[str, object]:
    path = directory / "generation_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError:
        raise CheckpointError(f"{path}: not JSON") from None
    return config if isinstance(config, dict) else {}
