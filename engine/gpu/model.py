"""The offloaded engine's model: weights and experts on a device, decode steps as graphs, prefill in passes.

Knows nothing of requests; engine.py hands over flat batches, as to every backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch

from engine.attention.base import Attention
from engine.batch import ForwardBatch, SeqSlice
from engine.device.base import Device, Graph
from engine.elastic.memory import Memory
from engine.errors import DeviceError
from engine.gpu.decode import Buffers, DecodeStep
from engine.gpu.experts import ExpertPool, Reads
from engine.gpu.experts_pass import ExpertPass
from engine.gpu.prefill import PrefillStep
from engine.gpu.tables import DecodeTables
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
        self._decode_buffers = Buffers(max_rows, decoder.spec.dtype, place)
        self._pass_buffers = Buffers(pass_tokens, decoder.spec.dtype, place)
        self._chunk_buffers = Buffers(min(chunk_rows, pass_tokens), decoder.spec.dtype, place)
        self.expert_pass: ExpertPass | None = None
        if experts is not None:
            flops = 2 * dense_weights(decoder) // len(decoder.layers)
            self.expert_pass = ExpertPass(experts, ops, self._chunk_buffers, self._pass_buffers, flops)
        self._tables: DecodeTables | None = None
        self._graphs: dict[tuple[int, Reads], tuple[Graph, torch.Tensor]] = {}
        self._pools: tuple[KvPools, RecurrentPools] | None = None
        self._sizes = graph_sizes(max_rows)
        self._beside: Callable[[], None] | None = None
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
            return self._decode(batch.token_ids, batch.seqs, kv, states)
        steps = [seq for seq in batch.seqs if seq.length == 1]
        wanted = batch.logit_rows.tolist()
        out: torch.Tensor | None = None
        if steps:
            tokens = batch.token_ids[[seq.start for seq in steps]]
            logits = self._decode(tokens, steps, kv, states).rows
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
        self._graphs.clear()
        self._tables = DecodeTables(self.device, self._sizes[-1], -(-self._max_context // kv.page_size), kv.page_size)

    # ── decode ──────────────────────────────────────────────────────────────────────────────────────────────────

    def warm_up(self, kv: KvPools, states: RecurrentPools) -> None:
        """Capture every graph now: the first token of the first request does not wait for it."""
        self._bind(kv, states)
        for size in self._sizes:
            for reads in (Reads.NOTHING,) if self.experts is None else self.experts.reads:
                self._graph(size, reads)

    def set_beside(self, callback: Callable[[], None]) -> None:
        """See models/base.Staged."""
        self._beside = callback

    def rehearse(self, kv: KvPools, states: RecurrentPools, tokens: int) -> None:
        """See models/base.Staged."""
        most = min(tokens, self._pass_buffers.rows, self._max_context)
        for length in sorted({size for size in REHEARSED if size < most} | ({most} if most > 1 else set())):
            pages = torch.arange(-(-length // kv.page_size), dtype=torch.int32)
            seq = SeqSlice(0, length, 0, pages, 0 if states.delta else -1, True)
            ids = torch.arange(length) % self.spec.vocab_size
            self.forward(ForwardBatch(ids, torch.arange(length), (seq,), torch.tensor([length - 1])), kv, states)

    def _graph(self, rows: int, reads: Reads) -> tuple[Graph, torch.Tensor]:
        """Of the least size ≥ rows."""
        key = (next(size for size in self._sizes if size >= rows), reads)
        if key not in self._graphs:
            assert self._pools is not None
            assert self._tables is not None
            pools, rope = self._pools, self._decoder.rope
            step = DecodeStep(
                key[0], self.spec, self._ops, self._tables, self._decode_buffers, self.experts, *pools, rope, reads
            )
            self._decoder.run(step)
            self._tables.fill(torch.zeros(0, dtype=torch.int64), ())  # capturing runs the step once: on no sequence
            self._graphs[key] = self.device.capture(step.tape), step.logits_out
        return self._graphs[key]

    def _decode(self, tokens: torch.Tensor, seqs: Sequence[SeqSlice], kv: KvPools, states: RecurrentPools) -> Logits:
        """One token of each sequence. The logits are the buffer's, unless it takes more than one step."""
        parts: list[torch.Tensor] = []
        best: list[int] = []
        most = self._sizes[-1]
        for first in range(0, len(seqs), most):
            part = seqs[first : first + most]
            reads = Reads.NOTHING
            if self.experts is not None and self.expert_pass is not None and not self.experts.resident:
                reads = self.experts.use_table(len(part), fetching=not self.expert_pass.streaming)
                self.experts.wake()
            graph, logits = self._graph(len(part), reads)
            assert self._tables is not None
            self._tables.fill(tokens[first : first + most], part)
            began = time.perf_counter_ns()
            graph.replay()
            for seq in part:
                for cut in seq.cuts:
                    for pool in (*states.delta, *states.conv):
                        pool[cut.dest_row].copy_(pool[seq.state_row])
            parts.append(logits[: len(part)] if len(part) == len(seqs) else logits[: len(part)].clone())
            computed = self.device.moment()
            known = True
            if self._beside is not None:
                self._beside()
                known = not computed.reached()  # else the step was over before, and nobody knows when
            # The tables' host copy may be written again only now, and a failed executor must be seen before a token is drawn.
            if self._in_pass:
                self.device.synchronize()
            else:
                computed.wait()  # and not for copies to the host, which go on
            self._check()
            best += self._tables.best[: len(part)].tolist()
            if self.experts is not None and not self._in_pass and known:
                self.experts.stepped(len(part), time.perf_counter_ns() - began)
        return Logits(parts[0] if len(parts) == 1 else torch.cat(parts), best)

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
            self._graphs.clear()
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


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: powers of two, then max_rows. A step is padded to the next of them. Integers only."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


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
