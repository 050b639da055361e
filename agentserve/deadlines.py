"""Is a turn's deadline kept? Integers and pure functions; no clocks, no I/O.

The worker predicts (worker/forecast.py); the server follows one turn with a `DeadlineTracker` and sends `agentserve.deadline`
whenever the status changes. Times are milliseconds since the turn was accepted, unless named otherwise.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

DEFAULT_DEADLINE_MS = 30_000
"""Reported, never enforced, for a turn that names none."""


class DeadlineStatus(StrEnum):
    ON_TRACK = "on_track"
    AT_RISK = "at_risk"
    """The deadline may well pass first: what few turns exceed lies beyond it, or the prediction itself does."""
    MET = "met"
    MISSED = "missed"


class DeadlineReport(msgspec.Struct, frozen=True):
    """Fields of an `agentserve.deadline` event. When met or missed by a token, predicted_ttft_ms is the measured TTFT."""

    deadline_ms: int
    predicted_ttft_ms: int
    elapsed_ms: int
    status: DeadlineStatus


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker measured of itself. All ≥ 1; the defaults are guesses until the first turn."""

    prefill_tokens_per_s: int = 500
    decode_step_us: int = 20_000
    restore_bytes_per_s: int = 1 << 30


def blend(old: int, new: int, weight_permille: int = 300) -> int:
    """Exponential average that forgets; result ≥ 1. weight_permille: share of the new value."""
    return max(1, (old * (1000 - weight_permille) + new * weight_permille) // 1000)


class DeadlineTracker:
    """Status of one turn: on_track ⇄ at_risk → met or missed, which are final.

    Every method returns a report when the status changed (or at the first prediction), else None. Elapsed times must not fall.
    """

    def __init__(self, deadline_ms: int = DEFAULT_DEADLINE_MS) -> None:
        if deadline_ms < 1:
            raise ValueError(f"deadline_ms: got {deadline_ms}, accepted: at least 1")
        self.deadline_ms = deadline_ms
        self.status: DeadlineStatus | None = None
        self.predicted_ttft_ms = 0
        self._cautious_ttft_ms = 0
        self.warned: bool | None = None
        """Whether the first prediction was a warning; None before it."""

    @property
    def final(self) -> bool:
        return self.status in (DeadlineStatus.MET, DeadlineStatus.MISSED)

    def foretold(self, elapsed_ms: int, remaining_s: float, cautious_s: float | None = None) -> DeadlineReport | None:
        """`predicted`, of seconds as the worker tells them."""
        return self.predicted(elapsed_ms, int(remaining_s * 1000), None if cautious_s is None else int(cautious_s * 1000))

    def predicted(self, elapsed_ms: int, remaining_ms: int, cautious_ms: int | None = None) -> DeadlineReport | None:
        """A new prediction: the first token is `remaining_ms` away. cautious_ms: what few turns exceed, which is what warns."""
        if self.final:
            return None
        self.predicted_ttft_ms = elapsed_ms + max(0, remaining_ms)
        self._cautious_ttft_ms = max(self.predicted_ttft_ms, elapsed_ms + (cautious_ms or 0))
        late = self._cautious_ttft_ms > self.deadline_ms
        if self.warned is None:
            self.warned = late
        return self._look(elapsed_ms, DeadlineStatus.AT_RISK if late else DeadlineStatus.ON_TRACK)

    def tick(self, elapsed_ms: int) -> DeadlineReport | None:
        """Time passes without news."""
        if self.final:
            return None
        late = max(elapsed_ms, self._cautious_ttft_ms) > self.deadline_ms
        return self._look(elapsed_ms, DeadlineStatus.AT_RISK if late else DeadlineStatus.ON_TRACK)

    def first_token(self, elapsed_ms: int) -> DeadlineReport | None:
        """The first token came. A turn that was missed before stays missed."""
        if self.final:
            return None
        self.predicted_ttft_ms = elapsed_ms
        return self._become(elapsed_ms, DeadlineStatus.MISSED if elapsed_ms > self.deadline_ms else DeadlineStatus.MET)

    def ended(self, elapsed_ms: int) -> DeadlineReport | None:
        """The turn ended without any token (prewarm, cancel, failure): met if it ended in time."""
        return self.first_token(elapsed_ms)

    def _look(self, elapsed_ms: int, status: DeadlineStatus) -> DeadlineReport | None:
        if elapsed_ms > self.deadline_ms:
            status = DeadlineStatus.MISSED
        return self._become(elapsed_ms, status)

    def _become(self, elapsed_ms: int, status: DeadlineStatus) -> DeadlineReport | None:
        if status is self.status:
            return None
        self.status = status
        return DeadlineReport(self.deadline_ms, self.predicted_ttft_ms, elapsed_ms, status)
