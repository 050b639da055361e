"""What the worker remembers of one running turn, and the frames made from it. Decides nothing; see turn_loop.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentserve.worker.correction import Expected
from agentserve.worker.messages import Matched, Progress, StartTurn, TokenLogprob, Tokens, TurnFailed, TurnFinished
from engine.types import FinishReason, TokenEvent, TokenMask
from statecache.types import BoundaryKind


@dataclass(frozen=True, slots=True)
class Found:
    """What the state cache knew of a context. position 0 = nothing restorable. divergence None = it only appends."""

    position: int
    tier: str | None
    kind: BoundaryKind | None
    divergence: int | None
    cause: str

    def without_state(self) -> Found:
        """The same finding when its bytes turned out to be of no use."""
        return Found(0, None, None, self.divergence, self.cause)


class TurnRecord:
    """Mutable state of one turn; owned by the loop.

    ids: uint32 [n], the prompt. reused: tokens restored. processed: prompt tokens in the state. expected: tokens that another
    turn is computing for it. written: tokens newly saved.
    mask: limits the answer, once its grammar is compiled.
    begun_us: when the engine took it. predicted: its first token from then on, as expected then. restore_bytes, tier: of the
    restored state. loading_us: until its first step, what it took to restore that; None where others ran meanwhile.
    watched: tokens at which the bridge may find a boundary. unproven: something was restored or saved of which nobody has seen
    finite logits.
    failure: set once it is known that the turn ends as failed. Times are `time.monotonic()`.
    """

    def __init__(self, start: StartTurn, ids: np.ndarray, received_at: float) -> None:
        self.start = start
        self.ids = ids
        self.generated: list[int] = []
        self.received_at = received_at
        self.admitted_at: float | None = None
        self.prefilled_at: float | None = None
        self.first_token_at: float | None = None
        self.told_at = received_at
        self.reused = 0
        self.processed = 0
        self.expected = 0
        self.written = 0
        self.watched: frozenset[int] = frozenset()
        self.unproven = False
        self.restore_s = 0.0
        self.cancelled = False
        self.mask: TokenMask | None = None
        self.begun_us = 0
        self.predicted: Expected | None = None
        self.restore_bytes = 0
        self.loading_us: int | None = None
        self.tier: str | None = None
        self.failure: TurnFailed | None = None

    @property
    def id(self) -> str:
        return self.start.turn_id

    @property
    def deadline_at(self) -> float | None:
        """When the deadline passes, None if it is not enforced."""
        if self.start.on_miss != "fail" or self.start.deadline_s is None:
            return None
        return self.start.accepted_at + self.start.deadline_s

    @property
    def unprefilled(self) -> int:
        return 0 if self.first_token_at is not None else max(0, len(self.ids) - max(self.processed, self.expected))

    @property
    def predicted_ttft_s(self) -> float | None:
        """TTFT as predicted when the engine took the turn, from acceptance on; None if it never did."""
        return None if self.predicted is None else (self.begun_us + self.predicted.usual) / 1e6 - self.start.accepted_at

    def lateness(self, now: float) -> str:
        late_ms = round((now - self.start.accepted_at) * 1000)
        deadline_ms = round((self.start.deadline_s or 0) * 1000)
        return (
            f"no token after {late_ms} ms, the deadline was {deadline_ms} ms; {self.processed} of {len(self.ids)} prompt tokens"
            " are done and kept for a retry"
        )

    def tokens_until(self, position: int) -> np.ndarray:
        """uint32 [position]: the exact ids before a boundary, prompt and generated. Raises IndexError beyond them."""
        n = len(self.ids)
        if position > n + len(self.generated):
            raise IndexError(f"position {position} beyond {n} + {len(self.generated)} tokens")
        if position <= n:
            return self.ids[:position]
        return np.concatenate([self.ids, np.asarray(self.generated[: position - n], np.uint32)])

    def prefilled(self, processed: int, now: float) -> None:
        """The engine has `processed` prompt tokens in the state."""
        self.processed = processed
        if self.admitted_at is None:
            self.admitted_at = now
        if processed >= len(self.ids) and self.prefilled_at is None:
            self.prefilled_at = now

    def token_came(self, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            self.prefilled(len(self.ids), now)

    def matched_frame(self, found: Found, expected: Expected) -> Matched:
        return Matched(
            turn_id=self.id,
            position=self.reused,
            tier=found.tier,
            kind=found.kind,
            divergence=found.divergence,
            cause=found.cause,
            predicted_ttft_s=expected.usual / 1e6,
            cautious_ttft_s=expected.cautious / 1e6,
        )

    def tokens_frame(self, events: Sequence[TokenEvent]) -> Tokens:
        logprobs: tuple[TokenLogprob, ...] = ()
        if events[0].logprob is not None:
            logprobs = tuple(TokenLogprob(e.logprob or 0.0, e.top_logprobs) for e in events)
        return Tokens(turn_id=self.start.turn_id, ids=tuple([e.token_id for e in events]), logprobs=logprobs)

    def progress_frame(self, queued: int, expected: Expected) -> Progress:
        return Progress(
            turn_id=self.id,
            processed=self.processed,
            total=len(self.ids),
            cached=self.reused,
            queued=queued,
            eta_s=expected.usual / 1e6,
            cautious_s=expected.cautious / 1e6,
        )

    def last_frame(self, reason: FinishReason, error: str | None, now: float) -> TurnFinished | TurnFailed:
        """The frame that ends the turn, from the engine's finish reason."""
        if self.failure is not None:
            return self.failure
        if reason == "error":
            return TurnFailed(self.id, "server_error", error or "the engine gave up this turn")
        admitted = self.admitted_at if self.admitted_at is not None else now
        prefilled = self.prefilled_at if self.prefilled_at is not None else now
        first = self.first_token_at
        return TurnFinished(
            turn_id=self.id,
            reason=reason,
            prompt_tokens=len(self.ids),
            output_tokens=len(self.generated),
            reused_tokens=self.reused,
            written_tokens=self.written,
            queue_s=max(0.0, admitted - self.received_at),
            restore_s=self.restore_s,
            prefill_s=max(0.0, prefilled - admitted),
            ttft_s=None if first is None else first - self.start.accepted_at,
            decode_s=0.0 if first is None else now - first,
            tier=self.tier,
            predicted_ttft_s=self.predicted_ttft_s,
        )
