"""One pass of many tokens through the model, layer by layer: every operation of a layer sees all tokens before the next layer
begins, so that a pass over the expert bank serves as many tokens as there are.

Inside a layer, tokens go through in chunks, which bounds the memory of activations. Positions where recurrent state is to be
kept split only the work of the recurrent operators. How a layer's experts come is experts_pass.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from engine.attention.base import Attention
from engine.batch import ForwardBatch, SeqSlice
from engine.gpu.decode import Buffers
from engine.gpu.experts_pass import ExpertPass
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rope import RopeTable
from engine.models.base import KvPools, ModelSpec, RecurrentPools
from engine.moe.layer import Mlp, Moe


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence inside a chunk. start: within the chunk. cut: row that receives the recurrent state
    after it, −1 = none."""

    seq: int
    start: int
    length: int
    context: int
    cut: int = -1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Flat rows [first, first + length) of a pass. whole: one segment a sequence, for attention. rounds: for recurrence; the
    segments of a round belong to different sequences, and those of one sequence are in order."""

    first: int
    length: int
    whole: tuple[Segment, ...]
    rounds: tuple[tuple[Segment, ...], ...]


def plan_chunks(seqs: Sequence[SeqSlice], chunk_rows: int) -> tuple[Chunk, ...]:
    """Cut a flat batch into chunks of at most chunk_rows rows, and their sequences at state cuts. Integers only."""
    total = seqs[-1].start + seqs[-1].length
    chunks = []
    for first in range(0, total, chunk_rows):
        end = min(total, first + chunk_rows)
        whole: list[Segment] = []
        split: list[list[Segment]] = []
        for index, seq in enumerate(seqs):
            begin, stop = max(first, seq.start), min(end, seq.start + seq.length)
            if begin >= stop:
                continue
            offset = begin - seq.start
            whole.append(Segment(index, begin - first, stop - begin, seq.context + offset))
            parts: list[Segment] = []
            cuts = {cut.offset: cut.dest_row for cut in seq.cuts}
            for edge in sorted({stop - seq.start} | {c for c in cuts if offset < c <= stop - seq.start}):
                at = begin - first if not parts else parts[-1].start + parts[-1].length
                done = at + first - seq.start
                parts.append(Segment(index, at, edge - done, seq.context + done, cuts.get(edge, -1)))
            split.append(parts)
        deepest = max(map(len, split))
        rounds = tuple(tuple(parts[i] for parts in split if i < len(parts)) for i in range(deepest))
        chunks.append(Chunk(first, end - first, tuple(whole), rounds))
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class _Round:
    """A round's segments on the device. For one round kernels see rows [first, first + length) of the chunk as sequences one
    after another: segments of other rounds lie between them, so each segment is a launch of its own unless they touch."""

    first: int
    length: int
    longest: int
    starts: torch.Tensor
    contexts: torch.Tensor
    rows: torch.Tensor
    cuts: tuple[tuple[int, int], ...]


class PrefillTables:
    """Everything of a batch that kernels read, as tensors on the device."""

    def __init__(self, batch: ForwardBatch, page_size: int, chunk_rows: int, device: torch.device) -> None:
        def put(values: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

        self.ids, self.positions = put(batch.token_ids), put(batch.positions)
        self.wanted = put(batch.logit_rows, torch.int64)
        slots = torch.empty(len(batch.token_ids), dtype=torch.int32)
        longest = max(len(seq.page_table) for seq in batch.seqs)
        pages = torch.zeros(len(batch.seqs), longest, dtype=torch.int32)
        for index, seq in enumerate(batch.seqs):
            pages[index, : len(seq.page_table)] = seq.page_table
            at = torch.arange(seq.context, seq.context + seq.length)
            slots[seq.start : seq.start + seq.length] = seq.page_table[at // page_size] * page_size + at % page_size
        self.slots, self._pages = put(slots), put(pages)
        self.chunks = plan_chunks(batch.seqs, chunk_rows)
        self.attention: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = []
        self.recurrent: list[list[_Round]] = []
        for chunk in self.chunks:
            starts = [segment.start for segment in chunk.whole] + [chunk.length]
            mine = put([segment.seq for segment in chunk.whole], torch.int64)
            context = put([segment.context for segment in chunk.whole])
            longest = max(segment.length for segment in chunk.whole)
            self.attention.append((put(starts), context, self._pages.index_select(0, mine), longest))
            self.recurrent.append([self._round(run, batch.seqs, put) for part in chunk.rounds for run in _touching(part)])

    @staticmethod
    def _round(run: Sequence[Segment], seqs: Sequence[SeqSlice], put) -> _Round:
        first, last = run[0].start, run[-1].start + run[-1].length
        rows = [seqs[segment.seq].state_row for segment in run]
        return _Round(
            first=first,
            length=last - first,
            longest=max(segment.length for segment in run),
            starts=put([segment.start - first for segment in run] + [last - first]),
            contexts=put([segment.context for segment in run]),
            rows=put(rows),
            cuts=tuple((row, segment.cut) for row, segment in zip(rows, run, strict=True) if segment.cut >= 0),
        )


def _touching(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments grouped into runs without a gap between them."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and runs[-1][-1].start + runs[-1][-1].length == segment.start:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


class PrefillStep:
    """Enqueues a pass operation by operation. See layers/step.py for the contract; results wait as in decode.DecodeStep.

    rows: buffers of the pass, as many rows as its tokens at most. part: buffers of one chunk.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        spec: ModelSpec,
        ops: ModuleType,
        rows: Buffers,
        part: Buffers,
        experts: ExpertPass | None,
        kv: KvPools,
        states: RecurrentPools,
        rope: RopeTable,
        device: torch.device,
    ) -> None:
        self._spec, self._ops, self._rows, self._part = spec, ops, rows, part
        self._experts, self._kv, self._states, self._rope = experts, kv, states, rope
        self._tables = PrefillTables(batch, kv.page_size, part.rows, device)
        self._tokens = len(batch.token_ids)
        self._chunks: tuple[Chunk, ...] = self._tables.chunks
        self._delta: torch.Tensor | None = None

    def _whole(self, name: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._rows.get(name, self._tokens, width, dtype)

    def embed(self, table: torch.Tensor) -> torch.Tensor:
        residual = self._whole("residual", table.shape[1], torch.float32)
        self._ops.gather(table, self._tables.ids, residual)
        return residual

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        out = self._whole("normed", x.shape[1])
        self._ops.add_norm(x, self._delta, norm.weight, norm.eps, out)
        self._delta = None
        return out

    def add(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert self._delta is None
        self._delta = y
        return x

    def attention(self, x: torch.Tensor, layer: Attention) -> torch.Tensor:
        ops, tables, d = self._ops, self._tables, layer.head_dim
        out = self._whole("out", layer.out.weight.shape[0])
        k_pool, v_pool = self._kv.k[layer.ordinal], self._kv.v[layer.ordinal]
        weights = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps, self._rope.cos, self._rope.sin)
        for chunk, (starts, contexts, pages, longest) in zip(self._chunks, tables.attention, strict=True):
            rows, n = slice(chunk.first, chunk.first + chunk.length), chunk.length
            projected = self._part.get("projected", n, layer.qkv.weight.shape[0])
            ops.linear(x[rows], layer.qkv.weight, layer.qkv.bias, projected)
            q = self._part.get("q", n, layer.heads * d).view(n, layer.heads, d)
            ops.attend_prepare(projected, *weights, tables.positions[rows], tables.slots[rows], k_pool, v_pool, q, layer.gated)
            gate = projected[:, : 2 * layer.heads * d].unflatten(1, (layer.heads, 2 * d))[..., d:] if layer.gated else None
            mixed = self._part.get("mixed", n, layer.heads * d)
            ops.prefill_attention(q, k_pool, v_pool, pages, starts, contexts, longest, layer.scale, gate, mixed)
            ops.linear(mixed, layer.out.weight, layer.out.bias, out[rows])
        return out

    def delta(self, x: torch.Tensor, layer: GatedDelta) -> torch.Tensor:
        ops, shape = self._ops, (layer.v_heads, layer.d_v)
        out = self._whole("out", layer.out.weight.shape[0])
        tails, states = self._states.conv[layer.ordinal], self._states.delta[layer.ordinal]
        for chunk, rounds in zip(self._chunks, self._tables.recurrent, strict=True):
            rows, n = slice(chunk.first, chunk.first + chunk.length), chunk.length
            projected = self._part.get("projected", n, layer.project.weight.shape[0])
            ops.linear(x[rows], layer.project.weight, layer.project.bias, projected)
            mixed, z, b, a = projected.split([layer.conv_dim, layer.value_dim, layer.v_heads, layer.v_heads], dim=1)
            convolved = self._part.get("convolved", n, layer.conv_dim)
            result = self._part.get("delta_out", n, layer.value_dim, torch.float32).unflatten(1, shape)
            for part in rounds:
                at = slice(part.first, part.first + part.length)
                where = (part.starts, part.contexts, part.rows, part.longest)
                ops.conv(mixed[at], layer.conv, tails, *where, convolved[at])
                gates = (a[at], b[at], layer.a_log, layer.dt_bias)
                ops.delta(convolved[at], *gates, states, *where, layer.k_heads, result[at])
                for source, dest in part.cuts:
                    tails[dest].copy_(tails[source])
                    states[dest].copy_(states[source])
            normed = self._part.get("mixed", n, layer.value_dim)
            gate = z.unflatten(1, shape)
            ops.gated_norm(result, gate, layer.norm.weight, layer.norm.eps, normed.unflatten(1, shape))
            ops.linear(normed, layer.out.weight, layer.out.bias, out[rows])
        return out

    def mlp(self, x: torch.Tensor, layer: Mlp) -> torch.Tensor:
        out = self._whole("out", layer.down.shape[0])[: len(x)]
        for rows in self._slices(len(x)):
            self._mlp_part(x[rows], layer, out[rows])
        return out

    def _mlp_part(self, x: torch.Tensor, layer: Mlp, out: torch.Tensor) -> None:
        inter = layer.down.shape[1]
        both = self._part.get("both", len(x), 2 * inter)
        inner = self._part.get("inner", len(x), inter)
        self._ops.linear(x, layer.gate_up, None, both)
        self._ops.silu_mul(both, inner)
        self._ops.linear(inner, layer.down, None, out)

    def _slices(self, tokens: int) -> list[slice]:
        size = self._part.rows
        return [slice(first, min(tokens, first + size)) for first in range(0, tokens, size)]

    def moe(self, x: torch.Tensor, layer: Moe) -> None:
        """Ends with the sum added to the residual stream."""
        ops, router, tokens, hidden = self._ops, layer.router, len(x), x.shape[1]
        assert self._experts is not None
        residual = self._whole("residual", hidden, torch.float32)[:tokens]
        ids = self._whole("ids", router.top_k, torch.int32)[:tokens]
        weights = self._whole("weights", router.top_k, torch.float32)[:tokens]
        gates = self._whole("gates", 1, torch.float32)[:tokens]
        for rows in self._slices(tokens):
            scores = self._part.get("scores", rows.stop - rows.start, router.scores.weight.shape[0], torch.float32)
            ops.linear(x[rows], router.scores.weight, router.scores.bias, scores)
            ops.route(scores, router.experts, router.normalize, None, ids[rows], weights[rows])
            if router.shared_gate:
                gates[rows].copy_(scores[:, router.experts :])
        self._experts.run(layer.ordinal, x, ids, weights, residual)
        if layer.shared is not None:
            for rows in self._slices(tokens):
                n = rows.stop - rows.start
                shared = self._part.get("shared", n, hidden)
                self._mlp_part(x[rows], layer.shared, shared)
                nothing = self._part.get("nothing", n, hidden, torch.float32)
                ops.merge(residual[rows], nothing, None, None, None, shared, gates[rows])

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers the wanted rows to the front: what was before is not needed any more."""
        assert self._delta is not None
        delta, wanted = self._delta, self._tables.wanted
        x[: len(wanted)] = x.index_select(0, wanted)
        delta[: len(wanted)] = delta.index_select(0, wanted)
        self._tokens = len(wanted)
        self._delta = delta[: self._tokens]
        return x[: self._tokens]

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        out = torch.empty(len(x), head.weight.shape[0], dtype=torch.float32, device=x.device)
        if len(x):
            self._ops.linear(x, head.weight, head.bias, out)
        return out
