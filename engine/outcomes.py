"""What comes of requests: results of passes checked and published as holds and tokens, and each request's one end.

Nothing computed by a pass is published, held or shared before its logits were seen to be finite. Runs no passes and chooses
no order; see passes.py and scheduler/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch

from engine.kvcache.store import NO_ROW, Held, StateStore
from engine.models.base import Logits
from engine.sampling import Choice, choose_tokens, finite_rows
from engine.scheduler.scheduler import Scheduler, Slice
from engine.scheduler.sequence import Sequence as Running
from engine.types import CutReached, EngineEvent, Finished, FinishReason, PrefillProgress, TokenEvent


class Outcomes:
    """requests: those that have not ended, by id. bytes_of(token): for stop strings; None if nobody has said."""

    def __init__(self, store: StateStore, scheduler: Scheduler, max_context: int) -> None:
        self._store, self._scheduler, self._max_context = store, scheduler, max_context
        self.requests: dict[str, Running] = {}
        self.bytes_of: Callable[[int], bytes] | None = None
        self._cancelled: dict[str, bool] = {}

    # ── between passes ──────────────────────────────────────────────────────────────────────────────────────────

    def cancel(self, request_id: str, hold: bool) -> None:
        """End it with the next end_cancelled(); hold: keep what is computed. An unknown id is ignored."""
        if request_id in self.requests:
            self._cancelled[request_id] = hold

    def end_cancelled(self, events: list[EngineEvent]) -> None:
        for request_id, hold in list(self._cancelled.items()):
            seq = self.requests[request_id]
            if seq.busy_to:
                continue  # the pass that it is in ends soon; until then its state is of no position
            del self._cancelled[request_id]
            if seq.failed is not None:
                self._finish(seq, "error", events, error=seq.failed)
            else:
                self._finish(seq, "cancelled", events, hold=hold)

    def end_starved(self, events: list[EngineEvent]) -> None:
        for seq in self._scheduler.take_starved():
            self._finish(seq, "error", events, error=self._scheduler.shortage(seq))

    def publish_present(self, events: list[EngineEvent]) -> None:
        """What needs no pass: holds at positions where the state already is, and first tokens of wholly restored prompts."""
        for seq in tuple(self._scheduler.running):
            if not seq.busy_to and seq.cuts and seq.cuts[0] <= seq.computed:
                seq.take_cuts(seq.computed)
                row = self._scheduler.row_for_hold(seq)
                if row is not None:
                    self._hold(seq, row, seq.logits, events)
            if seq.logits is not None:
                logits, seq.logits = seq.logits, None
                self._draw([seq], Logits(logits[None]), events)

    # ── after a pass ────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, slices: list[Slice], logits: Logits, events: list[EngineEvent]) -> None:
        """Take over what a pass computed, for each request whose logits are finite."""
        drawing: list[Running] = []
        rows: list[int] = []
        finite = finite_rows(logits.rows) if logits.guesses is None else [guess >= 0 for guess in logits.guesses]
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
        choices = choose_tokens(logits.rows, [s.sampler for s in seqs], [s.output_length for s in seqs], logits.guesses)
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
            assert self.bytes_of is not None
            if sampler.stop.feed(self.bytes_of(token)):
                return "stop_string"
        if seq.output_length >= seq.request.sampling.max_tokens or seq.length >= self._max_context:
            return "length"
        return None

    def _hold(
        self, seq: Running, row: int, logits: torch.Tensor | None, events: list[EngineEvent], position: int | None = None
    ) -> None:
        """Publish the state at position (default: where seq is); the hold takes over `row`, one of seq's."""
        position = seq.computed if position is None else position
        assert seq.table is not None
        hold = self._store.hold(seq.table, position, row, seq.tokens, logits)
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
        self._scheduler.retire(seq)
        del self.requests[seq.id]
        self._cancelled.pop(seq.id, None)  # a pass may end what was cancelled while it ran
        events.append(Finished(seq.id, reason, seq.prompt_length, seq.output_length, error))

    # ── failures ────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def spoiling(self, seqs: Collection[Running], why: str = "a step of the engine failed") -> Iterator[None]:
        """An exception in the block ends these requests: how far they were advanced is not known."""
        try:
            yield
        except BaseException:
            for seq in tuple(seqs):
                if seq.id in self.requests:
                    self.spoil(seq, why)
            raise

    def spoil(self, seq: Running, why: str) -> None:
        """Let it end with this error in the next step."""
        seq.failed = why
        self._cancelled[seq.id] = False

    def check(self) -> None:
        """Assert that every page and row is free, held or running, exactly as counted. For tests, after any call."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        pins = [seq.restore for seq in waiting if isinstance(seq.restore, Held)]
        rows = [row for seq in running for row in (seq.row, seq.ahead_row, *seq.cut_rows)]
        self._store.check([seq.table for seq in running if seq.table is not None], rows, pins)
        assert {seq.id for seq in (*running, *waiting)} == set(self.requests)
        assert all(seq.table is not None for seq in running)
        assert all(seq.table is None and seq.row == NO_ROW and not seq.cut_rows for seq in waiting)
        assert all(seq.failed is not None or seq.busy_to or not seq.cut_rows for seq in running)
