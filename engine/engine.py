"""The step loop: requests in, events out. Token ids only.

One step is: end what was cancelled, make room and admit (scheduler), make holds that are due (outcomes), run one forward pass
over decoding rows and prefill chunks together (passes), check and publish what it computed and draw the next tokens (outcomes).

Not thread-safe: one thread calls everything, between steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.ahead import Ahead, Begun
from engine.config import EngineConfig, Machine
from engine.device.base import Device
from engine.elastic.boundary import Boundary, Divided
from engine.elastic.controller import Controller
from engine.errors import InvalidRequest, OutOfDeviceMemory, OutOfPages, Unsupported
from engine.figures import Figures
from engine.holds import Holds
from engine.kvcache.arena import PinnedArena
from engine.kvcache.leaving import Leaving
from engine.kvcache.store import Held, StateStore
from engine.models.base import Logits, Model, SlotCounters, Staged
from engine.outcomes import Outcomes
from engine.passes import Passes
from engine.requests import check_hold, check_request, check_snapshot
from engine.runner import load_model
from engine.sampling import Sampler
from engine.scheduler.scheduler import Scheduler, Slice
from engine.scheduler.sequence import Sequence as Running
from engine.types import (
    DEFAULT_DUE_US,
    EngineEvent,
    EngineStats,
    HeldState,
    HoldId,
    MemoryReport,
    ModelInfo,
    Request,
    Room,
    StateLayout,
    StateSnapshot,
)

FAILED = "the forward pass failed"


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
            spare=config.spare_rows if isinstance(model, Staged) else 0,
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
        self._holds = Holds(self.store, device)
        ahead = Ahead(model, self.store, self.max_context) if isinstance(model, Staged) and config.ahead_rows else None
        begun = Begun() if ahead is None else ahead.counts
        self.passes = Passes(model, self.store, clock_ns, ahead)
        self.outcomes = Outcomes(self.store, self.scheduler, self.max_context)
        self._figures = Figures(self.store, self.scheduler, self._holds, slots, self._boundary, begun)
        self._unreturned: list[EngineEvent] = []
        self._arrivals = 0

    @property
    def model(self) -> Model:
        """What runs the passes. May be replaced between steps by one that stands in front of it."""
        return self.passes.model

    @model.setter
    def model(self, model: Model) -> None:
        self.passes.model = model

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    def set_reclaim(self, callback: Callable[[int], int]) -> None:
        """callback(pages): called inside step() when pages or rows run out; see the class."""
        self.scheduler.reclaim = callback

    @property
    def has_work(self) -> bool:
        """A step would, or may later, give events."""
        return bool(self.outcomes.requests or self._unreturned)

    def set_token_bytes(self, table: Mapping[int, bytes] | Sequence[bytes]) -> None:
        """table[id]: the bytes that token id stands for, for stop strings; ids that it lacks stand for none."""
        known = table if isinstance(table, Mapping) else dict(enumerate(table))
        self.outcomes.bytes_of = lambda token: known.get(token, b"")

    def submit(self, request: Request) -> None:
        """Check and queue. A restored hold is pinned now, so it may be released right after; a snapshot's arrays must stay
        unchanged until the request's first event. Cuts before the restored position are ignored.

        Raises InvalidRequest, ContextTooLong, SnapshotMismatch or UnknownHold, queueing nothing.
        """
        if request.id in self.outcomes.requests:
            raise InvalidRequest("id", request.id, "an id that is not in use")
        check_request(request, self.info.vocab_size, self.max_context, self.outcomes.bytes_of is not None)
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
        self.outcomes.requests[request.id] = seq
        self.scheduler.waiting.append(seq)

    def declare_cut(self, request_id: str, position: int) -> None:
        """Hold the state at `position` when it is there: now (given out by the next step) or later, in prompt or output.

        Raises InvalidRequest for a request that is unknown or finished, or a position that is already passed. A position that
        is never reached gives nothing. Logits are held only with a cut at the prompt end that was declared before it.
        """
        seq = self.outcomes.requests.get(request_id)
        if seq is None:
            raise InvalidRequest("request_id", request_id, "a request that is queued or running")
        done = max(seq.done, seq.busy_to)
        if position < max(1, done):
            raise InvalidRequest("position", position, f"{max(1, done)} or later")
        if not self.passes.gives(seq, position):
            seq.add_cut(position)

    def cancel(self, request_id: str, hold: bool = False) -> None:
        """End a request, wherever it is; Finished("cancelled") comes from the next step. hold: also keep what is computed.

        An unknown or finished id is ignored: its end may be on the way.
        """
        self.outcomes.cancel(request_id, hold)

    # ── holds; what each does is in holds.py ────────────────────────────────────────────────────────────────────────

    def release(self, hold: HoldId) -> None:
        """Raises UnknownHold."""
        self.store.release(hold)

    def copy_out(self, hold: HoldId, kv_start: int = 0) -> StateSnapshot:
        return self._holds.copy_out(hold, kv_start)

    def copy_kv(self, hold: HoldId, start: int, stop: int, each: int = 0) -> Leaving:
        return self._holds.copy_kv(hold, start, stop, each)

    def copy_rest(self, hold: HoldId, start: int) -> Leaving:
        return self._holds.copy_rest(hold, start)

    def memory_for_copies(self, limit_bytes: int) -> PinnedArena | None:
        return self._holds.memory_for_copies(limit_bytes)

    def forget_memory(self) -> None:
        self._holds.forget_memory()

    def held(self, hold: HoldId) -> HeldState:
        return self._holds.get(hold)

    @property
    def room(self) -> Room:
        return self._holds.room

    @property
    def held_bytes(self) -> int:
        return self._holds.all_bytes

    def own_bytes(self, hold: HoldId) -> int:
        return self._holds.own_bytes(hold)

    def settle(self) -> None:
        """Wait for copies that are under way."""
        self.store.settle()

    def set_beside(self, callback: Callable[[], None]) -> None:
        """Let callback() be called while a device computes a decode step, when the host has nothing to do but wait. It may
        copy, release and ask what is held, and should take less time than the step. Never called where the host computes."""
        if isinstance(self.model, Staged):
            self.model.set_beside(callback)

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
        if self.passes.open is None:
            self._boundary.advance(whole=not self.has_work)

    @property
    def memory(self) -> MemoryReport | None:
        """How the device's memory is divided now; None where it cannot change hands."""
        return None if self._boundary is None else self._boundary.report()

    @torch.inference_mode()
    def tend_memory(self) -> None:
        """What was asked of memory and is not done yet. Each step begins with it; an idle engine's owner calls it."""
        boundary = self._boundary
        if boundary is None or self.passes.open is not None:
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
            with self.outcomes.spoiling(self.scheduler.running):
                slices = self._plan(events)
            longer, slices = self.passes.divide(slices)
            if longer:
                with self.outcomes.spoiling(_requests(longer), FAILED):
                    self.passes.begin(longer)
            if slices:
                began_ns = self._clock_ns()
                with self.outcomes.spoiling(_requests(slices), FAILED):
                    logits = self.passes.run(slices)
                self._publish(slices, logits, events)
                self._figures.count(slices, self._clock_ns() - began_ns)
            opened = self.passes.open
            if opened is not None:
                logits = self.passes.advance(opened, bool(slices))
                if logits is not None:
                    self._publish(opened.slices, logits, events)
                    self._figures.count(opened.slices, opened.spent_ns)
        except BaseException:
            self._give_up_open_pass()
            self._unreturned = events
            raise
        return events

    def _plan(self, events: list[EngineEvent]) -> list[Slice]:
        """What can happen without a pass, and what the next pass computes."""
        self.outcomes.end_cancelled(events)
        self.scheduler.prepare()
        self.outcomes.end_starved(events)
        self.outcomes.publish_present(events)
        return self.scheduler.slices(prefill=self.passes.open is None)

    def _publish(self, slices: list[Slice], logits: Logits, events: list[EngineEvent]) -> None:
        with self.outcomes.spoiling(_requests(slices)):
            self.outcomes.publish(slices, logits, events)

    def _give_up_open_pass(self) -> None:
        for part in self.passes.open.slices if self.passes.open is not None else ():
            self.outcomes.spoil(part.seq, "another pass failed" if part.seq.failed is None else part.seq.failed)
        self.passes.abandon()

    # ── figures ─────────────────────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> EngineStats:
        """Counters since the start and what is free now. Rows are those of recurrent state; without any, of requests."""
        return self._figures.stats()

    def check(self) -> None:
        """Assert that every page and row is free, held or running, exactly as counted. For tests, after any call."""
        self.outcomes.check()


def _requests(slices: list[Slice]) -> list[Running]:
    return [part.seq for part in slices]
