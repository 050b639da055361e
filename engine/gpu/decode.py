"""One decode step of a whole model as a tape: recorded once for each batch size, captured as a graph, replayed for every token.

Addresses are fixed; what changes from step to step lies in tables.DecodeTables. No Python runs between layers, and no copy or
host node: experts are moved by a kernel on the side lane while the resident ones compute, and the CPU's share comes through the
mailbox.
"""

from __future__ import annotations

from types import ModuleType

import torch

from engine.attention.base import Attention
from engine.device.tape import Lane, Tape
from engine.gpu.experts import WAIT_LIMIT_US, ExpertPool, Reads
from engine.gpu.tables import DecodeTables
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rope import RopeTable
from engine.models.base import KvPools, ModelSpec, RecurrentPools
from engine.moe.layer import Mlp, Moe


class Buffers:
    """Activations by name, shared by all layers and by steps of all sizes: a step takes the first rows."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self._dtype, self._device = dtype, device
        self._made: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[rows, width], uninitialized; the same memory for the same name and shape."""
        key = (name, width, dtype or self._dtype)
        if key not in self._made:
            self._made[key] = torch.zeros(self.rows, width, dtype=key[2], device=self._device)
        return self._made[key][:rows]

    def flat(self, name: str, count: int) -> torch.Tensor:
        """f32 [count], scratch of a kernel."""
        key = (name, count, torch.float32)
        if key not in self._made:
            self._made[key] = torch.zeros(count, device=self._device)
        return self._made[key]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._made.values())


class DecodeStep:
    """Records a model's step for `rows` sequences. See layers/step.py for the contract.

    Values between operations: norm gives a tensor, a mixer's result waits as the `delta` of the next norm. `ops`: a set of
    kernels (kernels/plain/). experts: None for a model without any. reads: what the steps' table brings over the link; steps
    that read nothing have no side lane, and those that read whole experts alone do not look for parts.
    """

    def __init__(
        self,
        rows: int,
        spec: ModelSpec,
        ops: ModuleType,
        tables: DecodeTables,
        buffers: Buffers,
        experts: ExpertPool | None,
        kv: KvPools,
        states: RecurrentPools,
        rope: RopeTable,
        reads: Reads = Reads.WHOLE,
    ) -> None:
        self.tape = Tape()
        self.rows = rows
        self._spec, self._ops, self._tables, self._buffers = spec, ops, tables, buffers
        self._experts, self._kv, self._states, self._rope = experts, kv, states, rope
        self._reads = reads
        self._delta: torch.Tensor | None = None
        self.logits_out = buffers.get("logits", rows, spec.vocab_size, torch.float32)
        self.tape.add(lambda: ops.begin(*tables.beginning))

    def _get(self, name: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._buffers.get(name, self.rows, width, dtype)

    def _linear(self, x: torch.Tensor, layer: Linear, out: torch.Tensor, lane: Lane = Lane.MAIN) -> None:
        self.tape.add(lambda: self._ops.linear(x, layer.weight, layer.bias, out), lane)

    def embed(self, table: torch.Tensor) -> torch.Tensor:
        residual = self._get("residual", table.shape[1], torch.float32)
        ids = self._tables.ids[: self.rows]
        self.tape.add(lambda: self._ops.gather(table, ids, residual))
        return residual

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        out, delta = self._get("normed", x.shape[1]), self._delta
        self._delta = None
        self.tape.add(lambda: self._ops.add_norm(x, delta, norm.weight, norm.eps, out))
        return out

    def add(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """y None: it was added already."""
        assert self._delta is None
        self._delta = y
        return x

    def attention(self, x: torch.Tensor, layer: Attention) -> torch.Tensor:
        ops, tables, rows, d = self._ops, self._tables, self.rows, layer.head_dim
        projected = self._get("projected", layer.qkv.weight.shape[0])
        self._linear(x, layer.qkv, projected)
        q = self._get("q", layer.heads * d).view(rows, layer.heads, d)
        k_pool, v_pool = self._kv.k[layer.ordinal], self._kv.v[layer.ordinal]
        contexts, slots, pages = tables.contexts[:rows], tables.slots[:rows], tables.pages[:rows]
        weights = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps, self._rope.cos, self._rope.sin)
        self.tape.add(lambda: ops.attend_prepare(projected, *weights, contexts, slots, k_pool, v_pool, q, layer.gated))
        gate = projected[:, : 2 * layer.heads * d].unflatten(1, (layer.heads, 2 * d))[..., d:] if layer.gated else None
        mixed = self._get("mixed", layer.heads * d)
        scratch = self._buffers.flat("attention", ops.decode_scratch(rows, layer.heads, d))
        self.tape.add(lambda: ops.decode_attention(q, k_pool, v_pool, pages, contexts, layer.scale, gate, mixed, scratch))
        out = self._get("out", layer.out.weight.shape[0])
        self._linear(mixed, layer.out, out)
        return out

    def delta(self, x: torch.Tensor, layer: GatedDelta) -> torch.Tensor:
        ops, tables, rows = self._ops, self._tables, self.rows
        projected = self._get("projected", layer.project.weight.shape[0])
        self._linear(x, layer.project, projected)
        mixed, z, b, a = projected.split([layer.conv_dim, layer.value_dim, layer.v_heads, layer.v_heads], dim=1)
        where = (tables.starts[: rows + 1], tables.contexts[:rows], tables.state_rows[:rows], 1)
        convolved = self._get("convolved", layer.conv_dim)
        tails, states = self._states.conv[layer.ordinal], self._states.delta[layer.ordinal]
        after = tables.rows_out[:rows]
        self.tape.add(lambda: ops.conv(mixed, layer.conv, tails, *where, convolved, after))
        shape = (layer.v_heads, layer.d_v)
        out = self._get("delta_out", layer.value_dim, torch.float32).unflatten(1, shape)
        gates = (a, b, layer.a_log, layer.dt_bias)
        self.tape.add(lambda: ops.delta(convolved, *gates, states, *where, layer.k_heads, out, after))
        normed = self._get("mixed", layer.value_dim)
        gate, by_head = z.unflatten(1, shape), normed.unflatten(1, shape)
        self.tape.add(lambda: ops.gated_norm(out, gate, layer.norm.weight, layer.norm.eps, by_head))
        result = self._get("out", layer.out.weight.shape[0])
        self._linear(normed, layer.out, result)
        return result

    def mlp(self, x: torch.Tensor, layer: Mlp) -> torch.Tensor:
        inter = layer.down.shape[1]
        both, inner = self._get("both", 2 * inter), self._get("inner", inter)
        self._linear(x, Linear(layer.gate_up), both)
        self.tape.add(lambda: self._ops.silu_mul(both, inner))
        out = self._get("out", layer.down.shape[0])
        self._linear(inner, Linear(layer.down), out)
        return out

    def moe(self, x: torch.Tensor, layer: Moe) -> None:
        """Ends with the sum added to the residual stream."""
        experts, ops, tape, rows = self._experts, self._ops, self.tape, self.rows
        assert experts is not None
        router, hidden, k = layer.router, x.shape[1], layer.router.top_k
        scores = self._get("scores", router.scores.weight.shape[0], torch.float32)
        self._linear(x, router.scores, scores)
        ids, weights = self._get("ids", k, torch.int32), self._get("weights", k, torch.float32)
        live = self._tables.contexts[:rows]
        tape.add(lambda: ops.route(scores, router.experts, router.normalize, live, ids, weights))
        routed = self._get("routed", hidden, torch.float32)
        inner = self._buffers.get("expert_inner", rows, k * experts.bank.record.inter).view(rows * k, -1)
        residual = self._get("residual", hidden, torch.float32)
        gate = scores[:, router.experts :] if router.shared_gate else None

        def merge(shared: torch.Tensor | None, cpu: bool) -> None:
            box = (experts.box.out[:rows], experts.counts, experts.box.status) if cpu else (None, None, None)
            tape.add(lambda: ops.merge(residual, routed, *box, shared, gate))

        if experts.resident:
            bank = experts.layer(layer.ordinal)
            tape.add(lambda: ops.slot_experts(x, ids, weights, bank.gate_up, bank.down, inner, routed, False))
            merge(self._shared(x, layer), cpu=False)
            return
        here, coming = self._get("ids_here", k, torch.int32), self._get("ids_coming", k, torch.int32)
        there = self._get("ids_there", k, torch.int32)
        bank, box, ordinal = experts.weights, experts.box, layer.ordinal
        tape.add(
            lambda: ops.admit(experts.state, ordinal, ids, experts.table, here, coming, there, experts.work, experts.counts)
        )
        request = (box.request, box.x, box.ids, box.weights)
        tape.add(lambda: ops.publish(x, there, weights, experts.counts, experts.shares, box.epoch, ordinal, *request))
        fetched = None
        if self._reads:
            tape.fork()
            tape.add(lambda: ops.stamp(experts.clock, experts.counts, True), Lane.SIDE)
            tape.add(lambda: ops.fetch(experts.bank.bytes, experts.memory, experts.work, experts.counts), Lane.SIDE)
            tape.add(lambda: ops.stamp(experts.clock, experts.counts, False), Lane.SIDE)
            fetched = tape.mark(Lane.SIDE)
        if self._reads is Reads.PARTS:
            # After the fetches, so that what came whole is computed meanwhile. Straight to the residual stream, which nothing
            # else touches before the lanes join.
            host, taken = experts.host_layer(ordinal), self._get("taken_inner", inner.numel() // rows).view(inner.shape)
            whose = (x, there, weights, experts.counts, experts.shares)
            tape.add(lambda: ops.bank_experts(*whose, host.gate_up, host.down, taken, residual), Lane.SIDE)
        tape.add(lambda: ops.slot_experts(x, here, weights, bank.gate_up, bank.down, inner, routed, False))
        shared = self._shared(x, layer)
        if fetched is not None:
            tape.wait(fetched, Lane.MAIN)
            tape.add(lambda: ops.slot_experts(x, coming, weights, bank.gate_up, bank.down, inner, routed, True))
        if self._reads is Reads.PARTS:
            tape.join()
        tape.add(lambda: ops.wait_reply(experts.counts, box.epoch, box.reply, WAIT_LIMIT_US, box.status))
        merge(shared, cpu=True)

    def _shared(self, x: torch.Tensor, layer: Moe) -> torch.Tensor | None:
        return None if layer.shared is None else self.mlp(x, layer.shared)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        """Ends the recording. What most steps want of the logits goes to the host, and to the next step: see DecodeTables."""
        tables = self._tables
        self._linear(x, head, self.logits_out)
        self.tape.add(lambda: self._ops.guess(self.logits_out, tables.draws, tables.turn, tables.guesses, tables.found))
        experts = self._experts
        if experts is not None and not experts.resident:
            self.tape.add(lambda: experts.box.status_host.copy_(experts.box.status, non_blocking=True))
        return self.logits_out
