"""The load of `agents` in virtual time, behind the worker's own turn loop: first tokens, deadlines, predictions and warnings.

    python -m benchmarks.load foretold [--machine small] [--load 0.5] [--spread 0.12] [--turns 400] [--seeds 1 2 3] [--record]

The phases are those of agents.py: one agent alone teaches what steps cost, all of them show what the machine can do, then the
same turns come at random times at a share of that.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.common import report
from benchmarks.load.goals import Goal, judge, of_turns
from benchmarks.load.lab import show, work
from benchmarks.load.lone import CONTEXTS, sizes_behind
from benchmarks.load.machines import MACHINES
from benchmarks.load.policies import tails
from benchmarks.load.recorded import Deck, Turn
from benchmarks.load.timed import UnsteadyClock
from benchmarks.load.virtual import VOCAB, Agent, Lab, Played, figures

BEGIN = tuple(range(8, 72))
"""All contexts begin with these tokens."""


@dataclass(frozen=True)
class Load:
    """share: of the measured capacity. turns: of the last phase. capacity_s: for how long capacity is measured. longest: tokens
    of a context."""

    agents: int = 16
    share: float = 0.5
    turns: int = 400
    capacity_s: float = 45.0
    longest: int = 24_000
    seed: int = 1


class VirtualAgents:
    """Sessions on one fake worker; deterministic by the load's seed."""

    def __init__(self, lab: Lab, load: Load) -> None:
        self.lab = lab
        self._load = load
        self._rng = random.Random(load.seed)
        self._sessions = 0

    def play(self, turns: Sequence[Turn]) -> tuple[list[Played], dict[str, Any]]:
        """All phases. Returns the turns of the last one, and its figures."""
        load, lab = self._load, self.lab
        self._alone()
        agents = [self._agent() for _ in range(load.agents)]
        for agent in agents:
            self._to_end(agent, self._rng.randrange(16, load.longest - 128), 1)
        capacity, same = self._capacity(agents, turns)
        began_s, busy_s = lab.clock.now_s(), self._busy_s()
        played = self._open(agents, same, capacity * load.share)
        return played, {
            **of(played),
            "capacity_turns_per_s": round(capacity, 3),
            "busy": round((self._busy_s() - busy_s) / (lab.clock.now_s() - began_s), 3),
        }

    def _alone(self) -> None:
        for place in range(CONTEXTS):
            behind = max(len(BEGIN), self._load.longest * place // CONTEXTS)
            for size in sizes_behind(behind, self._load.longest - 4):
                agent = self._agent()
                if behind > len(BEGIN):
                    self._to_end(agent, behind - len(BEGIN), 1)
                self._to_end(agent, size, 4)

    def _capacity(self, agents: Sequence[Agent], turns: Sequence[Turn]) -> tuple[float, list[Turn]]:
        """Turns per second when every agent asks again as soon as it has its answer, and which turns."""
        clock, deck = self.lab.clock, Deck(turns, self._rng)
        began_s = clock.now_s()
        until_s = began_s + self._load.capacity_s
        while clock.now_s() < until_s or self.lab.loop.running:
            for agent in agents:
                if not agent.busy and clock.now_s() < until_s:
                    self._ask(agent, deck.draw(), clock.ns // 1000)
            self.lab.step()
        return len(deck.drawn) / (clock.now_s() - began_s), deck.drawn

    def _open(self, agents: Sequence[Agent], turns: Sequence[Turn], per_second: float) -> list[Played]:
        """Turns at Poisson times, of a session that is free; if none is, another one joins."""
        clock, ready, played, deck = self.lab.clock, list(agents), list[Played](), Deck(turns, self._rng)
        at_us, told_s = clock.ns // 1000, clock.now_s()

        def later(us: int) -> int:
            return us + round(self._rng.expovariate(per_second) * 1e6)

        at_us = later(at_us)
        while len(played) < self._load.turns or self.lab.loop.running:
            while len(played) < self._load.turns and at_us <= clock.ns // 1000:
                free = [agent for agent in ready if not agent.busy] or [self._agent()]
                agent = self._rng.choice(free)
                if agent not in ready:
                    ready.append(agent)
                played.append(self._ask(agent, deck.draw(), at_us))
                at_us = later(at_us)
            if not self.lab.engine.has_work:
                clock.until(at_us)
                continue
            self.lab.step()
            if clock.now_s() - told_s > 1:
                self.lab.loop.tick()
                told_s = clock.now_s()
        return played

    def _agent(self) -> Agent:
        self._sessions += 1
        return Agent(f"agent{self._sessions}", [], list(BEGIN))

    def _ask(self, agent: Agent, turn: Turn, at_us: int) -> Played:
        if len(agent.ids) + turn.suffix + turn.output > self._load.longest:
            del agent.ids[len(BEGIN) :]
        agent.ids.extend(self._rng.randrange(8, VOCAB) for _ in range(turn.suffix))
        return self.lab.begin(agent, turn.output, at_us)

    def _to_end(self, agent: Agent, suffix: int, output: int) -> None:
        self._ask(agent, Turn(0, 0, suffix, output), self.lab.clock.ns // 1000)
        while self.lab.loop.running:
            self.lab.step()

    def _busy_s(self) -> float:
        stats = self.lab.engine.stats()
        return stats.prefill_seconds + stats.decode_seconds


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.load foretold", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", default="small", choices=sorted(MACHINES))
    parser.add_argument("--load", type=float, default=0.5, help="share of the measured capacity")
    parser.add_argument("--spread", type=float, default=0.12, help="standard deviation of what steps take, relative")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args(arguments)
    machine, console = MACHINES[options.machine], Console(width=140)
    turns, found = list[Played](), dict[str, Any]()
    for seed in options.seeds:
        lab = Lab(machine, clock=UnsteadyClock(options.spread, seed))
        load = Load(agents=options.agents, share=options.load, turns=options.turns, seed=seed)
        played, found[f"seed {seed}"] = VirtualAgents(lab, load).play(work())
        lab.engine.check()
        turns += played
    found = {**of(turns), **found}
    show(console, f"{options.agents} agents at {options.load:.0%} of capacity, {machine.name}, virtual time", found)
    goals = [Goal("deadlines met", round(1 - found["missed"], 4), 0.99, least=True), *of_turns(found)]
    found["goals"] = judge(console, goals)
    workload = {key: value for key, value in vars(options).items() if key not in ("machine", "record")}
    report("load_foretold", f"virtual {machine.name}", workload, found, options.record)


def of(played: Sequence[Played]) -> dict[str, Any]:
    """own_stretch: TTFT ÷ what the turn takes alone."""
    stretch = sorted((turn.ttft or 0.0) / turn.lone for turn in played)
    return {**figures(played), "own_stretch": tails(stretch)}
