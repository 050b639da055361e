"""Turns on an engine: accept, refuse, follow, cancel, watch deadlines, report. One thread calls everything.

What is restored and saved is the state bridge's business; frames go out through `send` in the order in which things happened.
Every accepted turn ends with exactly one TurnFinished or TurnFailed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from agentserve.worker.forecast import Forecast
from agentserve.worker.grammars import COMPILE_S, GrammarMask, GrammarRefused, Grammars
from agentserve.worker.measure import Measure
from agentserve.worker.messages import (
    Checkpoints,
    FromWorker,
    ListCheckpoints,
    Load,
    PinCheckpoint,
    StartTurn,
    TurnFailed,
)
from agentserve.worker.ports import EnginePort
from agentserve.worker.requests import engine_request, load_report, refusal_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turns import Found, TurnRecord
from engine.errors import ContextTooLong, EngineError, InvalidRequest
from engine.types import (
    CutReached,
    Finished,
    HoldId,
    PrefillProgress,
    StateSnapshot,
    TokenEvent,
)
from statecache.reader import Reading

log = logging.getLogger(__name__)
PROGRESS_S = 1.0
"""A waiting turn says so at least this often."""


class TurnLoop:
    """All turns of one worker.

    send(frame): takes a frame for the server. flush(): sends on what it took, called where work follows that no frame should
    wait for. token_bytes(): bytes of every token id, asked for once, at the first turn with stop strings. grammars: compiles
    those of turns; None refuses such turns. forecast: what is known of this machine's speed.
    """

    def __init__(
        self,
        engine: EnginePort,
        bridge: StateBridge,
        send: Callable[[FromWorker], None],
        *,
        flush: Callable[[], None] = lambda: None,
        token_bytes: Callable[[], Sequence[bytes]] | None = None,
        grammars: Grammars | None = None,
        forecast: Forecast | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._send = send
        self._flush = flush
        self._token_bytes = token_bytes
        self._grammars = grammars
        self._clock = clock
        self._measure = Measure()
        self.forecast = forecast or Forecast()
        bridge.worth = self._measure.worth_restoring
        self._step_began_at = 0.0
        self._turns: dict[str, TurnRecord] = {}
        self._held: dict[str, tuple[str, int]] = {}
        """Turns that wait for another one's checkpoint: (that turn, its position)."""
        self._compiling: dict[str, Future[GrammarMask]] = {}
        """Turns that wait for their grammar."""
        self._restoring: dict[str, Reading] = {}
        """Turns whose saved state is being read from disk."""

    @property
    def running(self) -> int:
        """Turns that have not ended."""
        return len(self._turns)

    @property
    def elsewhere(self) -> int:
        """Turns that wait for another thread: `poll` must be called for them, whether or not the engine has work."""
        return len(self._compiling) + len(self._restoring)

    # ── what the server asks ─────────────────────────────────────────────────────────────────────────────────────

    def start(self, start: StartTurn) -> None:
        """Begin a turn. Whatever goes wrong with it is told by TurnFailed."""
        ids = np.frombuffer(start.ids, "<u4")
        running = start.turn_id in self._turns
        refusal = refusal_of(start, ids, self._engine.info, running=running)
        if refusal is not None:
            self._send(refusal)
            return
        turn = self._turns[start.turn_id] = TurnRecord(start, ids, self._clock())
        if start.grammar and start.generate:
            self._compile(turn)
        elif not self._wait_for_another(turn):
            self._begin_or_fail(turn)

    def _compile(self, turn: TurnRecord) -> None:
        if self._grammars is None:
            self._fail(turn, "invalid_value", "this worker compiles no grammars", None)
            return
        ends = (*self._engine.info.eos_token_ids, *turn.start.markers.turn_end)
        self._compiling[turn.id] = self._grammars.compile(turn.start.grammar, ends)

    def poll(self) -> None:
        """Begin turns whose grammar is compiled or whose state is read, and end those that wait too long for it."""
        for turn_id, reading in list(self._restoring.items()):
            if reading.done:
                self._restored(self._turns[turn_id], reading)
        for turn_id, future in list(self._compiling.items()):
            turn = self._turns[turn_id]
            if not future.done():
                if self._clock() - turn.received_at > COMPILE_S:
                    future.cancel()
                    del self._compiling[turn_id]
                    message = f"the grammar was not compiled after {COMPILE_S:.0f} s: make the schema smaller"
                    self._fail(turn, "invalid_value", message, None)
                continue
            del self._compiling[turn_id]
            try:
                turn.mask = future.result()
            except GrammarRefused as error:
                self._fail(turn, "invalid_value", f"the grammar cannot be used: {error}", None)
            except Exception as error:
                log.exception("grammar failed turn=%s", turn_id)
                self._fail(turn, "server_error", f"the grammar could not be compiled: {type(error).__name__}")
            else:
                if not self._wait_for_another(turn):
                    self._begin_or_fail(turn)
        if self.elsewhere:
            self._enforce_deadlines()

    def _wait_for_another(self, turn: TurnRecord) -> bool:
        """Hold the turn back while another one computes what it needs."""
        flights = [
            self._bridge.flight(other)
            for other in self._turns.values()
            if other is not turn
            and other.id not in self._held
            and other.id not in self._compiling
            and other.id not in self._restoring
            and other.start.salt == turn.start.salt
            and other.first_token_at is None
            and not other.cancelled
        ]
        found = self._bridge.worth_waiting_for(turn, flights) if flights else None
        if found is None:
            return False
        self._held[turn.id] = found
        turn.expected = found[1]
        return True

    def _release_held(self) -> None:
        """Begin turns whose wait is over: the checkpoint was taken, or will not come."""
        for turn_id, (other_id, position) in list(self._held.items()):
            other = self._turns.get(other_id)
            if turn_id not in self._held or (other is not None and not other.cancelled and other.processed < position):
                continue
            turn = self._turns[turn_id]
            del self._held[turn_id]
            turn.expected = 0
            if not self._wait_for_another(turn):
                self._begin_or_fail(turn)

    def _begin_or_fail(self, turn: TurnRecord) -> None:
        self._or_fail(turn, self._begin)

    def _restored(self, turn: TurnRecord, reading: Reading) -> None:
        """Begin a turn whose state was read; without it if that failed."""
        del self._restoring[turn.id]
        found, restore = self._bridge.take(turn, reading)
        # Meanwhile another one may have come so far that its state in the engine's pools is the better one.
        if not self._wait_for_another(turn):
            self._or_fail(turn, lambda turn: self._begin_from(turn, found, restore, reading.seconds))

    def _or_fail(self, turn: TurnRecord, begin: Callable[[TurnRecord], None]) -> None:
        try:
            begin(turn)
        except ContextTooLong as error:
            self._fail(turn, "context_length_exceeded", str(error), "input")
        except InvalidRequest as error:
            self._fail(turn, "invalid_value", str(error), error.field)
        except (EngineError, ValueError) as error:
            log.warning("turn refused turn=%s error=%s", turn.id, error)
            self._fail(turn, "server_error", f"the engine did not take the turn: {error}")

    def cancel(self, turn_id: str) -> None:
        """End a turn; the state where it stopped is kept. Unknown ids are ignored: the turn may just have ended."""
        turn = self._turns.get(turn_id)
        if turn is not None and not turn.cancelled:
            self._cancel(turn)

    def list_checkpoints(self, query: ListCheckpoints) -> None:
        self._send(Checkpoints(query.query_id, self._bridge.checkpoints(query.session)))

    def pin_checkpoint(self, query: PinCheckpoint) -> None:
        found = self._bridge.pin(query.session, query.checkpoint, query.pinned)
        self._send(Checkpoints(query.query_id, self._bridge.checkpoints(query.session), found))

    # ── what the worker's loop does ──────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Advance the engine by one step and tell what happened. Returns whether a turn ended."""
        self._enforce_deadlines()
        before = len(self._turns)
        began_at = self._step_began_at = self._clock()
        computed = {turn.id: turn.processed for turn in self._turns.values() if turn.first_token_at is None}
        events = self._engine.step()
        # Tokens first: they need not wait for copies (2 ms behind 4,000 tokens), and a token that ends the turn gives the state
        # held just before it, in the same step, its better name.
        # Neighbouring tokens of one turn travel in one frame.
        tokens: list[TokenEvent] = []
        others: list[CutReached | Finished] = []
        for event in events:
            if tokens and not (isinstance(event, TokenEvent) and event.request_id == tokens[0].request_id):
                self._on_tokens(tokens)
                tokens = []
            if isinstance(event, TokenEvent):
                tokens.append(event)
            elif isinstance(event, PrefillProgress):
                self._on_progress(event)
            else:
                others.append(event)
        if tokens:
            self._on_tokens(tokens)
        if any(isinstance(e, CutReached) for e in others):
            self._flush()
        spoiled = {e.request_id for e in others if isinstance(e, Finished) and e.reason == "error"}
        for event in others:
            if isinstance(event, CutReached):
                self._on_cut(event, spoiled)
            else:
                self._on_finished(event)
        # Copies of states included: they stand between one step and the next.
        self.forecast.stepped(computed, self._turns, events, round((self._clock() - began_at) * 1e6))
        self._release_held()
        return len(self._turns) < before

    def tick(self) -> None:
        """Let turns that hear nothing else know where they stand. Called about once a second."""
        now = self._clock()
        for ahead, turn in enumerate(self._waiting()):
            if now - turn.told_at >= PROGRESS_S:
                self._tell_progress(turn, ahead)

    def load(self) -> Load:
        """The report of this moment."""
        stats = self._engine.stats()
        self._measure.look(stats)
        own = {
            "turns": len(self._turns),
            "restoring": len(self._restoring),
            "forecast_error_permille": self.forecast.error_permille,
        }
        return load_report(stats, self._measure.rates, self._bridge.figures(), own)

    # ── beginning ────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, turn: TurnRecord) -> None:
        if turn.start.sampling.stop and self._token_bytes is not None:
            self._engine.set_token_bytes(self._token_bytes())
            self._token_bytes = None
        began_at = self._clock()
        found, restore = self._bridge.find(turn)
        if isinstance(restore, Reading):
            self._restoring[turn.id] = restore
            return
        self._begin_from(turn, found, restore, self._clock() - began_at)

    def _begin_from(self, turn: TurnRecord, found: Found, restore: StateSnapshot | HoldId | None, read_s: float) -> None:
        """read_s: what it took to read the state."""
        began_at = self._clock() - read_s
        try:
            self._submit(turn, restore, found.position)
        except (ContextTooLong, InvalidRequest):
            raise
        except EngineError as error:
            if restore is None:
                raise
            # The saved state does not fit this engine, or cannot be restored now; the prompt is still good.
            log.warning("restore refused turn=%s position=%d error=%s", turn.id, found.position, error)
            self._bridge.cache_errors += 1
            restore, found = None, found.without_state()
            self._submit(turn, None, 0)
        if restore is not None:
            turn.reused = turn.processed = found.position
            turn.restore_s = self._clock() - began_at
            turn.restore_bytes, turn.tier = 0 if isinstance(restore, int) else _bytes_of(restore), found.tier
            self._measure.restored(turn.restore_bytes, turn.restore_s, found.tier)
        now = self._clock()
        turn.begun_us = round(now * 1e6)
        turn.predicted = self.forecast.remaining(turn, list(self._turns.values()), turn.begun_us)
        self._send(turn.matched_frame(found, turn.predicted))

    def _submit(self, turn: TurnRecord, restore: StateSnapshot | HoldId | None, position: int) -> None:
        """restore: state of the first `position` tokens."""
        cuts = self._bridge.plan_cuts(turn, 0 if restore is None else position)
        self._engine.submit(engine_request(turn, self._engine.info, restore, cuts))

    # ── events of the engine ─────────────────────────────────────────────────────────────────────────────────────

    def _on_tokens(self, events: list[TokenEvent]) -> None:
        turn = self._turns.get(events[0].request_id)
        if turn is None or turn.cancelled:
            return
        now = self._clock()
        if turn.first_token_at is None:
            self.forecast.first_token(turn, round(now * 1e6))
        turn.token_came(now)
        self._send(turn.tokens_frame(events))
        for event in events:
            turn.generated.append(event.token_id)
            if event.token_id in turn.watched or turn.unproven:  # hardly ever: nothing else is done for a token
                self._bridge.generated(turn, event.token_id)

    def _on_progress(self, event: PrefillProgress) -> None:
        turn = self._turns.get(event.request_id)
        if turn is not None:
            if turn.admitted_at is None and len(self._turns) == 1:  # else those that went before it would count
                turn.loading_us = max(0, round(self._step_began_at * 1e6) - turn.begun_us)
            turn.prefilled(event.processed, self._clock())
            self._tell_progress(turn, 0)

    def _on_cut(self, event: CutReached, spoiled: set[str]) -> None:
        turn = self._turns.get(event.request_id)
        if turn is None or event.request_id in spoiled:
            self._bridge.release(event.hold)
            return
        saved = self._bridge.save(turn, event)
        if saved is not None:
            self._send(saved)

    def _on_finished(self, event: Finished) -> None:
        turn = self._turns.get(event.request_id)
        if turn is None:
            return
        if event.reason == "error":
            self._bridge.spoiled(turn)
        else:  # no token needs to have come: the engine has looked at the logits of every pass
            self._bridge.proved(turn)
        self._drop(turn)
        self._send(turn.last_frame(event.reason, event.error, self._clock()))

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _enforce_deadlines(self) -> None:
        now = self._clock()
        for turn in list(self._turns.values()):
            at = turn.deadline_at
            if at is None or now <= at or turn.first_token_at is not None or turn.cancelled:
                continue
            turn.failure = TurnFailed(turn.id, "deadline_exceeded", turn.lateness(now), "agentserve.ttft_deadline_ms")
            self._cancel(turn)

    def _cancel(self, turn: TurnRecord) -> None:
        turn.cancelled = True
        if self._held.pop(turn.id, None) is not None or self._stop_compiling(turn.id) or self._stop_reading(turn.id):
            self._drop(turn)
            self._send(turn.last_frame("cancelled", None, self._clock()))
            return
        try:
            # What is there is kept: a person who interrupts an answer goes on from it, and a deadline is tried again.
            self._engine.cancel(turn.id, hold=True)
        except EngineError as error:
            self._fail(turn, "server_error", f"the turn could not be cancelled: {error}")

    def _stop_compiling(self, turn_id: str) -> bool:
        """Whether it waited for its grammar. One that is being compiled already goes on to its limits."""
        future = self._compiling.pop(turn_id, None)
        return future is not None and (future.cancel() or True)

    def _stop_reading(self, turn_id: str) -> bool:
        """Whether its state was being read."""
        reading = self._restoring.pop(turn_id, None)
        if reading is not None:
            self._bridge.give_up(reading)
        return reading is not None

    def _fail(self, turn: TurnRecord, code: str, message: str, param: str | None = None) -> None:
        """End a turn that the engine does not run."""
        self._drop(turn)
        self._send(turn.failure or TurnFailed(turn.id, code, message, param))

    def _drop(self, turn: TurnRecord) -> None:
        self._bridge.close(turn)
        self._turns.pop(turn.id, None)
        self._release_held()

    # ── telling how long it takes ────────────────────────────────────────────────────────────────────────────────

    def _waiting(self) -> list[TurnRecord]:
        """Turns without a first token, in order of arrival."""
        return [t for t in self._turns.values() if t.first_token_at is None]

    def _tell_progress(self, turn: TurnRecord, ahead: int) -> None:
        turn.told_at = self._clock()
        expected = self.forecast.remaining(turn, list(self._turns.values()), round(turn.told_at * 1e6))
        self._send(turn.progress_frame(ahead if turn.admitted_at is None else 0, expected))


def _bytes_of(snapshot: StateSnapshot) -> int:
    return sum(run.rows.nbytes for run in snapshot.kv) + sum(part.nbytes for part in snapshot.state.values())
