"""The offloaded engine's model: weights and experts on a device, decode steps as graphs, prefill in passes.

Knows nothing of requests; engine.py hands over flat batches, as to every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from engine.attention.base import Attention
from engine.batch import ForwardBatch, SeqSlice
from engine.device.base import Device
from engine.elastic.memory import Memory
from engine.errors import DeviceError
from engine.gpu.decode import Buffers
from engine.gpu.experts import ExpertPool
from engine.gpu.experts_pass import ExpertPass
from engine.gpu.prefill import PrefillStep
from engine.gpu.steps import DecodeSteps
from engine.models.base import KvPools, Logits, ModelSpec, RecurrentPools
from engine.models.decoder import Decoder
from engine.moe.layer import Moe

REHEARSED = (2, 4, 8, 12, 24, 48, 96, 192, 384, 768, 1536)
"""Prompts between which no kernel is chosen anew but by the way that experts come."""


class GpuModel:
    """See models/base.Model. Bound to the first pools that it is given: graphs hold their addresses.

    decoder: on the device. experts: None for a model without MoE layers. max_rows: most sequences of a decode step.
    pass_tokens: most tokens of one pass; chunk_rows: of one of its chunks. memory: where slots and pages lie, closed with it.
    """

    def __init__(
        self,
        decoder: Decoder,
        device: Device,
        ops: ModuleType,
        experts: ExpertPool | None,
        *,
        max_rows: int,
        max_context: int,
        pass_tokens: int,
        chunk_rows: int,
        memory: Memory | None = None,
    ) -> None:
        self._memory = memory
        self._decoder, self.device, self._ops, self.experts = decoder, device, ops, experts
        self._max_context = max_context
        place = device.torch_device
        self._pass_buffers = Buffers(pass_tokens, decoder.spec.dtype, place)
        self._chunk_buffers = Buffers(min(chunk_rows, pass_tokens), decoder.spec.dtype, place)
        self.expert_pass: ExpertPass | None = None
        if experts is not None:
            flops = 2 * dense_weights(decoder) // len(decoder.layers)
            self.expert_pass = ExpertPass(experts, ops, self._chunk_buffers, self._pass_buffers, flops)
        self.steps = DecodeSteps(decoder, device, ops, experts, max_rows, max_context)
        self._pools: tuple[KvPools, RecurrentPools] | None = None
        decoder.rope.reach(max_context)
        decoder.rope.move(place)

    @property
    def _in_pass(self) -> bool:
        return self.expert_pass is not None and self.expert_pass.streaming

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.spec

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        """The logits lie on the device. Raises DeviceError if the device or the executor failed; state is then undefined."""
        with device_errors(self.device.name):
            return self._forward(batch, kv, states)

    def _forward(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> Logits:
        self._bind(kv, states)
        longer = [seq for seq in batch.seqs if seq.length > 1]
        if not longer and len(batch.logit_rows) == len(batch.seqs):
            return self.steps.run(batch.token_ids, batch.seqs, self._in_pass)
        steps = [seq for seq in batch.seqs if seq.length == 1]
        wanted = batch.logit_rows.tolist()
        out: torch.Tensor | None = None
        if steps:
            tokens = batch.token_ids[[seq.start for seq in steps]]
            logits = self.steps.run(tokens, steps, self._in_pass).rows
            picked = [index for index, seq in enumerate(steps) if seq.start in wanted]
            out = (
                logits
                if len(picked) == len(wanted)
                else self._place(out, logits[picked], [steps[i].start for i in picked], wanted)
            )
        if longer:
            part, rows = _only(batch, longer)
            logits = self._prefill(part, kv, states)
            out = logits if len(rows) == len(wanted) else self._place(out, logits, rows, wanted)
        assert out is not None
        return Logits(out)

    def _place(self, out: torch.Tensor | None, logits: torch.Tensor, rows: list[int], wanted: list[int]) -> torch.Tensor:
        if out is None or len(out) != len(wanted):
            out = torch.empty(len(wanted), self.spec.vocab_size, dtype=torch.float32, device=logits.device)
        if rows:
            at = torch.tensor([wanted.index(row) for row in rows], device=logits.device)
            out.index_copy_(0, at, logits)
        return out

    def _bind(self, kv: KvPools, states: RecurrentPools) -> None:
        self.device.adopt()  # the thread that steps may not be the one that loaded
        if self._pools is not None and self._pools[0] is kv and self._pools[1] is states:
            return
        self._pools = (kv, states)
        self.steps.bind(kv, states)

    # ── decode ──────────────────────────────────────────────────────────────────────────────────────────────────

    def warm_up(self, kv: KvPools, states: RecurrentPools) -> None:
        """Capture every graph now: the first token of the first request does not wait for it."""
        self._bind(kv, states)
        self.steps.capture()

    def set_beside(self, callback: Callable[[], None]) -> None:
        """See models/base.Staged."""
        self.steps.beside = callback

    def look_ahead(self, batch: ForwardBatch | None) -> None:
        """See models/base.Staged."""
        self.steps.look_ahead(batch)

    @property
    def begun(self) -> bool:
        """See models/base.Staged."""
        return self.steps.begun

    def rehearse(self, kv: KvPools, states: RecurrentPools, tokens: int) -> None:
        """See models/base.Staged."""
        most = min(tokens, self._pass_buffers.rows, self._max_context)
        for length in sorted({size for size in REHEARSED if size < most} | ({most} if most > 1 else set())):
            pages = torch.arange(-(-length // kv.page_size), dtype=torch.int32)
            seq = SeqSlice(0, length, 0, pages, 0 if states.delta else -1, True)
            ids = torch.arange(length) % self.spec.vocab_size
            self.forward(ForwardBatch(ids, torch.arange(length), (seq,), torch.tensor([length - 1])), kv, states)

    # ── prefill ─────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> GpuPass:
        """See models/base.Staged. One at a time."""
        self._bind(kv, states)
        if len(batch.token_ids) > self._pass_buffers.rows:
            raise ValueError(f"a pass of {len(batch.token_ids)} tokens exceeds the buffers' {self._pass_buffers.rows}")
        place = self.device.torch_device
        buffers = (self._pass_buffers, self._chunk_buffers)
        step = PrefillStep(batch, self.spec, self._ops, *buffers, self.expert_pass, kv, states, self._decoder.rope, place)
        return GpuPass(self, self._decoder, step, len(batch.token_ids))

    def _prefill(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools) -> torch.Tensor:
        work = self.begin(batch, kv, states)
        while True:
            logits = work.advance()
            if logits is not None:
                return logits.rows

    def settle(self) -> None:
        """Wait for the device. Raises DeviceError if the device or the executor failed."""
        experts = self.experts
        if experts is not None and not experts.resident:
            experts.box.status_host.copy_(experts.box.status, non_blocking=True)
        self.device.synchronize()
        self._check()

    def _check(self) -> None:
        if self.experts is not None:
            self.experts.check()

    def close(self) -> None:
        """Wait for the device and give back pinned memory, threads, slots and pages."""
        self.device.synchronize()
        if self.experts is not None:
            self.experts.close()
        if self._memory is not None:
            self.steps.graphs.clear()
            self._memory.close()


@contextmanager
def device_errors(name: str) -> Iterator[None]:
    """Errors of the CUDA runtime, which torch raises as RuntimeError wherever it sees them first, as DeviceError.

    Running out of memory is none: the allocator refused, and the device goes on."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "CUDA error" in str(error) or "CUDA driver error" in str(error):
            raise DeviceError(f"{name}: {str(error).splitlines()[0]}") from error
        raise


class GpuPass:
    """See models/base.Pass."""

    def __init__(self, model: GpuModel, decoder: Decoder, step: PrefillStep, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._experts = model.expert_pass
        self._stages = decoder.stages(step)
        self._begun = False

    def advance(self) -> Logits | None:
        self._model.device.adopt()
        try:
            if not self._begun and self._experts is not None:
                self._experts.begin(self._tokens)
            self._begun = True
            with device_errors(self._model.device.name):
                next(self._stages)
        except StopIteration as end:
            if self._experts is not None:
                self._experts.end()
            self._model.settle()
            return Logits(end.value)
        except BaseException:
            self.abandon()
            raise
        return None

    def abandon(self) -> None:
        self._stages.close()
        if self._experts is not None:
            self._experts.end()


def dense_weights(decoder: Decoder) -> int:
    """Weights of all layers that every token goes through, without routed experts, embedding and head."""
    count = 0
    for layer in decoder.layers:
        mixer, mlp = layer.mixer, layer.mlp
        first = mixer.qkv if isinstance(mixer, Attention) else mixer.project
        count += first.weight.numel() + mixer.out.weight.numel()
        dense = mlp.shared if isinstance(mlp, Moe) else mlp
        count += 0 if dense is None else dense.gate_up.numel() + dense.down.numel()
    return count


def _only(batch: ForwardBatch, seqs: list[SeqSlice]) -> tuple[ForwardBatch, list[int]]:
    """The part of a batch that belongs to these sequences, and which of its wanted rows they are."""
    if len(seqs) == len(batch.seqs):
        return batch, batch.logit_rows.tolist()
    moved, ids, positions, rows, kept = [], [], [], [], []
    at = 0
    wanted = batch.logit_rows.tolist()
    for seq in seqs:
        own = slice(seq.start, seq.start + seq.length)
        ids.append(batch.token_ids[own])
        positions.append(batch.positions[own])
        mine = [row for row in wanted if own.start <= row < own.stop]
        kept += mine
        rows += [row - seq.start + at for row in mine]
        moved.append(seq._replace(start=at))
        at += seq.length
    return ForwardBatch(torch.cat(ids), torch.cat(positions), tuple(moved), torch.tensor(rows, dtype=torch.int64)), kept
