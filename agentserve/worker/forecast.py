"""When a turn's first token will come: what goes before it, its restore, its suffix, its first step. Learned while turns run.

What steps cost is learned by engine.scheduler.pace from the loop's own clock, copies of states included; how far predictions
are off corrects the next ones (correction.py): to what is as often too much as too little, and, for alarms, to what few turns
pass. Times are µs. `Learned` keeps it all for the next process, since a restart should not predict blindly.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from agentserve.deadlines import DEFAULT_DEADLINE_MS, blend
from agentserve.worker.correction import Correction, Expected
from agentserve.worker.turns import TurnRecord
from engine.scheduler.order import Claim, Service, order, pressed
from engine.scheduler.pace import LEAST_CHUNK, Pace, Work, chunk_now, chunk_sizes, pairs
from engine.types import EngineEvent, PrefillProgress, TokenEvent

log = logging.getLogger(__name__)
USUAL, CAUTIOUS = 50, 75
"""Percent of turns that come no later than what is told of them, and than what they are warned by."""
MOST_STEPS = 48
"""Played ahead in a prediction; what lies beyond them is summed up."""
LOOK_EVERY = 8
"""Played steps after which the chunk is chosen anew, as the engine does before each."""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """pace: as Pace.known() gives it. usual, cautious: corrections, permille for each size of predictions, () = none.
    load_ps_per_byte: of restores between steps."""

    pace: tuple[int, ...] = ()
    usual: tuple[int, ...] = ()
    cautious: tuple[int, ...] = ()
    load_ps_per_byte: int = 0


class Forecast:
    """Predictions for one engine.

    chunk: prompt tokens per step. gap_us: the engine's decode gap, 0 = none.
    turns: how many first tokens were compared with what was predicted.
    """

    def __init__(self, chunk: int = 512, learned: Learned | None = None, gap_us: int = 0) -> None:
        self._chunk = chunk
        self._gap_us = gap_us
        self._sizes = chunk_sizes(chunk, min(LEAST_CHUNK, chunk))
        self._pace = Pace()
        self._service = Service()
        self._usual, self._cautious = Correction(USUAL), Correction(CAUTIOUS)
        self._load_ps = 0
        self.turns = 0
        self.error_permille = 0
        """Absolute error of predictions at acceptance over what it was, averaged over about the last twenty turns."""
        if learned is not None:
            self._recall(learned)

    def _recall(self, learned: Learned) -> None:
        self._pace.recall(learned.pace)
        self._usual, self._cautious = Correction(USUAL, learned.usual), Correction(CAUTIOUS, learned.cautious)
        self._load_ps = learned.load_ps_per_byte

    def learned(self) -> Learned:
        return Learned(
            pace=tuple(self._pace.known()),
            usual=tuple(self._usual.known),
            cautious=tuple(self._cautious.known),
            load_ps_per_byte=self._load_ps,
        )

    # ── what happened ────────────────────────────────────────────────────────────────────────────────────────────

    def stepped(self, before: dict[str, int], turns: dict[str, TurnRecord], events: Iterable[EngineEvent], us: int) -> None:
        """A step took `us`. before: prompt tokens that each turn had in its state, of those that had no first token."""
        rows = context = prefill = back = 0
        self._service.ahead({owner(turns[turn_id]) for turn_id in before if turn_id in turns})
        for event in events:
            if isinstance(event, PrefillProgress):
                start = before.get(event.request_id, event.processed)
                tokens = event.processed - start
                prefill += tokens
                back += pairs(start, event.processed)
                if (turn := turns.get(event.request_id)) is not None:
                    self._service.charge(owner(turn), self._pace.prefill_us(start, tokens, self._chunk))
            elif isinstance(event, TokenEvent) and event.index > 0:
                rows += 1
                turn = turns.get(event.request_id)
                context += len(turn.ids) + event.index if turn is not None else 0
        self._pace.observe(Work(rows, context, prefill, back), us)

    def first_token(self, turn: TurnRecord, now_us: int) -> None:
        """Compare what was predicted when the turn began with what came."""
        expected = turn.predicted
        if expected is None:
            return
        actual = max(1, now_us - turn.begun_us)
        self._usual.came(expected.raw, actual)
        self._cautious.came(expected.raw, actual)
        error = min(10_000, abs(expected.usual - actual) * 1000 // actual)
        self.turns += 1
        self.error_permille = error if self.turns == 1 else (self.error_permille * 19 + error) // 20
        if turn.restore_bytes and expected.alone and turn.loading_us is not None:
            self._load_ps = blend(max(1, self._load_ps), turn.loading_us * 1_000_000 // turn.restore_bytes, 200)

    # ── what will happen ─────────────────────────────────────────────────────────────────────────────────────────

    def remaining(self, turn: TurnRecord, turns: Sequence[TurnRecord], now_us: int) -> Expected:
        """How long from now to the turn's first token. turns: all, in order of arrival, this one among them."""
        waiting = [t for t in turns if t.first_token_at is None and not t.cancelled]
        decoding = [t for t in turns if t.first_token_at is not None]
        rows, context = len(decoding), sum(len(t.ids) + len(t.generated) for t in decoding)
        us = self._steps_until(turn, waiting, rows, context, now_us)
        if turn.processed == turn.reused:
            us += turn.restore_bytes * self._load_ps // 1_000_000
        return Expected(self._usual.of(us), self._cautious.of(us), us, alone=len(waiting) == 1 and not rows)

    def _steps_until(self, turn: TurnRecord, waiting: Sequence[TurnRecord], rows: int, context: int, now_us: int) -> int:
        """Play the next steps as the engine will: who goes first changes as deadlines come nearer."""
        pace = self._pace
        jobs = [_Job(t, pace.prefill_us(t.processed, t.unprefilled, self._chunk)) for t in waiting]
        mine = next((job for job in jobs if job.turn is turn), None)
        if mine is None:
            return 0
        at, ahead = now_us, self._service.ahead({job.owner for job in jobs})
        chunk, ended = self._chunk, list[_Job]()
        for number in range(MOST_STEPS):
            claims = [job.claim(i) for i, job in enumerate(jobs)]
            line = order(claims, at, ahead)
            if ended or number % LOOK_EVERY == 0:
                start, presses = max(job.done for job in jobs), pressed(claims[line[0]], at)
                costs = [job.cost for job in jobs]
                chunk = chunk_now(pace.step_us, self._sizes, self._gap_us, rows, context, start, costs, presses)
            budget, back, prefill, ended = chunk, 0, 0, []
            for index in line:
                job = jobs[index]
                take = min(job.left, chunk - job.done % chunk)
                if prefill and take > budget:
                    continue
                budget -= take
                prefill += take
                back += pairs(job.done, job.done + take)
                ahead[job.owner] += job.advance(take)
                if not job.left:
                    ended.append(job)
                if budget <= 0:
                    break
            # A whole prompt that was restored needs no pass of its own, only its turn.
            at += pace.step_us(Work(rows, context, prefill, back)) if prefill or rows else 0
            if not mine.left:
                return at - now_us
            for job in ended:
                jobs.remove(job)
                rows, context = rows + 1, context + job.done
        line = order([job.claim(i) for i, job in enumerate(jobs)], at, ahead)
        before = line[: line.index(jobs.index(mine)) + 1]
        return at - now_us + pace.prompts_us([(jobs[i].done, jobs[i].left) for i in before], chunk, rows, context)


class _Job:
    """A turn that waits, as the played steps change it."""

    __slots__ = ("_each", "cost", "done", "due", "left", "owner", "share", "turn")

    def __init__(self, turn: TurnRecord, cost: int) -> None:
        self.turn = turn
        self.cost = cost
        self.done = turn.processed
        self.left = turn.unprefilled
        self.due = due_us(turn)
        self.share = share(turn)
        self.owner = owner(turn)
        self._each = cost / max(1, self.left)

    def claim(self, arrival: int) -> Claim:
        return Claim(self.due, self.cost, self.share, self.turn.start.priority, arrival, self.owner)

    def advance(self, tokens: int) -> int:
        """Returns what these tokens cost."""
        before = self.cost
        self.done += tokens
        self.left -= tokens
        self.cost = int(self.left * self._each)
        return before - self.cost


def due_us(turn: TurnRecord) -> int:
    """The turn's deadline on the clock that both processes share."""
    deadline_s = turn.start.deadline_s
    if deadline_s is None:
        deadline_s = DEFAULT_DEADLINE_MS / 1000
    return round((turn.start.accepted_at + deadline_s) * 1e6)


def share(turn: TurnRecord) -> str:
    """Who a turn is counted to: its session, so that an agent's many lanes and sub-agents have together what one has alone."""
    return turn.start.session


def owner(turn: TurnRecord) -> str:
    """Whose session that is: the principal, whose many sessions have together what another's one has."""
    return turn.start.salt.hex()


# ── kept over restarts ───────────────────────────────────────────────────────────────────────────────────────────────


def learned_file(state_dir: Path, namespace: bytes, threads: int) -> Path:
    """Where it is kept for one model on one machine: another processor, or another number of threads, begins anew."""
    machine = f"{platform.machine()} {platform.processor()} {_cpu()} {os.cpu_count()} {threads}"
    name = hashlib.sha256(namespace + machine.encode()).hexdigest()[:24]
    return state_dir / "pace" / f"{name}.json"


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return ""


def load_learned(path: Path) -> Learned | None:
    """None if there is nothing, or nothing that can be used: it is only ever a better beginning."""
    try:
        learned = msgspec.json.decode(path.read_bytes(), type=Learned)
        Pace().recall(learned.pace)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        log.warning("learned pace not used error=%s", error)
        return None
    return learned


def save_learned(path: Path, learned: Learned) -> None:
    """Written beside and renamed; a full disk costs nothing but the next beginning."""
    try:
        path.parent.mkdir(exist_ok=True)  # not what it lies in: whoever took that away may put it back
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_bytes(msgspec.json.encode(learned))
        beside.replace(path)
    except OSError as error:
        log.warning("learned pace not kept error=%s", error)
