"""How the routed experts of a prefill pass come to the device, layer by layer, and are computed there.

Ways, by the cost model (moe/cost.py), which looks at each layer:
- resident: every expert has its slot; nothing moves.
- union: only what the tokens route to is fetched, decided on the device, without waiting for it; the CPU may take the experts
  with few tokens meanwhile (co-execution).
- stream: every missing expert of the layer comes through the ring by copy engine, ahead of the layer, while earlier layers
  compute.
"""

from __future__ import annotations

from types import ModuleType

import torch

from engine.device.base import Moment
from engine.device.tape import Lane, Tape
from engine.gpu.decode import Buffers
from engine.gpu.experts import HANDOFF_TOKENS, WAIT_LIMIT_US, ExpertPool
from engine.gpu.stream import Streamer, expert_counts
from engine.moe.cost import LayerPlan, plan_layer, ring_part, ring_slots, streams
from engine.moe.device_state import floor_of


class ExpertPass:
    """The experts of one pass at a time: begin, run for each layer in order, end. part: buffers of a chunk.

    flops: of one token in one layer beside what experts it has, for the time behind which a stream hides.
    """

    def __init__(self, pool: ExpertPool, ops: ModuleType, part: Buffers, pass_rows: Buffers, flops: int) -> None:
        self._pool, self._ops, self._part, self._rows = pool, ops, part, pass_rows
        self._flops = flops
        place = pool.device.torch_device
        self._slot_of = torch.full((pool.experts,), -1, dtype=torch.int32, device=place)
        self._work = torch.zeros(max(1, min(pool.experts, pool.room)), 2, dtype=torch.int32, device=place)
        self._counts = pool.device.pinned(pool.experts, dtype=torch.int32)
        self._plans: list[LayerPlan] = []
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._stream: Streamer | None = None
        self._routed: tuple[int, Moment] | None = None
        self._since = 0
        self.ways = {"resident": 0, "union": 0, "stream": 0}
        """Layers that went each way since the start."""

    @property
    def streaming(self) -> bool:
        """Slots are lent: decode steps meanwhile must not fetch."""
        return self._stream is not None

    def begin(self, tokens: int) -> None:
        """Plan a pass of so many tokens. Waits for the device once, unless all is resident."""
        pool = self._pool
        self._plans = []
        if pool.resident:
            return
        slots = pool.state.pull()
        self._since = slots.step
        rates, size = pool.split.rates, pool.bank.record.nbytes
        record = pool.bank.record
        flops = self._flops + 6 * pool.top_k * record.hidden * record.inter
        compute_ns = tokens * flops // max(1, rates.gpu_gflops)
        part = ring_part(rates, size, compute_ns)
        for layer in range(pool.layers):
            missing = pool.experts - slots.residents[layer]
            plan = plan_layer(
                rates,
                size,
                tokens=tokens,
                top_k=pool.top_k,
                experts=pool.experts,
                missing=missing,
                handoff_tokens=pool.box.tokens,
                handoff_bytes=pool.box.token_bytes,
                ring=ring_slots(pool.slots, pool.layers, pool.experts, missing, part),
                compute_ns=compute_ns,
            )
            self._plans.append(plan)
        if streams(self._plans):
            self._stream = Streamer(pool, slots, range(pool.layers), part)

    def end(self) -> None:
        """The pass is over, or was given up: slots are returned."""
        stream, self._stream, self._routed = self._stream, None, None
        if stream is not None:
            stream.close()

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the routed experts' outputs of MoE layer `layer` to residual f32 [T, H]."""
        if self._pool.resident:
            self.ways["resident"] += 1
            first = layer * self._pool.experts
            self._slot_of.copy_(torch.arange(first, first + self._pool.experts, dtype=torch.int32))
            self._compute(x, ids, weights, residual)
        elif self._stream is not None:
            self.ways["stream"] += 1
            self._streamed(self._stream, layer, x, ids, weights, residual)
        else:
            self.ways["union"] += 1
            self._union(layer, x, ids, weights, residual, self._plans[layer].table)

    def _streamed(
        self,
        stream: Streamer,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        pool = self._pool
        if self._routed is not None:
            # The host stays one layer ahead of the device, no more: what is known of the layer before decides what stays.
            before, moment = self._routed
            moment.wait()
            stream.keep_hot(before, self._counts.tolist())
        self._counts.copy_(expert_counts(ids, pool.experts), non_blocking=True)
        self._routed = (layer, pool.device.moment())
        for where in stream.parts(layer):
            values = [where.get(e, -1) for e in range(pool.experts)]
            self._slot_of.copy_(torch.tensor(values, dtype=torch.int32))
            self._compute(x, ids, weights, residual)

    def _union(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        residual: torch.Tensor,
        table: tuple[int, ...] | None,
    ) -> None:
        pool, ops = self._pool, self._ops
        there = self._rows.get("ids_there", len(ids), ids.shape[1], torch.int32)
        use_cpu = table is not None or pool.bank.pinned_rows < pool.bank.rows
        quota = None if table is None else self._tables.get(table)
        if table is not None and quota is None:
            quota = self._tables[table] = torch.tensor(table, dtype=torch.int32).to(pool.device.torch_device)
        floor = floor_of(pool.slots, pool.layers)
        for turn in range(union_rounds(pool.experts, pool.slots, len(self._work), pool.layers, floor, ids.numel())):
            tape = Tape()
            args = (pool.state, layer, ids, pool.slots, quota, turn == 0, self._since)
            out = (self._slot_of, there, self._work, pool.counts)
            tape.add(lambda args=(*args, *out): ops.union(*args))
            if turn == 0 and use_cpu:
                self._ask(tape, layer, x, there, weights, slice(0, HANDOFF_TOKENS))
            tape.fork()
            tape.add(lambda: ops.fetch(pool.bank.bytes, pool.memory, self._work, pool.counts), Lane.SIDE)
            tape.join()
            pool.device.run(tape)
            self._compute(x, ids, weights, residual)
        if use_cpu:
            self._collect(layer, x, there, weights, residual)

    def _ask(self, tape: Tape, layer: int, x: torch.Tensor, there: torch.Tensor, weights: torch.Tensor, rows: slice) -> None:
        pool, box = self._pool, self._pool.box
        request = (box.request, box.x, box.ids, box.weights)
        args = (x[rows], there[rows], weights[rows], pool.counts, pool.no_shares, box.epoch, layer, *request)
        pool.wake()
        tape.add(lambda: self._ops.publish(*args))

    def _collect(self, layer: int, x: torch.Tensor, there: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the CPU's share, a mailbox full at a time; the first request is on its way already."""
        pool, box, ops = self._pool, self._pool.box, self._ops
        for first in range(0, len(x), box.tokens):
            rows = slice(first, min(len(x), first + box.tokens))
            if first:
                tape = Tape()
                self._ask(tape, layer, x, there, weights, rows)
                pool.device.run(tape)
            n = rows.stop - rows.start
            ops.wait_reply(pool.counts, box.epoch, box.reply, WAIT_LIMIT_US, box.status)
            ops.merge(residual[rows], pool.nothing[:n], box.out[:n], pool.counts, box.status, None, None)

    def _compute(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor) -> None:
        """The experts that slot_of names, chunk by chunk."""
        pool, ops, k = self._pool, self._ops, ids.shape[1]
        for first in range(0, len(x), self._part.rows):
            rows = slice(first, min(len(x), first + self._part.rows))
            n = rows.stop - rows.start
            order = self._part.get("order", n, k, torch.int32).view(-1)
            offsets = self._offsets()
            ops.group(ids[rows], pool.experts, order, offsets)
            inner = self._part.get("expert_inner", n, k * pool.bank.record.inter).view(n * k, -1)
            bank = pool.weights
            ops.grouped_experts(
                x[rows], ids[rows], order, offsets, self._slot_of, weights[rows], bank.gate_up, bank.down, inner, residual[rows]
            )

    def _offsets(self) -> torch.Tensor:
        count = self._pool.experts + 1
        return self._part.flat("offsets", count).view(torch.int32)


def union_rounds(experts: int, slots: int, work: int, layers: int, floor: int, choices: int) -> int:
    """Rounds after which every expert of a layer has been computed, whatever lies in the slots. Integers only.

    choices: of all tokens, so that no more experts than these are used. The first round cannot take what they use, and in a
    small pool that may be everything; in a later one nothing is in use. Floors of the other layers are always out of reach.
    """
    used, reach = min(experts, choices), slots - (layers - 1) * floor
    if used <= min(work, reach):
        return 1
    return 1 + -(-used // max(1, min(work, reach)))
