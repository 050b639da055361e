"""Recorded agents on the fake engine in virtual time, behind the worker's own turn loop and a real state cache.

Everything from "a turn starts" to "its checkpoint is saved" is the code that serves. Each agent waits for its answer, pauses as
recorded, and comes back with its context, the answer and something new.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from agentserve.deadlines import DeadlineStatus, DeadlineTracker
from agentserve.worker.forecast import Forecast
from agentserve.worker.messages import FromWorker, Matched, Progress, Sampling, StartTurn, Tokens, TurnFailed, TurnFinished
from agentserve.worker.naming import namespace_of
from agentserve.worker.state_bridge import StateBridge
from agentserve.worker.turn_loop import TurnLoop
from benchmarks.common import report
from benchmarks.load.goals import judge, of_turns
from benchmarks.load.lab import show
from benchmarks.load.lone import deadline_s
from benchmarks.load.machines import MACHINES, Machine
from benchmarks.load.policies import at
from benchmarks.load.recorded import Turn, recorded_sessions
from benchmarks.load.timed import TimedEngine, VirtualClock, timed_engine
from engine.scheduler.pace import Work, pairs
from statecache.durable import open_states
from statecache.types import MarkerTable

VOCAB, END = 512, 1
MARKERS = MarkerTable(turn_end=(END,))


@dataclass
class Agent:
    """One session under way. ids: its context. turns: what is still to come, the next one last. busy: while a turn runs."""

    name: str
    turns: list[Turn]
    ids: list[int]
    busy: bool = False


@dataclass
class Played:
    """Of one turn, all in seconds: first token as predicted at its start, as it came, and alone; gaps between its tokens."""

    asked_at: float
    agent: Agent
    prompt: int
    restored: int = 0
    predicted: float | None = None
    ttft: float | None = None
    lone: float = 0.0
    answer: list[int] = field(default_factory=list)
    last_token_at: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tracker: DeadlineTracker = field(default_factory=DeadlineTracker)
    warned_after: float | None = None
    failed: str | None = None


class Lab:
    """One fake worker in this process. ram_bytes: of saved states at their small size. clock: where steps take their time."""

    def __init__(
        self,
        machine: Machine,
        *,
        clock: VirtualClock | None = None,
        kv_tokens: int = 1 << 19,
        ram_bytes: int = 256 << 20,
        **settings: Any,
    ) -> None:
        self.machine = machine
        self.clock = clock or VirtualClock()
        words = range(8, VOCAB)
        self.engine: TimedEngine = timed_engine(
            machine, self.clock, vocab_size=VOCAB, end=END, words=words, kv_tokens=kv_tokens, **settings
        )
        # What is given up first depends on what was used when: on the same clock, or each run would give up others.
        namespace, layout = namespace_of(self.engine.info, self.engine.layout)
        self.states = open_states(namespace, layout, ram_bytes, clock=self.clock.now_s)
        self.bridge = StateBridge(self.engine, self.states.cache)
        self.played: dict[str, Played] = {}
        forecast = Forecast(machine.chunk, gap_us=self.engine.config.decode_gap_ms * 1000)
        self.loop = TurnLoop(self.engine, self.bridge, self._take, forecast=forecast, clock=self.clock.now_s)
        self._ended: list[str] = []

    def _take(self, frame: FromWorker) -> None:
        now = self.clock.now_s()
        turn = self.played.get(getattr(frame, "turn_id", ""))
        if turn is None:
            return
        elapsed_ms = int((now - turn.asked_at) * 1000)
        if isinstance(frame, Matched):
            turn.restored = frame.position
            turn.predicted = now - turn.asked_at + frame.predicted_ttft_s
            self._deadline(turn, turn.tracker.foretold(elapsed_ms, frame.predicted_ttft_s, frame.cautious_ttft_s), elapsed_ms)
        elif isinstance(frame, Progress):
            self._deadline(turn, turn.tracker.foretold(elapsed_ms, frame.eta_s, frame.cautious_s), elapsed_ms)
        elif isinstance(frame, Tokens):
            if turn.ttft is None:
                turn.ttft = now - turn.asked_at
                turn.tracker.first_token(elapsed_ms)
            else:
                turn.gaps.append(now - turn.last_token_at)
            turn.last_token_at = now
            turn.answer.extend(frame.ids)
        elif isinstance(frame, TurnFinished | TurnFailed):
            turn.failed = frame.code if isinstance(frame, TurnFailed) else None
            self._ended.append(frame.turn_id)

    def _deadline(self, turn: Played, report: Any, elapsed_ms: int) -> None:
        if report is not None and report.status is DeadlineStatus.AT_RISK and turn.warned_after is None:
            turn.warned_after = elapsed_ms / 1000

    def lone_s(self, restored: int, suffix: int) -> float:
        """First token of such a turn on the idle machine."""
        total = self.machine.restore_us(restored, "ram")
        place, end = restored, restored + suffix
        while place < end:
            to = min(end, (place // self.machine.chunk + 1) * self.machine.chunk)
            total += self.machine.step_us(Work(prefill=to - place, pairs=pairs(place, to)))
            place = to
        return total / 1e6

    def run(self, agents: Sequence[Agent], starts_us: Sequence[int], seed: int = 0) -> list[Played]:
        """Play all agents to the end, each beginning at its time. Returns the turns in order of arrival."""
        rng = random.Random(seed)
        base = self.clock.ns // 1000
        coming = [(base + at_us, number) for number, at_us in enumerate(starts_us)]
        heapq.heapify(coming)
        numbers = {id(agent): number for number, agent in enumerate(agents)}
        while coming or self.loop.running:
            while coming and coming[0][0] <= self.clock.ns // 1000:
                at_us, number = heapq.heappop(coming)
                self._next(agents[number], at_us, rng)
            if not self.engine.has_work:
                if coming:
                    self.clock.until(coming[0][0])
                continue
            for turn in self.step():
                if turn.agent.turns:
                    heapq.heappush(coming, (self.clock.ns // 1000 + turn.agent.turns[-1].pause, numbers[id(turn.agent)]))
        return list(self.played.values())

    def _next(self, agent: Agent, at_us: int, rng: random.Random) -> None:
        wanted = agent.turns.pop()
        # As recorded: the context is cut back to what was restored there (an edit), then grows by the suffix.
        del agent.ids[max(64, min(len(agent.ids), wanted.restored)) :]
        agent.ids.extend(rng.randrange(8, VOCAB) for _ in range(wanted.suffix))
        self.begin(agent, wanted.output, at_us)

    def begin(self, agent: Agent, output: int, at_us: int) -> Played:
        """A turn over the agent's context as it is now. Its deadline follows from what it takes alone."""
        turn_id = f"t{len(self.played)}"
        turn = self.played[turn_id] = Played(at_us / 1e6, agent, len(agent.ids))
        known = self.states.cache.depth(np.array(agent.ids, np.uint32), b"")
        turn.lone = self.lone_s(known, len(agent.ids) - known)
        turn.tracker = DeadlineTracker(round(deadline_s(turn.lone) * 1000))
        agent.busy = True
        self.loop.start(
            StartTurn(
                turn_id=turn_id,
                ids=np.array(agent.ids, "<u4").tobytes(),
                cuts=(),
                markers=MARKERS,
                salt=b"",
                session=agent.name,
                sampling=Sampling(max_tokens=output, temperature=0.0),
                accepted_at=at_us / 1e6,
                deadline_s=turn.tracker.deadline_ms / 1000,
            )
        )
        return turn

    def step(self) -> list[Played]:
        """One step of the engine. Returns the turns that ended with it, whose answers their agents' contexts now have."""
        self.loop.step()
        ended = [self.played[turn_id] for turn_id in self._ended]
        self._ended.clear()
        for turn in ended:
            turn.agent.ids.extend(turn.answer)
            turn.agent.busy = False
        return ended


def make_agents(sessions: Sequence[Sequence[Turn]], count: int, turns: int, seed: int, most_context: int) -> list[Agent]:
    """`count` agents, each a stretch of `turns` turns of a recorded session; all begin with the same 64 tokens."""
    rng = random.Random(seed)
    agents: list[Agent] = []
    while len(agents) < count:
        session = sessions[rng.randrange(len(sessions))]
        first = rng.randrange(max(1, len(session) - turns))
        stretch = [t for t in session[first : first + turns] if t.restored + t.suffix + t.output < most_context]
        if stretch:
            agents.append(Agent(f"agent{len(agents)}", list(reversed(stretch)), list(range(8, 72))))
    return agents


def figures(played: Sequence[Played], skip: int = 0) -> dict[str, Any]:
    """skip: turns at the beginning that only teach. error: of predictions at the start, relative. alarms: of all turns."""
    turns = [t for t in played[skip:] if t.ttft is not None and t.predicted is not None]
    errors = sorted(abs((t.predicted or 0) - (t.ttft or 0)) / max(t.ttft or 0, 1e-3) for t in turns)
    missed = [t for t in turns if t.tracker.status is DeadlineStatus.MISSED]
    warned = [t for t in turns if t.tracker.warned]
    ttft = sorted(t.ttft or 0 for t in turns)
    gaps = sorted(gap for t in turns for gap in t.gaps)
    return {
        "turns": len(turns),
        "missed": round(len(missed) / len(turns), 4),
        "error": {"p50": round(at(errors, 0.5), 3), "p95": round(at(errors, 0.95), 3)},
        "missed_alarms": round(sum(not t.tracker.warned for t in missed) / len(turns), 4),
        "false_alarms": round(sum(t.tracker.status is DeadlineStatus.MET for t in warned) / len(turns), 4),
        "ttft_s": {p: round(at(ttft, q), 3) for p, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))},
        "gap_s": {p: round(at(gaps, q), 4) for p, q in (("p50", 0.5), ("p99", 0.99))} if gaps else None,
        "reused": round(sum(t.restored for t in turns) / sum(t.prompt for t in turns), 4),
    }


def main(arguments: Sequence[str]) -> None:
    """How well first tokens are foretold, and what warnings are worth, in virtual time."""
    parser = argparse.ArgumentParser(prog="benchmarks.load predictions", description=main.__doc__)
    parser.add_argument("--machines", nargs="+", default=("H200", "laptop", "small"), choices=sorted(MACHINES))
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=16, help="of each agent")
    parser.add_argument("--pauses", type=float, default=1.0, help="recorded pauses times this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    sessions = recorded_sessions(100_000)
    short = [[Turn(t.pause, min(t.restored, 8000), min(t.suffix, 8000), min(t.output, 100)) for t in s] for s in sessions]
    for name in options.machines:
        machine = MACHINES[name]
        lab = Lab(machine)
        agents = make_agents(short, options.agents, options.turns, options.seed, 32_000)
        for agent in agents:
            agent.turns = [Turn(round(t.pause * options.pauses), *_sizes(t)) for t in agent.turns]
        began_s = lab.clock.now_s()
        rng = random.Random(options.seed)
        starts = [rng.randrange(round(60e6 * max(0.1, options.pauses))) for _ in agents]
        played = lab.run(agents, starts, options.seed)
        lab.engine.check()
        stats = lab.engine.stats()
        # What the first turns of each agent teach is not counted.
        found = figures(played, skip=2 * options.agents)
        found["busy"] = round((stats.prefill_seconds + stats.decode_seconds) / (lab.clock.now_s() - began_s), 3)
        console = Console(width=110)
        show(console, f"{name}, {options.agents} agents", found)
        found["goals"] = judge(console, of_turns(found))
        workload = {key: value for key, value in vars(options).items() if key not in ("machines", "record")}
        report("load_predictions", f"virtual {name}", workload, found, options.record)


def _sizes(turn: Turn) -> tuple[int, int, int]:
    return turn.restored, turn.suffix, turn.output
