"""The step loop: requests in, events out. Token ids only.

One step is: end what was cancelled, make room and admit (scheduler), make holds that are due, run one forward pass over
decoding rows and prefill chunks together, check and publish what it computed, draw the next tokens. Nothing computed by a
pass is published, held or shared before its logits were seen to be finite.

Not thread-safe: one thread calls everything, between steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import ForwardBatch, SeqSlice, StateCut
from engine.config import EngineConfig, Machine
from engine.device.base import Device
from engine.elastic.boundary import Boundary, Divided
from engine.elastic.controller import Controller
from engine.errors import InvalidRequest, OutOfDeviceMemory, OutOfPages, Unsupported
from engine.kvcache.arena import PinnedArena
from engine.kvcache.leaving import Leaving
from engine.kvcache.store import NO_ROW, Held, StateStore
from engine.models.base import Logits, Model, Pass, SlotCounters, Staged
from engine.requests import check_hold, check_request, check_snapshot
from engine.runner import load_model
from engine.sampling import Choice, Sampler, choose_tokens, finite_rows
from engine.scheduler.pace import Work, pairs
from engine.scheduler.scheduler import Scheduler, Slice
from engine.scheduler.sequence import Sequence as Running
from engine.types import (
    DEFAULT_DUE_US,
    CutReached,
    EngineEvent,
    EngineStats,
    Finished,
    FinishReason,
    HeldState,
    HoldId,
    MemoryReport,
    ModelInfo,
    PrefillProgress,
    Request,
    Room,
    StateLayout,
    StateSnapshot,
    TokenEvent,
)

EDGE_NS = 50_000_000
"""A pass that runs alone returns to the caller this often, who then hears of arrivals and cancels."""


@dataclass(slots=True)
class OpenPass:
    """A pass that spans steps. spent_ns: on it so far."""

    slices: list[Slice]
    work: Pass
    spent_ns: int = 0


class Engine:
    """Runs requests on one model, many at a time, and keeps their state where it is asked to.

    set_reclaim(callback): by whoever owns holds. Called inside step() when pages or rows run out; it should release holds worth
    about that many pages (it may copy_out first) and return how many it released, 0 if it has none to give.
    """

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[float, str], None] | None = None) -> Engine:
        """Read the checkpoint in config.model_dir and allocate the pools. The kernels' thread count is set for this process.

        progress(fraction, what) is told what is done now. Raises CheckpointError or Unsupported.
        """
        tell = progress or (lambda fraction, what: None)
        config = config.resolve(Machine.here())
        tell(0.0, "reading weights")
        loaded = load_model(config, tell)
        tell(0.9, "allocating KV pages")
        engine = cls(loaded.model, loaded.config, loaded.weights_digest, loaded.slots, loaded.device, loaded.divided)
        if isinstance(loaded.model, Staged):
            tell(0.95, "compiling kernels and capturing graphs")
            with torch.inference_mode():
                loaded.model.warm_up(engine.store.kv, engine.store.states)
            if loaded.device is not None and loaded.device.torch_device.type == "cuda" and config.rehearse_tokens:
                tell(0.97, "compiling kernels for prompts (the first start on a machine takes a minute)")
                kv_tokens = engine.store.pages.total * engine.store.page_size
                loaded.model.rehearse(engine.store.kv, engine.store.states, min(config.rehearse_tokens, kv_tokens))
        tell(1.0, "ready")
        return engine

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        weights_digest: str = "",
        slots: SlotCounters | None = None,
        device: Device | None = None,
        divided: Divided | None = None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """slots: the model's expert slots, for the counters. device: where state lies, None = host memory. divided: its memory
        that can change hands. clock_ns: what deadlines and the cost of steps are measured by."""
        self.model = model
        self._device = device
        self._slots = slots
        spec = model.spec
        self.config = config = config.resolve(Machine.here(), spec)
        self.max_context = int(config.max_context)
        self.store = StateStore(
            spec,
            pages=int(config.kv_tokens) // config.page_size,
            page_size=config.page_size,
            rows=config.max_rows + int(config.snapshot_rows),
            poison=config.poison_freed,
            device=device,
            room=None if divided is None else divided.memory.bounds.most_pages,
            memory=None if divided is None else divided.memory.pages,
        )
        self._clock_ns = clock_ns
        self.scheduler = Scheduler(
            self.store,
            max_rows=config.max_rows,
            chunk_tokens=config.chunk_tokens,
            step_tokens=int(config.step_tokens),
            restore_bytes=config.restore_bytes,
            # A staged pass is interrupted for the others instead of being cut short.
            gap_us=0 if isinstance(model, Staged) else config.decode_gap_ms * 1000,
            clock=lambda: clock_ns() // 1000,
        )
        self.layout: StateLayout = self.store.layout
        self.info = ModelInfo(
            model_type=spec.model_type,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            max_context=self.max_context,
            layers=len(spec.layers),
            parameters=spec.parameters,
            dtype=str(spec.dtype).removeprefix("torch."),
            backend=config.backend,
            weights_digest=weights_digest,
            numerics=spec.numerics,
        )
        self._boundary = None if divided is None else Boundary(divided, self.store, self.scheduler)
        self._controller: Controller | None = None
        if divided is not None and self._boundary is not None and divided.watch:
            self._controller = Controller(self._boundary, divided, self.store, self.scheduler, clock_ns)
        self._staged = model if isinstance(model, Staged) else None
        self._open: OpenPass | None = None
        self._arena: PinnedArena | None = None
        self._requests: dict[str, Running] = {}
        self._cancelled: dict[str, bool] = {}
        self._bytes_of: Callable[[int], bytes] | None = None
        self._unreturned: list[EngineEvent] = []
        self._arrivals = 0
        self._prefill_tokens = self._decode_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    def set_reclaim(self, callback: Callable[[int], int]) -> None:
        """callback(pages): called inside step() when pages or rows run out; see the class."""
        self.scheduler.reclaim = callback

    @property
    def has_work(self) -> bool:
        """A step would, or may later, give events."""
        return bool(self._requests or self._unreturned)

    def set_token_bytes(self, table: Mapping[int, bytes] | Sequence[bytes]) -> None:
        """table[id]: the bytes that token id stands for, for stop strings; ids that it lacks stand for none."""
        known = table if isinstance(table, Mapping) else dict(enumerate(table))
        self._bytes_of = lambda token: known.get(token, b"")

    def submit(self, request: Request) -> None:
        """Check and queue. A restored hold is pinned now, so it may be released right after; a snapshot's arrays must stay
        unchanged until the request's first event. Cuts before the restored position are ignored.

        Raises InvalidRequest, ContextTooLong, SnapshotMismatch or UnknownHold, queueing nothing.
        """
        if request.id in self._requests:
            raise InvalidRequest("id", request.id, "an id that is not in use")
        check_request(request, self.info.vocab_size, self.max_context, self._bytes_of is not None)
        restore: Held | StateSnapshot | None = None
        if isinstance(request.restore, StateSnapshot):
            check_snapshot(request, request.restore, self.layout)
            restore = request.restore
        elif request.restore is not None:
            check_hold(request, self.store.get(request.restore))
            restore = self.store.pin(request.restore)
        sampler = Sampler(request.sampling, request.token_ids, self.info.vocab_size, request.mask)
        due_us = self._clock_ns() // 1000 + DEFAULT_DUE_US if request.due_us is None else request.due_us
        seq = Running(request, self._arrivals, sampler, restore, due_us)
        self._arrivals += 1
        self._requests[request.id] = seq
        self.scheduler.waiting.append(seq)

    def declare_cut(self, request_id: str, position: int) -> None:
        """Hold the state at `position` when it is there: now (given out by the next step) or later, in prompt or output.

        Raises InvalidRequest for a request that is unknown or finished, or a position that is already passed. A position that
        is never reached gives nothing. Logits are held only with a cut at the prompt end that was declared before it.
        """
        seq = self._requests.get(request_id)
        if seq is None:
            raise InvalidRequest("request_id", request_id, "a request that is queued or running")
        done = max(seq.done, seq.busy_to)
        if position < max(1, done):
            raise InvalidRequest("position", position, f"{max(1, done)} or later")
        opened = self._open
        planned = opened is not None and any(
            part.seq is seq and position == cut for part in opened.slices for cut, _ in part.cuts
        )
        if not planned:
            seq.add_cut(position)

    def cancel(self, request_id: str, hold: bool = False) -> None:
        """End a request, wherever it is; Finished("cancelled") comes from the next step. hold: also keep what is computed.

        An unknown or finished id is ignored: its end may be on the way.
        """
        if request_id in self._requests:
            self._cancelled[request_id] = hold

    # ── holds ───────────────────────────────────────────────────────────────────────────────────────────────────

    def release(self, hold: HoldId) -> None:
        """Raises UnknownHold."""
        self.store.release(hold)

    @torch.inference_mode()
    def copy_out(self, hold: HoldId, kv_start: int = 0) -> StateSnapshot:
        """A copy of a held state on the host: KV rows from kv_start on, recurrent components, logits if held.

        Raises UnknownHold, or InvalidRequest unless 0 ≤ kv_start ≤ position.
        """
        held = self.store.get(hold)
        if not 0 <= kv_start <= held.position:
            raise InvalidRequest("kv_start", kv_start, f"0 to {held.position}")
        return self.store.export(held, kv_start)

    @torch.inference_mode()
    def copy_kv(self, hold: HoldId, start: int, stop: int, each: int = 0) -> Leaving:
        """Begin to copy KV rows [start, stop) of a held state, in arrays of `each` tokens (0: one). For large states, piece by
        piece: on a device nothing waits for it, and what it reads stays until it is over, whatever becomes of the hold.

        Raises UnknownHold, or InvalidRequest unless 0 ≤ start ≤ stop ≤ position.
        """
        held = self.store.get(hold)
        if not 0 <= start <= stop <= held.position:
            raise InvalidRequest("stop", (start, stop), f"a range within 0 to {held.position}")
        return self.store.copy(held, start, stop, each)

    @torch.inference_mode()
    def copy_rest(self, hold: HoldId, start: int) -> Leaving:
        """The same of its KV rows from start on, its recurrent components and its logits."""
        held = self.store.get(hold)
        if not 0 <= start <= held.position:
            raise InvalidRequest("start", start, f"0 to {held.position}")
        return self.store.copy(held, start, held.position, rest=True)

    def memory_for_copies(self, limit_bytes: int) -> PinnedArena | None:
        """Where copies go from now on, and whatever is to be restored soon should lie: memory that the device reads and writes
        by itself. Whoever asks lets it be pinned, and gives it back. None: there is no device, any memory does."""
        if self._device is None:
            return None
        self._arena = arena = PinnedArena(self._device, limit_bytes)
        self.store.take = arena.take
        return arena

    def forget_memory(self) -> None:
        """Give that memory back when the device is done with it; copies go to any from now on. Raises DeviceError."""
        arena, self._arena = self._arena, None
        self.store.forget_memory()
        if arena is not None:
            arena.close()

    def set_beside(self, callback: Callable[[], None]) -> None:
        """Let callback() be called while a device computes a decode step, when the host has nothing to do but wait. It may
        copy, release and ask what is held, and should take less time than the step. Never called where the host computes."""
        if isinstance(self.model, Staged):
            self.model.set_beside(callback)

    def settle(self) -> None:
        """Wait for copies that are under way."""
        self.store.settle()

    @property
    def room(self) -> Room:
        """What is free now."""
        store = self.store
        return Room(
            store.pages.free,
            store.pages.total,
            store.rows.free,
            store.rows.total,
            store.bytes_of(1, 0),
            store.layout.state_bytes,
        )

    def held(self, hold: HoldId) -> HeldState:
        """What a hold names. Raises UnknownHold."""
        held = self.store.get(hold)
        return HeldState(held.position, held.tokens, held.logits is not None)

    @property
    def held_bytes(self) -> int:
        """Bytes of pages and rows of all holds, what they share counted once."""
        return self.store.held_bytes()

    def own_bytes(self, hold: HoldId) -> int:
        """Bytes of pages and row that release() would free now. Raises UnknownHold."""
        return self.store.own_bytes(self.store.get(hold))

    # ── memory that changes hands ───────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def resize_experts(self, slots: int) -> None:
        """Have so many expert slots; KV pages take what they leave and give what they need, down to one context.

        Done when this returns if nothing runs; else a piece of it is, and each step does the next. No token changes by it, and
        no held state is lost but what its owner releases to make room.

        Raises InvalidRequest (how many there may be), Unsupported, OutOfPages or OutOfDeviceMemory; sizes stay as they are.
        """
        if self._boundary is None:
            raise Unsupported(f"expert slots: the {self.config.backend} backend cannot resize them while it serves")
        self._boundary.ask(slots)
        if self._open is None:
            self._boundary.advance(whole=not self.has_work)

    @property
    def memory(self) -> MemoryReport | None:
        """How the device's memory is divided now; None where it cannot change hands."""
        return None if self._boundary is None else self._boundary.report()

    @torch.inference_mode()
    def tend_memory(self) -> None:
        """What was asked of memory and is not done yet. Each step begins with it; an idle engine's owner calls it."""
        boundary = self._boundary
        if boundary is None or self._open is not None:
            return
        if self._controller is not None:
            self._controller.look()
        if boundary.moving:
            with contextlib.suppress(OutOfPages, OutOfDeviceMemory):  # it has said so, and keeps what it has
                boundary.advance(whole=not self.has_work)

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def step(self) -> list[EngineEvent]:
        """Advance every running request by one forward pass. Returns what happened, in order; may be empty.

        An exception of the model (not NaN, which ends one request) ends the requests of that pass with "error" in the next
        step, since their recurrent state may be half advanced, and is raised. So does one from anywhere else, for all that
        run; what happened before it is returned by the next step.
        """
        events, self._unreturned = self._unreturned, []
        self.store.look()
        try:
            self.tend_memory()
            with self._spoiling(self.scheduler.running):
                slices = self._plan(events)
            if self._staged is not None:
                slices = self._open_pass(self._staged, slices)
            if slices:
                began_ns = self._clock_ns()
                logits = self._forward(slices)
                with self._spoiling([part.seq for part in slices]):
                    self._publish(slices, logits, events)
                self._count(slices, self._clock_ns() - began_ns)
            if self._open is not None:
                self._advance(self._open, bool(slices), events)
        except BaseException:
            self._close_pass("another pass failed")
            self._unreturned = events
            raise
        return events

    # ── passes that span steps ──────────────────────────────────────────────────────────────────────────────────

    def _open_pass(self, model: Staged, slices: list[Slice]) -> list[Slice]:
        """Begin a pass over the slices of several tokens. Returns the others, which a step runs by themselves."""
        longer = [part for part in slices if part.end - part.start > 1]
        if longer:
            assert self._open is None
            try:
                work = model.begin(self._batch(longer), self.store.kv, self.store.states)
            except BaseException:
                self._abandon(longer)
                raise
            self._open = OpenPass(longer, work)
            for part in longer:
                part.seq.busy_to = part.end
        return [part for part in slices if part.end - part.start == 1]

    def _advance(self, opened: OpenPass, others: bool, events: list[EngineEvent]) -> None:
        """Compute layers of the open pass: one where others decode beside it, else for about EDGE_NS."""
        began_ns = self._clock_ns()
        logits = opened.work.advance()
        while logits is None and not others and self._clock_ns() - began_ns < EDGE_NS:
            logits = opened.work.advance()
        opened.spent_ns += self._clock_ns() - began_ns
        if logits is None:
            return
        self._open = None
        for part in opened.slices:
            part.seq.busy_to = 0
        with self._spoiling([part.seq for part in opened.slices]):
            self._publish(opened.slices, logits, events)
        self._count(opened.slices, opened.spent_ns)

    def _close_pass(self, why: str) -> None:
        """Give the open pass up and end its requests."""
        opened, self._open = self._open, None
        if opened is None:
            return
        for part in opened.slices:
            part.seq.busy_to = 0
            self._spoil(part.seq, why if part.seq.failed is None else part.seq.failed)
        opened.work.abandon()

    def _plan(self, events: list[EngineEvent]) -> list[Slice]:
        """What can happen without a pass, and what the next pass computes."""
        self._end_cancelled(events)
        self.scheduler.prepare()
        self._end_starved(events)
        self._before_pass(events)
        return self.scheduler.slices(prefill=self._open is None)

    def _forward(self, slices: list[Slice]) -> Logits:
        try:
            return self.model.forward(self._batch(slices), self.store.kv, self.store.states)
        except BaseException:
            self._abandon(slices)
            raise

    def _end_cancelled(self, events: list[EngineEvent]) -> None:
        for request_id, hold in list(self._cancelled.items()):
            seq = self._requests[request_id]
            if seq.busy_to:
                continue  # the pass that it is in ends soon; until then its state is of no position
            del self._cancelled[request_id]
            if seq.failed is not None:
                self._finish(seq, "error", events, error=seq.failed)
            else:
                self._finish(seq, "cancelled", events, hold=hold)

    def _end_starved(self, events: list[EngineEvent]) -> None:
        for seq in self.scheduler.take_starved():
            self._finish(seq, "error", events, error=self.scheduler.shortage(seq))

    def _before_pass(self, events: list[EngineEvent]) -> None:
        """Holds at positions where the state already is, and first tokens of wholly restored prompts."""
        for seq in tuple(self.scheduler.running):
            if not seq.busy_to and seq.cuts and seq.cuts[0] <= seq.computed:
                seq.take_cuts(seq.computed)
                row = self.scheduler.row_for_hold(seq)
                if row is not None:
                    self._hold(seq, row, seq.logits, events)
            if seq.logits is not None:
                logits, seq.logits = seq.logits, None
                self._draw([seq], Logits(logits[None]), events)

    def _batch(self, slices: list[Slice]) -> ForwardBatch:
        page_size = self.store.page_size
        # In numpy, which takes half as long as torch for a handful of integers: every decode step waits for this.
        count = sum(part.end - part.start for part in slices)
        ids, positions = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        last = np.empty(len(slices), dtype=np.int64)
        seqs: list[SeqSlice] = []
        at = 0
        for index, part in enumerate(slices):
            seq = part.seq
            table = seq.table
            assert table is not None
            start, end = part.start, part.end
            cuts = tuple(StateCut(position - start, row) for position, row in part.cuts if row != NO_ROW) if part.cuts else ()
            seqs.append(SeqSlice(at, end - start, start, table.view(-(-end // page_size)), seq.row, start == 0, cuts))
            if end - start == 1:  # an array for one token costs as much as all else here
                ids[at], positions[at] = seq.token_at(start), start
                at += 1
            else:
                rows = slice(at, at + end - start)
                ids[rows] = seq.tokens[start:end]
                positions[rows] = np.arange(start, end)
                at = rows.stop
            last[index] = at - 1
        return ForwardBatch(torch.from_numpy(ids), torch.from_numpy(positions), tuple(seqs), torch.from_numpy(last))

    def _publish(self, slices: list[Slice], logits: Logits, events: list[EngineEvent]) -> None:
        """Take over what a pass computed, for each request whose logits are finite."""
        drawing: list[Running] = []
        rows: list[int] = []
        finite = finite_rows(logits.rows) if logits.best is None else [best >= 0 for best in logits.best]
        for index, (part, good) in enumerate(zip(slices, finite, strict=True)):
            seq = part.seq
            if not good:
                error = f"NaN or infinity in the logits after position {part.end}"
                self._finish(seq, "error", events, error=error)
                continue
            seq.computed = part.end
            if not part.decode:
                events.append(PrefillProgress(seq.id, part.end, seq.prompt_length))
            for position, row in part.cuts:
                at_prompt_end = position == seq.prompt_length
                self._hold(seq, row, logits.rows[index].clone() if at_prompt_end else None, events, position)
            if part.end == seq.length:
                drawing.append(seq)
                rows.append(index)
        if drawing:
            self._draw(drawing, logits.take(rows), events)

    def _draw(self, seqs: list[Running], logits: Logits, events: list[EngineEvent]) -> None:
        """Draw each request's next token from its row of logits, and end those that are done."""
        if any(seq.request.sampling.max_tokens == 0 for seq in seqs):
            for index, seq in enumerate(seqs):
                if seq.request.sampling.max_tokens == 0:
                    self._finish(seq, "length", events, hold=seq.request.hold_at_end, logits=logits.rows[index])
                else:
                    self._draw([seq], logits.take([index]), events)
            return
        choices = choose_tokens(logits.rows, [s.sampler for s in seqs], [s.output_length for s in seqs], logits.best)
        for index, (seq, choice) in enumerate(zip(seqs, choices, strict=True)):
            if isinstance(choice, str):
                self._finish(seq, "error", events, error=choice)
                continue
            events.append(TokenEvent(seq.id, choice.token_id, seq.output_length, choice.logprob, choice.top))
            reason = self._accept(seq, choice)
            if reason is not None:
                at_prompt_end = logits.rows[index] if seq.computed == seq.prompt_length else None
                self._finish(seq, reason, events, hold=seq.request.hold_at_end, logits=at_prompt_end)

    def _accept(self, seq: Running, choice: Choice) -> FinishReason | None:
        """Add a drawn token to the sequence; why it ends now, or None."""
        sampler = seq.sampler
        token = choice.token_id
        seq.append(token)
        sampler.observe(token)
        if token in sampler.stop_ids:
            return "stop"
        if sampler.stop is not None:
            assert self._bytes_of is not None
            if sampler.stop.feed(self._bytes_of(token)):
                return "stop_string"
        if seq.output_length >= seq.request.sampling.max_tokens or seq.length >= self.max_context:
            return "length"
        return None

    def _hold(
        self, seq: Running, row: int, logits: torch.Tensor | None, events: list[EngineEvent], position: int | None = None
    ) -> None:
        """Publish the state at position (default: where seq is); the hold takes over `row`, one of seq's."""
        position = seq.computed if position is None else position
        assert seq.table is not None
        hold = self.store.hold(seq.table, position, row, seq.tokens, logits)
        seq.give_up_row(row)
        seq.held_at = position
        events.append(CutReached(seq.id, position, hold))

    def _finish(
        self,
        seq: Running,
        reason: FinishReason,
        events: list[EngineEvent],
        *,
        error: str | None = None,
        hold: bool = False,
        logits: torch.Tensor | None = None,
    ) -> None:
        """The end of a request. hold: keep its state first, unless a cut just kept the same position."""
        if hold and seq.table is not None and seq.computed > seq.held_at:
            self._hold(seq, seq.row, None if logits is None else logits.clone(), events)
        self.scheduler.retire(seq)
        del self._requests[seq.id]
        self._cancelled.pop(seq.id, None)  # a pass may end what was cancelled while it ran
        events.append(Finished(seq.id, reason, seq.prompt_length, seq.output_length, error))

    def _abandon(self, slices: list[Slice]) -> None:
        for part in slices:
            self._spoil(part.seq, "the forward pass failed")

    @contextlib.contextmanager
    def _spoiling(self, seqs: Collection[Running]) -> Iterator[None]:
        """An exception in the block ends these requests: how far they were advanced is not known."""
        try:
            yield
        except BaseException:
            for seq in tuple(seqs):
                if seq.id in self._requests:
                    self._spoil(seq, "a step of the engine failed")
            raise

    def _spoil(self, seq: Running, why: str) -> None:
        seq.failed = why
        self._cancelled[seq.id] = False

    # ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self, slices: list[Slice], ns: int) -> None:
        """A mixed step's time is divided by tokens."""
        decode = prefill = context = looked_back = 0
        for part in slices:
            if part.decode:
                decode += 1
                context += part.start
            else:
                prefill += part.end - part.start
                looked_back += pairs(part.start, part.end)
        self.scheduler.pace.observe(Work(decode, context, prefill, looked_back), ns // 1000)
        seconds = ns / 1e9
        self._decode_tokens += decode
        self._prefill_tokens += prefill
        self._decode_seconds += seconds * decode / (decode + prefill)
        self._prefill_seconds += seconds * prefill / (decode + prefill)

    def stats(self) -> EngineStats:
        """Counters since the start and what is free now. Rows are those of recurrent state; without any, of requests."""
        scheduler, store = self.scheduler, self.store
        rows = store.rows.total or scheduler.max_rows
        arena = None if self._arena is None else self._arena.stats()
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_prefill_tokens=scheduler.unprefilled_tokens(),
            free_pages=store.pages.free,
            total_pages=store.pages.total,
            free_rows=store.rows.free if store.rows.total else rows - len(scheduler.running),
            total_rows=rows,
            held=len(store.holds),
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            slot_hits=self._slots.hits if self._slots else 0,
            slot_misses=self._slots.misses if self._slots else 0,
            cuts_skipped=scheduler.cuts_skipped,
            preemptions=scheduler.preemptions,
            pauses=scheduler.pauses,
            expert_slots=0 if self._boundary is None else self._boundary.sizes.slots,
            memory_moves=0 if self._boundary is None else self._boundary.moves,
            lent_bytes=0 if self._boundary is None else self._boundary.lent_bytes,
            pinned_bytes=0 if arena is None else arena.pinned,
            pinned_used_bytes=0 if arena is None else arena.used,
            not_pinned_bytes=0 if arena is None else arena.elsewhere,
        )

    def check(self) -> None:
        """Assert that every page and row is free, held or running, exactly as counted. For tests, after any call."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        pins = [seq.restore for seq in waiting if isinstance(seq.restore, Held)]
        rows = [row for seq in running for row in (seq.row, *seq.cut_rows)]
        self.store.check([seq.table for seq in running if seq.table is not None], rows, pins)
        assert {seq.id for seq in (*running, *waiting)} == set(self._requests)
        assert all(seq.table is not None for seq in running)
        assert all(seq.table is None and seq.row == NO_ROW and not seq.cut_rows for seq in waiting)
        assert all(seq.failed is not None or seq.busy_to or not seq.cut_rows for seq in running)
