"""A server in virtual time, for studying who goes first: steps, chunks, rows and pauses as the engine has them, without tokens.

The policy is a function of claims (engine/scheduler/order.py is one); everything is an integer, so the same seed gives the same
figures on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.load.machines import Machine
from benchmarks.load.recorded import Job
from engine.scheduler.growth import to_pause
from engine.scheduler.order import GRACE_US, Claim, order, pressed
from engine.scheduler.pace import LEAST_CHUNK, Work, chunk_now, chunk_sizes, pairs
from engine.scheduler.scheduler import RESUME_US

Policy = Callable[[Sequence[Claim], int], list[int]]


def fifo(claims: Sequence[Claim], now: int) -> list[int]:
    """In order of arrival."""
    return sorted(range(len(claims)), key=lambda i: claims[i].arrival)


def by_deadline(claims: Sequence[Claim], now: int) -> list[int]:
    """Earliest deadline first."""
    return sorted(range(len(claims)), key=lambda i: (claims[i].due, claims[i].arrival))


def cheapest(claims: Sequence[Claim], now: int) -> list[int]:
    """Least left to compute first; long ones may starve."""
    return sorted(range(len(claims)), key=lambda i: (claims[i].cost, claims[i].arrival))


POLICIES: dict[str, Policy] = {"fifo": fifo, "deadline": by_deadline, "cheapest": cheapest, "slack": order}


@dataclass(slots=True)
class _Turn:
    job: Job
    number: int
    due: int
    done: int = 0
    produced: int = 0
    let_in_at: int = 0
    paused_at: int = 0
    restored: bool = False


@dataclass(slots=True)
class Outcome:
    """Of one job: µs from arrival to the first token and to the last; what the first takes alone; whether it was on time."""

    ttft: int = 0
    lone: int = 0
    end: int = 0
    met: bool = False


@dataclass(slots=True)
class Figures:
    outcomes: list[Outcome]
    busy_us: int = 0
    span_us: int = 0
    pauses: int = 0
    gaps: list[int] = field(default_factory=list)
    """µs of each step that had rows and prefill."""

    @property
    def missed(self) -> float:
        """Share of turns that were late."""
        return sum(not outcome.met for outcome in self.outcomes) / len(self.outcomes)


def lone_ttft_us(job: Job, machine: Machine) -> int:
    """First token of a job that has the machine to itself."""
    total = machine.restore_us(job.restored, "ram" if job.ram else "disk")
    at, end = job.restored, job.restored + job.suffix
    while at < end:
        to = min(end, (at // machine.chunk + 1) * machine.chunk)
        total += machine.step_us(Work(prefill=to - at, pairs=pairs(at, to)))
        at = to
    return total


def simulate(jobs: Sequence[Job], machine: Machine, policy: Policy, *, gap_us: int = 0, pause: bool = True) -> Figures:
    """Run the jobs to the end. Deadlines are three times the lone TTFT and a quarter of a second.

    gap_us: as the engine's decode gap, 0 = whole chunks. pause: whether a pressing turn may take a row from another.
    """
    figures = Figures([Outcome(lone=lone_ttft_us(job, machine)) for job in jobs])
    arriving = [
        _Turn(job, i, job.arrival + 3 * outcome.lone + 250_000)
        for i, (job, outcome) in enumerate(zip(jobs, figures.outcomes, strict=True))
    ]
    arriving.reverse()
    waiting: list[_Turn] = []
    running: list[_Turn] = []
    sizes = chunk_sizes(machine.chunk, LEAST_CHUNK)
    now = arriving[-1].job.arrival if arriving else 0
    began = now

    def claim(turn: _Turn) -> Claim:
        job = turn.job
        if turn.produced:
            return Claim(turn.paused_at + RESUME_US - GRACE_US, 0, str(job.session), 0, turn.number)
        left = job.suffix - turn.done
        steps = -(-left // machine.chunk)
        cost = steps * machine.pass_us + left * machine.token_ns // 1000
        start = job.restored + turn.done
        cost += pairs(start, start + left) * machine.pair_ps // 1_000_000
        return Claim(turn.due, cost, str(job.session), 0, turn.number)

    def ordered(turns: list[_Turn]) -> list[_Turn]:
        return [turns[i] for i in policy([claim(t) for t in turns], now)] if len(turns) > 1 else turns

    def make_row(turn: _Turn) -> bool:
        if not pause or not pressed(claim(turn), now):
            return False
        prompts = [t for t in running if not t.produced]
        easy = [t for t in ordered(prompts) if not pressed(claim(t), now)]
        if easy:
            victim = easy[-1]
        else:
            index = to_pause([t.produced - t.let_in_at if t.produced else None for t in running])
            if index is None:
                return False
            victim = running[index]
        running.remove(victim)
        victim.paused_at = now
        waiting.append(victim)
        figures.pauses += 1
        return True

    while arriving or waiting or running:
        while arriving and arriving[-1].job.arrival <= now:
            waiting.append(arriving.pop())
        if not waiting and not running:
            now = arriving[-1].job.arrival
            continue
        restore = 0
        waiting = ordered(waiting)
        while waiting and (len(running) < machine.rows or make_row(waiting[0])):
            turn = waiting.pop(0)
            if not turn.restored:
                turn.restored = True
                restore += machine.restore_us(turn.job.restored, "ram" if turn.job.ram else "disk")
            turn.let_in_at = turn.produced
            running.append(turn)
        decoding = [t for t in running if t.produced]
        prompts = ordered([t for t in running if not t.produced])
        chosen: list[tuple[_Turn, int]] = []
        rows, context = len(decoding), sum(t.job.restored + t.job.suffix + t.produced for t in decoding)
        if prompts:

            def slice_of(turn: _Turn, size: int) -> tuple[int, int]:
                at = turn.job.restored + turn.done
                return at, min(turn.job.restored + turn.job.suffix, (at // size + 1) * size)

            start = max(turn.job.restored + turn.done for turn in prompts)
            costs = [claim(turn).cost for turn in (*prompts, *waiting) if not turn.produced]
            size = chunk_now(machine.step_us, sizes, gap_us, rows, context, start, costs, pressed(claim(prompts[0]), now))
            budget = size
            for turn in prompts:
                at, to = slice_of(turn, size)
                if not chosen or to - at <= budget:
                    chosen.append((turn, to - at))
                    budget -= to - at
        prefill = sum(tokens for _, tokens in chosen)
        back = sum(pairs(t.job.restored + t.done, t.job.restored + t.done + n) for t, n in chosen)
        step = machine.step_us(Work(rows, context, prefill, back)) + restore
        if rows and prefill:
            figures.gaps.append(step)
        steps = 1
        if not prefill and not restore:
            # Nothing changes until an answer ends or somebody comes: take the steps together.
            steps = min(t.job.output - t.produced for t in decoding)
            if arriving:
                steps = min(steps, max(1, -(-(arriving[-1].job.arrival - now) // max(1, step))))
            if waiting:
                steps = 1
        now += step * steps
        figures.busy_us += step * steps
        for turn in decoding:
            turn.produced += steps
        for turn, tokens in chosen:
            turn.done += tokens
            if turn.done == turn.job.suffix:
                turn.produced = 1
                outcome = figures.outcomes[turn.number]
                outcome.ttft = now - turn.job.arrival
                outcome.met = now <= turn.due
        for turn in [t for t in running if t.produced >= t.job.output]:
            running.remove(turn)
            figures.outcomes[turn.number].end = now - turn.job.arrival
    figures.span_us = now - began
    return figures
