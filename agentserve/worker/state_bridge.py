"""Between engine and state cache: match → restore → cuts → save. The only module that sees both packages.

turn_loop.py calls it at the moments of a turn's life. Rules kept here:
- a cache that fails (read error, full budget) makes a turn slower and never fails it;
- a checkpoint is pinned while it is read; a held state belongs to the cache from save() on, which leaves it where it is until
  its pages are needed or it is to outlive the process; what the cache does not take is given back, whatever raised;
- what a turn saved before its first finite logits is taken away again when it ends in NaN.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from agentserve.worker import cache_lists
from agentserve.worker.flights import Flight, join
from agentserve.worker.messages import CheckpointRow, Saved, TierRow
from agentserve.worker.pools import EnginePools, is_short
from agentserve.worker.ports import EnginePort
from agentserve.worker.turns import Found, TurnRecord
from engine.errors import EngineError
from engine.types import CutReached, HoldId, KvRun, StateSnapshot
from statecache.boundary import GeneratedBoundaries, prompt_cuts, thinking_is_open
from statecache.checkpoint import PutResult
from statecache.experience import Experience
from statecache.match import Match
from statecache.policy import better_kind, worth_disk
from statecache.prefetch import EXPECTED_S, Prefetcher
from statecache.reader import Reader, Reading
from statecache.store import StateCache
from statecache.types import Boundary, BoundaryKind, Payload

log = logging.getLogger(__name__)
SESSIONS_FOLLOWED = 4096
CALLS = (BoundaryKind.CALL_OPEN, BoundaryKind.CALL_CLOSE)
BUSY_PIECE_BYTES = 4 << 20
IDLE_PIECE_BYTES = 32 << 20
"""Copied from the engine's pools between two steps, and at once while nothing runs."""
NOTHING = Found(0, None, None, 0, "cold")


@dataclass
class _Kept:
    """What is to be saved, and was, of one turn.

    cuts: boundary by position, of all that are asked for. saved: kind by position, of those that the cache has.
    placed: ids of the same.
    parted_at: tokens that the prompt shares with a saved context which goes on otherwise, 0 if there is none.
    unproven: ids of checkpoints placed since logits were last seen to be finite. deepest: position of the deepest new one.
    """

    scanner: GeneratedBoundaries | None
    parted_at: int = 0
    cuts: dict[int, Boundary] = field(default_factory=dict)
    saved: dict[int, BoundaryKind] = field(default_factory=dict)
    placed: dict[int, str] = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)
    deepest: int = 0


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
        self._kept: dict[str, _Kept] = {}
        self._experience = Experience(cache.policy)
        self._ends: OrderedDict[str, int] = OrderedDict()
        """Tokens of each session's last prompt, of the newest sessions."""
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
        markers = turn.start.markers
        scanner = None
        if turn.start.generate:
            scanner = GeneratedBoundaries(markers, len(turn.ids), thinking=thinking_is_open(turn.ids, markers))
        self._kept[turn.id] = _Kept(scanner)
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
        if match.divergence.cause == "tokens":
            self._kept[turn.id].parted_at = match.divergence.position
            self._learn(turn, match.divergence.position)
        if match.resident is not None:
            return _found(match), HoldId(match.resident.hold)
        if payload is None or payload.position == 0:
            return _found(match), None
        runs = tuple(KvRun(run.start, run.rows) for run in payload.kv)
        return _found(match), StateSnapshot(payload.position, runs, payload.state, payload.logits)

    def plan_cuts(self, turn: TurnRecord, after: int) -> tuple[int, ...]:
        """Prompt positions where the state must be held, rising; a checkpoint at `after` is restored.

        Raises ValueError if the server named a boundary outside of the prompt.
        """
        boundaries = [Boundary(cut.position, cut.kind, cut.item) for cut in turn.start.cuts]
        kept = self._kept[turn.id]
        policy = self._experience.policy(turn.start.salt)
        cuts = prompt_cuts(boundaries, len(turn.ids), policy, after=after, parted_at=kept.parted_at)
        if turn.start.session:
            self._ends[turn.start.session] = len(turn.ids)
            self._ends.move_to_end(turn.start.session)
            if len(self._ends) > SESSIONS_FOLLOWED:
                self._ends.popitem(last=False)
        kept.cuts = {cut.position: cut for cut in cuts}
        return tuple(cut.position for cut in cuts)

    def _learn(self, turn: TurnRecord, parted_at: int) -> None:
        """Remember how far before its session's last prompt end this context parts from what is saved."""
        self._experience.saw(turn.start.salt, self._ends.get(turn.start.session, 0) - parted_at)

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
        """Look for a boundary at the newest token and ask the engine to hold the state there."""
        kept = self._kept[turn.id]
        # A token was sampled, so its logits were finite, and so was all that they were computed from.
        kept.unproven.clear()
        boundary = None if kept.scanner is None else kept.scanner.push(token)
        if boundary is None:
            return
        position, known = boundary.position, kept.cuts.get(boundary.position)
        if known is None or better_kind(known.kind, boundary.kind) is not known.kind:
            kept.cuts[position] = boundary
        if known is not None or boundary.kind is BoundaryKind.TURN:
            return  # saved or declared already; the end of the turn is held by the engine itself
        try:
            self._engine.declare_cut(turn.id, position)
        except EngineError as error:
            # Best effort: a recurrent state that has moved on is gone.
            log.debug("cut not taken turn=%s position=%d error=%s", turn.id, position, error)

    def save(self, turn: TurnRecord, cut: CutReached) -> Saved | None:
        """Give the held state to the cache, or back to the engine. The hold is not the caller's any more, whatever happens."""
        taken = False
        try:
            boundary = self._boundary_of(turn, cut.position)
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
                )
                taken = True
                return self._saved(turn, boundary, result)
            return None
        finally:
            if not taken:
                self.release(cut.hold)

    def _boundary_of(self, turn: TurnRecord, position: int) -> Boundary | None:
        """What is to be saved there; None if the cache has it under a kind as good."""
        kept = self._kept[turn.id]
        boundary = kept.cuts.get(position)
        if boundary is None:
            boundary = Boundary(position, BoundaryKind.PARTIAL if turn.cancelled else BoundaryKind.TURN)
        saved = kept.saved.get(position)
        return None if saved is not None and better_kind(saved, boundary.kind) is saved else boundary

    def _saved(self, turn: TurnRecord, boundary: Boundary, result: PutResult) -> Saved | None:
        kept, position = self._kept[turn.id], boundary.position
        if result.checkpoint_id is None:
            log.debug("checkpoint not kept turn=%s position=%d reason=%s", turn.id, position, result.reason)
            return None
        kept.saved[position] = boundary.kind
        kept.placed[position] = result.checkpoint_id
        if not result.existed:
            kept.unproven.append(result.checkpoint_id)
            # Rows below were there, or came with an earlier checkpoint of this turn.
            turn.written += max(0, position - max(result.known_tokens, turn.reused, kept.deepest))
            kept.deepest = max(kept.deepest, position)
        tier, nbytes = result.tier or "device", result.written_bytes
        return Saved(turn_id=turn.id, position=position, kind=boundary.kind, tier=tier, written_bytes=nbytes)

    def release(self, hold: HoldId) -> None:
        try:
            self._engine.release(hold)
        except EngineError:
            self.release_errors += 1
            log.exception("hold was not released hold=%d", hold)

    # ── at its end ───────────────────────────────────────────────────────────────────────────────────────────────

    def spoiled(self, turn: TurnRecord) -> None:
        """The turn ended in NaN: take back what it saved and nothing has proved good."""
        kept = self._kept.get(turn.id)
        for checkpoint_id in kept.unproven if kept is not None else ():
            with self._cache_may_fail("evict"):
                self._cache.evict(checkpoint_id)

    def close(self, turn: TurnRecord) -> None:
        kept = self._kept.pop(turn.id, None)
        if kept is None or not kept.placed:
            return
        with self._cache_may_fail("keep"):
            placed = [Boundary(position, kind) for position, kind in kept.saved.items()]
            self._keep([kept.placed[b.position] for b in worth_disk(placed, self._cache.policy)])
            self._cache.settle(kept.placed.values())
            if any(b.kind in CALLS for b in kept.cuts.values() if b.position >= len(turn.ids)):
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
        """Copy a bounded piece of what should leave the engine's pools, or be elsewhere too. False: there is nothing to do."""
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
        self._experience.go_on_with(self._cache.policy)

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
