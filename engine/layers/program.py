"""A step recorded once as a native program and replayed for every batch: no Python between operations (but where experts lie
behind slots: there it decides what to move).

The counterpart of a captured graph. Activations live in buffers that all layers share; a batch only rewrites the small tables
that the records point to. The residual stream is f32 whatever the weights are; everything else has the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Attention
from engine.batch import ForwardBatch
from engine.kernels import cpu, records
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rope import RopeTable
from engine.models.base import KvPools, RecurrentPools
from engine.moe.layer import Mlp, Moe
from engine.moe.offload import ExpertOffload

Finish = Callable[[torch.Tensor], None]
Stage = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program's buffers hold: tokens, sequences, pages of one sequence, cuts, positions of the rope table."""

    rows: int
    seqs: int
    pages: int
    cuts: int
    positions: int

    def hold(self, other: Limits) -> bool:
        return (
            self.rows >= other.rows
            and self.seqs >= other.seqs
            and self.pages >= other.pages
            and self.cuts >= other.cuts
            and self.positions >= other.positions
        )

    def grown(self, other: Limits) -> Limits:
        """Room for both, in powers of two, so that growth is rare."""

        def power(n: int) -> int:
            return 1 << max(0, n - 1).bit_length()

        return Limits(
            power(max(self.rows, other.rows)),
            power(max(self.seqs, other.seqs)),
            power(max(self.pages, other.pages)),
            power(max(self.cuts, other.cuts)),
            power(max(self.positions, other.positions)),
        )


def needs(batch: ForwardBatch) -> Limits:
    """What this batch asks for."""
    return Limits(
        rows=max(len(batch.token_ids), len(batch.logit_rows)),
        seqs=len(batch.seqs),
        pages=max(len(seq.page_table) for seq in batch.seqs),
        cuts=sum(len(seq.cuts) for seq in batch.seqs),
        positions=max(seq.context + seq.length for seq in batch.seqs),
    )


class ProgramStep:
    """See step.py for the contract; here a mixer's result is a function that adds it to the residual stream.

    Bound to one pair of pools: the records hold their addresses.
    """

    def __init__(self, limits: Limits, dtype: torch.dtype, kv: KvPools, states: RecurrentPools, rope: RopeTable) -> None:
        self.limits = limits
        self.kv, self.states = kv, states
        self._dtype = dtype
        self._program = cpu.Program()
        self._stages: list[cpu.Program | Stage] = [self._program]
        self._buffers: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._count = cpu.ROWS
        rope.reach(limits.positions)
        self._cos, self._sin = rope.cos, rope.sin
        self._ids = torch.zeros(limits.rows, dtype=torch.int64)
        self._positions = torch.zeros(limits.rows, dtype=torch.int64)
        self._wanted = torch.zeros(limits.rows, dtype=torch.int64)
        self._starts = torch.zeros(limits.seqs + 1, dtype=torch.int32)
        self._context = torch.zeros(limits.seqs, dtype=torch.int32)
        self._rows = torch.zeros(limits.seqs, dtype=torch.int32)
        self._pages = torch.zeros(limits.seqs, limits.pages, dtype=torch.int32)
        self._cuts = torch.zeros(1 + 3 * limits.cuts, dtype=torch.int32)
        self._head: Linear | None = None
        self._final = torch.empty(0)

    # ── recording ───────────────────────────────────────────────────────────────────────────────────────────────

    def _buffer(self, name: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[rows, width], the same for every layer that asks for it. Spaced so that rows start on cache lines."""
        dtype = dtype or self._dtype
        key = (name, width, dtype)
        if key not in self._buffers:
            spacing = -(-width * dtype.itemsize // 64) * 64 // dtype.itemsize
            self._buffers[key] = torch.zeros(self.limits.rows, spacing, dtype=dtype)[:, :width]
        return self._buffers[key]

    def _linear(self, x: torch.Tensor, layer: Linear, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        self._program.add(records.linear, x, layer.weight, out, self._count, layer.bias, residual)

    def embed(self, table: torch.Tensor) -> torch.Tensor:
        out = self._buffer("residual", table.shape[1], torch.float32)
        self._program.add(records.gather, table, self._ids, out, self._count)
        return out

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        out = self._buffer("normed", x.shape[1])
        self._program.add(records.rms_norm, x, norm.weight, out, norm.eps, self._count)
        return out

    def attention(self, x: torch.Tensor, layer: Attention) -> Finish:
        d, heads, kv_heads = layer.head_dim, layer.heads, layer.kv_heads
        per_head = 2 * d if layer.gated else d
        projected = self._buffer("projected", layer.qkv.weight.shape[0])
        self._linear(x, layer.qkv, projected)
        q_part, k_part, v_part = projected.split([heads * per_head, kv_heads * d, kv_heads * d], dim=1)
        queries = q_part.unflatten(1, (heads, per_head))
        q, gate = queries[..., :d], queries[..., d:]
        k, v = k_part.unflatten(1, (kv_heads, d)), v_part.unflatten(1, (kv_heads, d))
        for part, norm in ((q, layer.q_norm), (k, layer.k_norm)):
            self._program.add(records.rms_norm, part, norm.weight, part, norm.eps, self._count)
            self._program.add(records.rope, part, self._cos, self._sin, self._count, self._positions)
        k_pool, v_pool = self.kv.k[layer.ordinal], self.kv.v[layer.ordinal]
        where = (self._pages, self._starts, self._context)
        self._program.add(records.kv_store, k, v, k_pool, v_pool, *where, cpu.SEQS)
        mixed = self._buffer("mixed", heads * d)
        self._program.add(records.attention, q, k_pool, v_pool, *where, mixed, layer.scale, cpu.SEQS)
        if layer.gated:
            by_head = mixed.unflatten(1, (heads, d))
            self._program.add(records.sigmoid_mul, by_head, gate, by_head, self._count)
        return lambda residual: self._linear(mixed, layer.out, residual, residual)

    def delta(self, x: torch.Tensor, layer: GatedDelta) -> Finish:
        projected = self._buffer("projected", layer.project.weight.shape[0])
        self._linear(x, layer.project, projected)
        mixed, z, b, a = projected.split([layer.conv_dim, layer.value_dim, layer.v_heads, layer.v_heads], dim=1)
        where = (self._rows, self._starts, self._context)
        convolved = self._buffer("convolved", layer.conv_dim)
        tails = self.states.conv[layer.ordinal]
        self._program.add(records.conv, mixed, layer.conv, tails, *where, convolved, cpu.SEQS, cuts=self._cuts)
        q, k, v = convolved.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=1)
        out = self._buffer("delta", layer.value_dim, torch.float32).unflatten(1, (layer.v_heads, layer.d_v))
        self._program.add(
            records.delta,
            q.unflatten(1, (layer.k_heads, layer.d_k)),
            k.unflatten(1, (layer.k_heads, layer.d_k)),
            v.unflatten(1, (layer.v_heads, layer.d_v)),
            a,
            b,
            (layer.a_log, layer.dt_bias),
            self.states.delta[layer.ordinal],
            *where,
            out,
            cpu.SEQS,
            cuts=self._cuts,
        )
        normed = self._buffer("mixed", layer.value_dim)
        by_head = normed.unflatten(1, (layer.v_heads, layer.d_v))
        gate = z.unflatten(1, (layer.v_heads, layer.d_v))
        self._program.add(records.rms_norm, out, layer.norm.weight, by_head, layer.norm.eps, self._count, gate)
        return lambda residual: self._linear(normed, layer.out, residual, residual)

    def _inner(self, x: torch.Tensor, layer: Mlp) -> torch.Tensor:
        inter = layer.down.shape[1]
        both, inner = self._buffer("both", 2 * inter), self._buffer("inner", inter)
        self._linear(x, Linear(layer.gate_up), both)
        self._program.add(records.silu_mul, both[:, :inter], both[:, inter:], inner, self._count)
        return inner

    def mlp(self, x: torch.Tensor, layer: Mlp) -> Finish:
        inner = self._inner(x, layer)
        return lambda residual: self._linear(inner, Linear(layer.down), residual, residual)

    def moe(self, x: torch.Tensor, layer: Moe) -> Finish:
        router = layer.router
        scores = self._buffer("scores", router.scores.weight.shape[0], torch.float32)
        self._linear(x, router.scores, scores)
        ids = self._whole("ids", router.top_k, torch.int32)
        weights = self._whole("weights", router.top_k, torch.float32)
        self._program.add(records.route, scores[:, : router.experts], ids, weights, router.normalize, self._count)
        shared = self._buffer("shared", x.shape[1], torch.float32)
        if layer.shared is not None:
            self._linear(self._inner(x, layer.shared), Linear(layer.shared.down), shared)

        def finish(residual: torch.Tensor) -> None:
            if layer.offload is not None:
                self._interrupt(self._offloaded(layer, layer.offload, residual, x, ids, weights))
            else:
                banks = (layer.bank.gate_up, layer.bank.down)
                self._program.add(records.experts, x, ids, weights, *banks, residual, self._count, residual=residual)
            if layer.shared is not None:
                gate = scores[:, router.experts :]
                self._program.add(records.gated_add, residual, gate, shared, residual, self._count)

        return finish

    def _offloaded(
        self,
        layer: Moe,
        offload: ExpertOffload,
        residual: torch.Tensor,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> Stage:
        """Experts behind slots: the router's choice has to reach Python, which moves records before anything is computed."""
        on_outputs = self._count == cpu.OUTPUTS

        def run(rows: int, outputs: int) -> None:
            n = outputs if on_outputs else rows
            if n:
                residual[:n] += offload.forward(layer.ordinal, x[:n], ids[:n], weights[:n])

        return run

    def _interrupt(self, stage: Stage) -> None:
        """End the current program, run `stage(rows, outputs)`, go on with another program."""
        self._program = cpu.Program()
        self._stages += [stage, self._program]

    def _whole(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer without spacing between its rows."""
        return self._buffers.setdefault((name, width, dtype), torch.zeros(self.limits.rows, width, dtype=dtype))

    def add(self, x: torch.Tensor, y: Finish) -> torch.Tensor:
        y(x)
        return x

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        out = self._buffer("wanted", x.shape[1], torch.float32)
        self._program.add(records.gather, x, self._wanted, out, cpu.OUTPUTS)
        self._count = cpu.OUTPUTS
        return out

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """Ends the recording. The head runs outside the program, into memory of its own: callers keep logits."""
        self._head, self._final = head, x
        return x

    # ── replay ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits f32 [len(batch.logit_rows), vocab]. The batch must be within the limits, its sequences one after another."""
        assert self._head is not None
        tokens, wanted, seqs = len(batch.token_ids), len(batch.logit_rows), len(batch.seqs)
        self._ids[:tokens] = batch.token_ids
        self._positions[:tokens] = batch.positions
        self._wanted[:wanted] = batch.logit_rows
        starts, context, rows = self._starts.numpy(), self._context.numpy(), self._rows.numpy()
        pages, cuts = self._pages.numpy(), []
        for index, seq in enumerate(batch.seqs):
            assert seq.start == starts[index]
            assert seq.fresh == (seq.context == 0)
            starts[index + 1] = seq.start + seq.length
            context[index] = seq.context
            rows[index] = seq.state_row
            pages[index, : len(seq.page_table)] = seq.page_table.numpy()
            cuts += [(index, cut.offset, cut.dest_row) for cut in seq.cuts]
        table = self._cuts.numpy()
        table[0] = len(cuts)
        if cuts:
            table[1 : 1 + 3 * len(cuts)] = np.array(cuts, dtype=np.int32).ravel()
        for stage in self._stages:
            if isinstance(stage, cpu.Program):
                stage.run(tokens, seqs, wanted)
            else:
                stage(tokens, wanted)
        out = torch.empty(wanted, self._head.weight.shape[0])
        if wanted:
            cpu.linear(self._final[:wanted], self._head.weight, self._head.bias, out=out)
        return out
