"""Between engine and state cache: match → restore → cuts → save. The only module that sees both packages.

turn_loop.py calls it at the moments of a turn's life. Rules kept here:
- a cache that fails (read error, full budget) makes a turn slower and never fails it;
- a checkpoint is pinned while it is read; a held state belongs to the cache from save() on, which leaves it where it is until
  its pages are needed or it is to outlive the process; what the cache does not take is given back, whatever raised;
- what no finite logits were computed from does not outlive the process, and is taken away when they turn out to be NaN.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from agentserve.worker import cache_lists
from agentserve.worker.flights import Flight, join
from agentserve.worker.messages import CheckpointRow, Saved, TierRow
from agentserve.worker.pools import EnginePools, is_short
from agentserve.worker.ports import EnginePort
from agentserve.worker.saves import Learned, TurnSaves, is_proven
from agentserve.worker.turns import Found, TurnRecord
from engine.errors import EngineError
from engine.types import CutReached, HoldId, KvRun, StateSnapshot
from statecache.match import Match
from statecache.prefetch import EXPECTED_S, Prefetcher
from statecache.reader import Reader, Reading
from statecache.store import StateCache
from statecache.types import Payload

log = logging.getLogger(__name__)
BUSY_PIECE_BYTES = 3 << 20
IDLE_PIECE_BYTES = 32 << 20
"""Copied from the engine's pools in a step, and at once while nothing runs. The first makes a step of 2.9 ms
0.05 to 0.1 ms longer (H200), which is the price of the calls: with 2 or 4 MiB it is the same."""
NOTHING = Found(0, None, None, 0, "cold")


class StateBridge:
    """One engine and one cache. Every call belongs to a turn between `find` and `close`, except the lists at the end."""

    def __init__(
        self,
        engine: EnginePort,
        cache: StateCache,
        keep: Callable[[Sequence[str]], None] = lambda checkpoint_ids: None,
        *,
        stays: bool = True,
        prefetch: Prefetcher | None = None,
        reader: Reader | None = None,
    ) -> None:
        """keep(ids): told which checkpoints of an ended turn should outlive the process; must return at once.

        stays: let states stay in the engine's pools; else each is copied to the next tier when it is saved. reader: reads the
        disk beside the running turns; without one they wait.
        """
        self._engine = engine
        self._cache = cache
        self._keep = keep
        self._stays = stays
        self._prefetch = prefetch or Prefetcher(cache)
        self._saves = self._has_room()
        cache.attach(EnginePools(engine, self.release))
        engine.set_reclaim(self._reclaim)
        self.worth: Callable[[int, int, str | None], bool] = lambda tokens, nbytes, tier: True
        """(tokens, bytes, tier) → whether a restore beats a prefill."""
        self.not_worth = 0
        self._kept: dict[str, TurnSaves] = {}
        self._learned = Learned(cache.policy)
        self._reader = reader
        self._reading: set[Reading] = set()
        self.on_read: Callable[[], None] = lambda: None
        """Told, from the reader's thread, when take() may be called."""
        self._pins = 0
        self.cache_errors = 0
        self.release_errors = 0

    @property
    def pins(self) -> int:
        """Matches that are being read."""
        return self._pins + len(self._reading)

    # ── before the engine takes a turn ───────────────────────────────────────────────────────────────────────────

    def find(self, turn: TurnRecord) -> tuple[Found, StateSnapshot | HoldId | Reading | None]:
        """The deepest checkpoint that can be restored, and its bytes or, where it lies in the engine's pools, its hold.

        Or, where only the disk has it, what is read of it now: take() or give_up() follows. (nothing, None) also if the cache
        failed. A hold is to be submitted before anything else is done here.
        """
        kept = self._kept[turn.id] = TurnSaves.of(turn)
        turn.watched = kept.watched
        with self._cache_may_fail("match"), self._pinned(turn) as match:
            if match.position and not self.worth(match.position, match.nbytes, match.tier):
                self.not_worth += 1
                return Found(0, None, None, None, "none"), None
            if match.tier == "disk" and self._reader is not None:
                found, reading = _found(match), self._reader.read(match, self.on_read)
                self._reading.add(reading)
                return found, reading
            payload = match.read() if match.position and match.resident is None else None
            return self._restorable(turn, match, payload)
        return NOTHING, None

    def take(self, turn: TurnRecord, reading: Reading) -> tuple[Found, StateSnapshot | HoldId | None]:
        """What find() would have returned, now that it is read (done)."""
        self._reading.discard(reading)
        with self._cache_may_fail("read"):
            try:
                if reading.error is not None:
                    raise reading.error
                return self._restorable(turn, reading.match, reading.payload)
            finally:
                reading.match.release()
        return NOTHING, None

    def give_up(self, reading: Reading) -> None:
        """The turn has ended before it was read."""
        self._reading.discard(reading)
        if self._reader is not None:
            self._reader.give_up(reading)

    def _restorable(
        self, turn: TurnRecord, match: Match, payload: Payload | None
    ) -> tuple[Found, StateSnapshot | HoldId | None]:
        # read() may have fallen back to a shorter checkpoint, so everything is told as it is now.
        kept = self._kept[turn.id]
        if match.divergence.cause == "tokens":
            kept.parted_at = match.divergence.position
            self._learned.parted(turn, match.divergence.position)
        self._learned.came(turn, match.position, match.divergence.position)
        if match.record is not None and not match.record.proven:
            kept.unproven.append(match.record.id)
            turn.unproven = True
        if match.resident is not None:
            return _found(match), HoldId(match.resident.hold)
        if payload is None or payload.position == 0:
            return _found(match), None
        runs = tuple(KvRun(run.start, run.rows) for run in payload.kv)
        state = self._engine.layout.split(payload.state)
        return _found(match), StateSnapshot(payload.position, runs, state, payload.logits)

    def plan_cuts(self, turn: TurnRecord, after: int) -> tuple[int, ...]:
        """Prompt positions where the state must be held, rising; a checkpoint at `after` is restored.

        Raises ValueError if the server named a boundary outside of the prompt.
        """
        self._learned.planned(turn)
        return self._kept[turn.id].plan(turn, self._learned.policy(turn.start.salt), after)

    def flight(self, turn: TurnRecord) -> Flight:
        """What this turn, planned already, will save of its prompt."""
        kept = self._kept.get(turn.id)
        return Flight(turn.id, turn.ids, turn.processed, sorted(kept.cuts) if kept is not None else ())

    def worth_waiting_for(self, turn: TurnRecord, flights: Iterable[Flight]) -> tuple[str, int] | None:
        """A checkpoint of another turn that this one should wait for: (turn, position)."""
        with self._cache_may_fail("join"):
            least = self._cache.policy.single_flight_tokens
            found = join(turn.ids, 0, flights, least)
            # Only now, when something may be gained, the longer question.
            if found is not None and found[1] - self._cache.depth(turn.ids, turn.start.salt) >= least:
                return found
        return None

    @contextmanager
    def _pinned(self, turn: TurnRecord) -> Iterator[Match]:
        """Released at the end, unless it is being read."""
        match = self._cache.match(turn.ids, turn.start.salt, session=turn.start.session)
        self._pins += 1
        try:
            yield match
        finally:
            self._pins -= 1
            if not any(reading.match is match for reading in self._reading):
                match.release()

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────────────

    def generated(self, turn: TurnRecord, token: int) -> None:
        """Look for a boundary at the newest token, the last of turn.generated, and ask the engine to hold the state there.

        Needs to be told only of tokens that the turn watches for, and of the next one while something is unproven.
        """
        if turn.unproven:
            # The token was sampled, so its logits were finite, and so was all that they were computed from.
            self.proved(turn)
        position = self._kept[turn.id].generated(token, len(turn.ids) + len(turn.generated) - 1)
        if position is None:
            return
        try:
            self._engine.declare_cut(turn.id, position)
        except EngineError as error:
            # Best effort: a recurrent state that has moved on is gone.
            log.debug("cut not taken turn=%s position=%d error=%s", turn.id, position, error)

    def save(self, turn: TurnRecord, cut: CutReached) -> Saved | None:
        """Give the held state to the cache, or back to the engine. The hold is not the caller's any more, whatever happens."""
        taken = False
        try:
            boundary = self._kept[turn.id].boundary_of(turn, cut.position)
            if boundary is None or not self._saves:
                return None
            with self._cache_may_fail("put"):
                at_end = cut.position == len(turn.ids)
                # Logits of a prompt end answer the identical prompt without a pass; elsewhere some token always follows.
                result = self._cache.admit(
                    turn.tokens_until(cut.position),
                    turn.start.salt,
                    boundary,
                    cut.hold,
                    logits=at_end and self._engine.held(cut.hold).logits,
                    session=turn.start.session,
                    stays=self._stays,
                    proven=is_proven(turn, cut.position),
                )
                taken = True
                if result.checkpoint_id is not None:
                    return self._kept[turn.id].took(turn, boundary, result)
                log.debug("checkpoint not kept turn=%s position=%d reason=%s", turn.id, cut.position, result.reason)
            return None
        finally:
            if not taken:
                self.release(cut.hold)

    def release(self, hold: HoldId) -> None:
        try:
            self._engine.release(hold)
        except EngineError:
            self.release_errors += 1
            log.exception("hold was not released hold=%d", hold)

    def proved(self, turn: TurnRecord) -> None:
        """Finite logits were computed from all that the turn restored and saved."""
        kept = self._kept.get(turn.id)
        if kept is not None and kept.unproven:
            turn.unproven = False
            proven, kept.unproven = kept.unproven, []
            with self._cache_may_fail("prove"):
                self._cache.prove(proven)

    # ── at its end ───────────────────────────────────────────────────────────────────────────────────────────────

    def spoiled(self, turn: TurnRecord) -> None:
        """The turn ended in NaN: take back what it restored or saved and nothing has proved good."""
        kept = self._kept.get(turn.id)
        if kept is not None and kept.unproven:
            with self._cache_may_fail("spoil"):
                self._cache.spoil(kept.unproven)

    def close(self, turn: TurnRecord) -> None:
        kept = self._kept.pop(turn.id, None)
        if kept is None or not kept.placed:
            return
        with self._cache_may_fail("keep"):
            self._keep(self._learned.durable(turn, kept, self._cache.policy))
            self._cache.settle(kept.placed.values())
            if kept.calls_tool(turn):
                # A tool is called: its result will come, and everything up to here before it.
                self._cache.expect(turn.tokens_until(max(kept.placed)), turn.start.salt, EXPECTED_S)

    # ── before a turn comes ──────────────────────────────────────────────────────────────────────────────────────

    def expect(self, key: str, ids: bytes, salt: bytes) -> None:
        """A turn whose context begins with these tokens will come: bring what is saved of it to memory, and keep it there."""
        with self._cache_may_fail("expect"):
            self._prefetch.expect(key, np.frombuffer(ids, "<u4"), salt)

    def unexpect(self, key: str) -> None:
        self._prefetch.cancel(key)

    # ── between steps ────────────────────────────────────────────────────────────────────────────────────────────

    def chore(self) -> bool:
        """Go on copying what should leave the engine's pools, or be elsewhere too, by a bounded piece. False: nothing is to be
        done. May be called in a step, while the device computes."""
        limit = BUSY_PIECE_BYTES if self._engine.has_work else IDLE_PIECE_BYTES
        with self._cache_may_fail("move"):
            moved = self._cache.move(limit, short=is_short(self._engine.room))
            return self._cache.trim() or moved
        return False

    def drain(self, limit_s: float, *, everything: bool) -> bool:
        """At the end: copy what should outlive the process out of the pools, for about `limit_s` seconds. True: all of it.

        everything: all that is there, not only what was chosen to.
        """
        until = time.monotonic() + limit_s
        with self._cache_may_fail("drain"):
            if everything:
                self._cache.want_all()
            while self._cache.move(IDLE_PIECE_BYTES, short=False):
                if time.monotonic() > until:
                    return False
                self._engine.settle()
            return True
        return False

    def _reclaim(self, pages: int) -> int:
        """The engine needs so many pages or rows now; how many holds were released for it."""
        with self._cache_may_fail("reclaim"):
            return self._cache.make_device_room(pages * self._engine.room.page_bytes)
        return 0

    # ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────

    def checkpoints(self, session: str) -> tuple[CheckpointRow, ...]:
        with self._cache_may_fail("list"):
            return cache_lists.checkpoint_rows(self._cache, session)
        return ()

    def pin(self, session: str, checkpoint: str, pinned: bool) -> bool:
        """Pin or release one of a session's checkpoints; "" is the deepest, or every one to release. False: none such."""
        with self._cache_may_fail("pin"):
            return cache_lists.pin(self._cache, session, checkpoint, pinned)
        return False

    def tiers(self) -> tuple[TierRow, ...]:
        with self._cache_may_fail("stats"):
            return cache_lists.tier_rows(self._cache)
        return ()

    def budgets_changed(self) -> None:
        self._saves = self._has_room()
        self._learned.go_on_with(self._cache.policy)

    def _has_room(self) -> bool:
        return any(tier.budget_bytes for name, tier in self._cache.stats().tiers.items() if name != "device")

    def forget(self, session: str) -> None:
        with self._cache_may_fail("forget"):
            self._cache.forget(session)

    def figures(self) -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
        """(bytes by tier, checkpoints by tier, counters) for a load report."""
        own: dict[str, float] = {
            "pins": self.pins,
            "cache_errors": self.cache_errors,
            "release_errors": self.release_errors,
            "restores_not_worth": self.not_worth,
        }
        with self._cache_may_fail("stats"):
            sizes, counts, counters = cache_lists.figures(self._cache)
            return sizes, counts, own | counters
        return {}, {}, own

    @contextmanager
    def _cache_may_fail(self, what: str) -> Iterator[None]:
        """The one place where any error is swallowed: without the cache a turn is slower, never wrong."""
        try:
            yield
        except Exception:
            self.cache_errors += 1
            log.warning("state cache failed in=%s", what, exc_info=True)


def _found(match: Match) -> Found:
    divergence = match.divergence.position if match.divergence.cause != "none" else None
    return Found(match.position, match.tier, match.kind, divergence, match.divergence.cause)
