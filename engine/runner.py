"""Loads a checkpoint and runs its forward passes on the backend that was asked for.

Knows neither requests nor schedules: engine.py does, and hands over flat batches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.batch import ForwardBatch, SeqSlice, StateCut
from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.kernels import reference
from engine.layers.eager import EagerStep
from engine.models import registry
from engine.models.base import KvPools, Model, ModelSpec, RecurrentPools
from engine.models.decoder import Decoder
from engine.models.hf_config import HfConfig
from engine.moe.layer import Moe
from engine.moe.offload import ExpertOffload
from engine.moe.slots import SlotMap, make_policy
from engine.quant import registry as formats
from engine.weights.loader import Weights, read_config
from engine.weights.reader import CheckpointReader


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. weights_digest: see fingerprint.py. slots: the expert slot map, None if all are resident."""

    model: Model
    weights_digest: str
    slots: SlotMap | None


def load_model(config: EngineConfig) -> LoadedModel:
    """Read config.model_dir. Raises CheckpointError or Unsupported, naming the file, tensor or field at fault."""
    if config.model_dir is None:
        raise CheckpointError("no model directory was given")
    directory = Path(config.model_dir)
    described = read_config(directory)
    _, build = registry.find(described)
    reader = CheckpointReader(directory)
    wanted = "float32" if config.backend == "reference" else config.dtype
    form = formats.choose(described, _embedding_dtype(reader), wanted)
    weights = Weights(reader, form.dtype)
    decoder = build(HfConfig(described, _generation_config(directory)), weights)
    numerics = {**decoder.spec.numerics, "backend": config.backend, "format": form.name}
    decoder = replace(decoder, spec=replace(decoder.spec, numerics=numerics))
    slots: SlotMap | None = None
    if config.slots != "auto":
        decoder, slots = offload_experts(decoder, config)
    runner = ReferenceModel(decoder) if config.backend == "reference" else CpuModel(decoder)
    return LoadedModel(runner, weights.digest(), slots)


def offload_experts(decoder: Decoder, config: EngineConfig) -> tuple[Decoder, SlotMap | None]:
    """Put the routed experts behind config.slots slots (at most one for each expert)."""
    moes = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Moe)]
    if not moes or config.slots == "auto":
        return decoder, None
    slots = min(int(config.slots), sum(moe.bank.rows for moe in moes))
    policy = make_policy(config.slot_policy, slots, len(moes))
    offload = ExpertOffload([moe.bank for moe in moes], slots, policy, reference)
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, offload=offload)) if isinstance(layer.mlp, Moe) else layer
        for layer in decoder.layers
    )
    return replace(decoder, layers=layers, spec=replace(decoder.spec, slots=slots)), offload.map


class CpuModel:
    """The fast backend: whole flat batches."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> torch.Tensor:
        return self._decoder.run(EagerStep(batch, kv, states, self._decoder.rope))


class ReferenceModel:
    """The reference backend: one token at a time, so that every operation has the same shape whatever the batch looks like.

    That makes a token's result depend on its prefix alone, to the bit: see kernels/reference.py.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> torch.Tensor:
        rows = batch.logit_rows.tolist()
        logits = torch.empty(len(rows), self.spec.vocab_size)
        for seq in batch.seqs:
            for offset in range(seq.length):
                single = one_token(batch, seq, offset, wanted=seq.start + offset in rows)
                result = self._decoder.run(EagerStep(single, kv, states, self._decoder.rope))
                if len(result):
                    logits[rows.index(seq.start + offset)] = result[0]
        return logits


def one_token(batch: ForwardBatch, seq: SeqSlice, offset: int, wanted: bool) -> ForwardBatch:
    """The batch that holds only token `offset` of `seq`."""
    row = seq.start + offset
    cuts = tuple(StateCut(1, cut.dest_row) for cut in seq.cuts if cut.offset == offset + 1)
    single = replace(seq, start=0, length=1, context=seq.context + offset, fresh=seq.fresh and offset == 0, cuts=cuts)
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
