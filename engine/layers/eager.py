"""A step that computes each operation at once, with the plain kernels of engine/kernels/reference.py."""

from __future__ import annotations

import torch

from engine.attention.base import Attention, kv_slots
from engine.batch import ForwardBatch, SeqSlice
from engine.kernels import reference as ops
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rope import RopeTable
from engine.models.base import KvPools, RecurrentPools
from engine.moe.layer import Mlp, Moe, run_moe


class EagerStep:
    """See step.py for the contract."""

    def __init__(self, batch: ForwardBatch, kv: KvPools, states: RecurrentPools, rope: RopeTable) -> None:
        self._batch = batch
        self._kv = kv
        self._states = states
        rope.reach(max(seq.context + seq.length for seq in batch.seqs))
        self._cos, self._sin = rope.cos[batch.positions], rope.sin[batch.positions]
        self._slots = kv_slots(batch, kv.page_size)

    def embed(self, table: torch.Tensor) -> torch.Tensor:
        return table[self._batch.token_ids]

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return ops.rms_norm(x, norm.weight, norm.eps)

    def attention(self, x: torch.Tensor, layer: Attention) -> torch.Tensor:
        tokens, d = x.shape[0], layer.head_dim
        projected = ops.linear(x, layer.qkv.weight, layer.qkv.bias)
        per_head = 2 * d if layer.gated else d
        q, k, v = projected.split([layer.heads * per_head, layer.kv_heads * d, layer.kv_heads * d], dim=1)
        q = q.reshape(tokens, layer.heads, per_head)
        gate = q[..., d:]
        q = ops.rope(ops.rms_norm(q[..., :d], layer.q_norm.weight, layer.q_norm.eps), self._cos, self._sin)
        k = k.reshape(tokens, layer.kv_heads, d)
        k = ops.rope(ops.rms_norm(k, layer.k_norm.weight, layer.k_norm.eps), self._cos, self._sin)
        k_pool, v_pool = self._kv.k[layer.ordinal], self._kv.v[layer.ordinal]
        ops.write_kv(k, v.reshape(tokens, layer.kv_heads, d), k_pool, v_pool, self._slots)
        out = torch.empty_like(q)
        for seq in self._batch.seqs:
            rows = slice(seq.start, seq.start + seq.length)
            out[rows] = ops.paged_attention(q[rows], k_pool, v_pool, seq.page_table, seq.context, layer.scale)
        if layer.gated:
            out = ops.sigmoid_gate(out, gate)
        return ops.linear(out.reshape(tokens, -1), layer.out.weight, layer.out.bias)

    def delta(self, x: torch.Tensor, layer: GatedDelta) -> torch.Tensor:
        tokens = x.shape[0]
        projected = ops.linear(x, layer.project.weight, layer.project.bias)
        sizes = [layer.conv_dim, layer.value_dim, layer.v_heads, layer.v_heads]
        mixed, z, b, a = projected.split(sizes, dim=1)
        g, beta = ops.delta_gates(a, b, layer.a_log, layer.dt_bias)
        out = torch.empty(tokens, layer.v_heads, layer.d_v, dtype=torch.float32)
        for seq in self._batch.seqs:
            self._run_delta(seq, layer, mixed, g, beta, out)
        normed = ops.rms_norm(out.to(x.dtype), layer.norm.weight, layer.norm.eps, z.reshape(tokens, layer.v_heads, layer.d_v))
        return ops.linear(normed.reshape(tokens, -1), layer.out.weight, layer.out.bias)

    def _run_delta(
        self, seq: SeqSlice, layer: GatedDelta, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
    ) -> None:
        delta, conv = self._states.delta[layer.ordinal], self._states.conv[layer.ordinal]
        state, tail = delta[seq.state_row], conv[seq.state_row]
        if seq.fresh:
            state.zero_()
            tail.zero_()
        done = 0
        for end in sorted({cut.offset for cut in seq.cuts} | {seq.length}):
            rows = slice(seq.start + done, seq.start + end)
            q, k, v = ops.causal_conv(mixed[rows], layer.conv, tail).split(
                [layer.key_dim, layer.key_dim, layer.value_dim], dim=1
            )
            out[rows] = ops.gated_delta_chunk(
                q.reshape(-1, layer.k_heads, layer.d_k),
                k.reshape(-1, layer.k_heads, layer.d_k),
                v.reshape(-1, layer.v_heads, layer.d_v),
                g[rows],
                beta[rows],
                state,
            )
            for cut in seq.cuts:
                if cut.offset == end:
                    delta[cut.dest_row] = state
                    conv[cut.dest_row] = tail
            done = end

    def mlp(self, x: torch.Tensor, layer: Mlp) -> torch.Tensor:
        return ops.swiglu(x, layer.gate_up, layer.down)

    def moe(self, x: torch.Tensor, layer: Moe) -> torch.Tensor:
        return run_moe(ops, x, layer)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._batch.logit_rows]

    def logits(self, x: torch.Tensor, head: Linear) -> torch.Tensor:
        return ops.linear(x, head.weight, head.bias).float()
