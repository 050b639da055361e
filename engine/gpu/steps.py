"""Decode steps of a model on a device: a graph for each size, launched, waited for, and launched ahead.

A step ahead is the one that is expected behind the step that is asked for. It takes that one's tokens on the device, so that
the device has it before anybody has read them; whoever asks for it finds it under way. It changes nothing that another step in
its place would read: see models/base.Staged.look_ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from engine.batch import ForwardBatch, SeqSlice
from engine.device.base import Device, Graph, Moment
from engine.gpu.decode import Buffers, DecodeStep
from engine.gpu.experts import ExpertPool, Reads
from engine.gpu.tables import DecodeTables
from engine.models.base import KvPools, Logits, RecurrentPools
from engine.models.decoder import Decoder


@dataclass(slots=True)
class Launched:
    """A step on the device. tokens, seqs: as it was asked for. began_ns: when the device was free for it, None = nobody knows.
    ahead: it was launched before it was asked for. guesses: as Logits.guesses, once it is over. kept: the logits where the host
    reads them, None if it does not or they are not written again, and when they are there."""

    number: int
    tokens: torch.Tensor
    seqs: Sequence[SeqSlice]
    logits: torch.Tensor
    moment: Moment
    began_ns: int | None
    ahead: bool = False
    guesses: Sequence[int] = ()
    kept: tuple[torch.Tensor, Moment] | None = None


class DecodeSteps:
    """max_rows: most sequences of a step. beside: called while the device computes. graphs: with the logits that each writes.
    used_ahead: steps that had been launched when they were asked for."""

    def __init__(
        self, decoder: Decoder, device: Device, ops: ModuleType, experts: ExpertPool | None, max_rows: int, max_context: int
    ) -> None:
        self._decoder, self._device, self._ops, self._experts = decoder, device, ops, experts
        self._max_context = max_context
        self._buffers = Buffers(max_rows, decoder.spec.dtype, device.torch_device)
        self._sizes = graph_sizes(max_rows)
        self._pools: tuple[KvPools, RecurrentPools] | None = None
        self._tables: DecodeTables | None = None
        self.graphs: dict[tuple[int, Reads], tuple[Graph, torch.Tensor]] = {}
        self.beside: Callable[[], None] | None = None
        self.used_ahead = 0
        self._expected: ForwardBatch | None = None
        self._ahead: tuple[Launched, Launched] | None = None  # a step whose tokens may not be read yet, and the one behind it
        self._behind = False  # the next step waits for one that nobody asked for
        self._over_ns: int | None = None
        self._room = torch.empty(0, decoder.spec.vocab_size)  # pinned, for `kept`

    @property
    def begun(self) -> bool:
        """See models/base.Staged."""
        return self._ahead is not None

    @property
    def tables(self) -> DecodeTables:
        assert self._tables is not None
        return self._tables

    def bind(self, kv: KvPools, states: RecurrentPools) -> None:
        """Use these pools from now on. Nothing may be running."""
        self._pools = (kv, states)
        self.graphs.clear()
        self._drop_ahead()
        self._tables = DecodeTables(self._device, self._sizes[-1], -(-self._max_context // kv.page_size), kv.page_size)

    def capture(self) -> None:
        """Every graph that may be needed by the present rates."""
        self._held(self._sizes[-1])
        for size in self._sizes:
            for reads in (Reads.NOTHING,) if self._experts is None else self._experts.reads:
                self.graph(size, reads)

    def graph(self, rows: int, reads: Reads) -> tuple[Graph, torch.Tensor]:
        """Of the least size ≥ rows."""
        key = (next(size for size in self._sizes if size >= rows), reads)
        if key not in self.graphs:
            assert self._pools is not None
            decoder, pools, tables = self._decoder, self._pools, self.tables
            step = DecodeStep(
                key[0], decoder.spec, self._ops, tables, self._buffers, self._experts, *pools, decoder.rope, reads
            )
            decoder.run(step)
            tables.fill(torch.zeros(0, dtype=torch.int64), ())  # capturing runs the step once: on no sequence
            self.graphs[key] = self._device.capture(step.tape), step.logits_out
            tables.launched(self._device.moment())
        return self.graphs[key]

    def look_ahead(self, batch: ForwardBatch | None) -> None:
        """See models/base.Staged."""
        self._expected = batch
        if batch is None:
            self._drop_ahead()

    def run(self, tokens: torch.Tensor, seqs: Sequence[SeqSlice], streaming: bool) -> Logits:
        """One token of each sequence. The logits are the buffer's or, where another step follows already, a copy on the host,
        until the next call, unless it takes more than one step. streaming: a pass has the link and the slots."""
        parts: list[torch.Tensor] = []
        guesses: list[int] = []
        most = self._sizes[-1]
        expected, self._expected = self._expected, None
        if streaming or len(seqs) > most:
            expected = None
        for first in range(0, len(seqs), most):
            part, ids = seqs[first : first + most], tokens[first : first + most]
            step = self._take_ahead(ids, part) or self._launch(ids, part, streaming)
            self._copy_cuts(part)
            if expected is not None:
                self._launch_ahead(step, expected)
            self._wait(step, streaming)
            rows = step.logits[: len(part)] if step.kept is None else step.kept[0]
            rows = rows if self._ahead is None or step.kept is not None else rows[:, :0]
            parts.append(rows if len(part) == len(seqs) else rows.clone())
            guesses += step.guesses
        return Logits(parts[0] if len(parts) == 1 else torch.cat(parts), guesses)

    def _launch_ahead(self, step: Launched, expected: ForwardBatch) -> None:
        """Unless its graph would have to be captured first, which runs a step in between."""
        size = next(size for size in self._sizes if size >= len(expected.seqs))
        if (size, self._reads(len(expected.seqs), False)) in self.graphs:
            if any(seq.draw is not None for seq in step.seqs):
                step.kept = self._keep(step.logits[: len(step.seqs)])
            self._ahead = step, self._launch(expected.token_ids, expected.seqs, False)

    def _keep(self, logits: torch.Tensor) -> tuple[torch.Tensor, Moment]:
        """Copy them to the host beside the next step, which does not wait for the link: they are put away first."""
        if len(self._room) < len(logits):
            self._room = self._device.pinned(len(logits), logits.shape[1], dtype=torch.float32)
        kept, held = self._room[: len(logits)], self._held(len(logits))
        held.copy_(logits)

        def copy() -> None:
            kept.copy_(held, non_blocking=True)

        return kept, self._device.soon(copy)

    def _held(self, rows: int) -> torch.Tensor:
        """On the device. Whoever waits for a step waits for what is kept of it, so one place is enough."""
        return self._buffers.get("held", rows, self._decoder.spec.vocab_size, torch.float32)

    def _reads(self, rows: int, streaming: bool) -> Reads:
        """Of the next step, whose table is set by it."""
        experts = self._experts
        return Reads.NOTHING if experts is None or experts.resident else experts.use_table(rows, fetching=not streaming)

    def _launch(self, tokens: torch.Tensor, seqs: Sequence[SeqSlice], streaming: bool) -> Launched:
        graph, logits = self.graph(len(seqs), self._reads(len(seqs), streaming))
        if self._experts is not None:
            self._experts.wake()
        tables = self.tables
        tables.fill(tokens, seqs)
        began = None if self._behind else time.perf_counter_ns()
        self._behind = False
        graph.replay()
        moment = self._device.moment()
        return Launched(tables.launched(moment), tokens, seqs, logits, moment, began)

    def _take_ahead(self, tokens: torch.Tensor, seqs: Sequence[SeqSlice]) -> Launched | None:
        """The step that was launched ahead, if it is the one that is wanted now. It is forgotten else."""
        if self._ahead is None:
            return None
        before, step = self._ahead
        tables, codes = self.tables, step.tokens.tolist()
        same = len(seqs) == len(step.seqs) and all(
            (seq.context, seq.state_row, seq.row_out) == (mine.context, mine.state_row, mine.row_out)
            and token == (code if code >= 0 else before.guesses[-1 - code])
            and tables.holds_pages(index, seq.page_table.numpy())
            for index, (seq, mine, token, code) in enumerate(zip(seqs, step.seqs, tokens.tolist(), codes, strict=True))
        )
        if not same:
            self._drop_ahead()
            return None
        self._ahead = None
        self.used_ahead += 1
        step.began_ns, step.ahead = self._over_ns, True  # it began when the one before it was over
        return step

    def _drop_ahead(self) -> None:
        self._behind = self._behind or self._ahead is not None
        self._ahead = None

    def _copy_cuts(self, seqs: Sequence[SeqSlice]) -> None:
        """Behind the step on the device, and before the next one."""
        assert self._pools is not None
        _, states = self._pools
        for seq in seqs:
            for cut in seq.cuts:
                row = seq.state_row if seq.row_out < 0 else seq.row_out
                for pool in (*states.delta, *states.conv):
                    pool[cut.dest_row].copy_(pool[row])

    def _wait(self, step: Launched, streaming: bool) -> None:
        """Until the step is over, and not for one behind it. Raises DeviceError if it failed: before a token is drawn."""
        seen = True
        if self.beside is not None:
            self.beside()
        if self.beside is not None or step.ahead:
            seen = not step.moment.reached()  # else it was over before, and nobody knows when
        try:
            if streaming:
                self._device.synchronize()
            else:
                step.moment.wait()  # and not for copies to the host, which go on
            over = time.perf_counter_ns()
            if self._experts is not None:
                self._experts.check()
            step.guesses = self.tables.chosen(step.number, len(step.seqs))
            if step.kept is not None:
                step.kept[1].wait()
        except BaseException:
            self._drop_ahead()
            raise
        self._over_ns = over if seen else None
        if self._experts is not None and not streaming and seen and step.began_ns is not None:
            self._experts.stepped(len(step.seqs), over - step.began_ns)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that get a graph: powers of two, then max_rows. A step is padded to the next of them. Integers only."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)
