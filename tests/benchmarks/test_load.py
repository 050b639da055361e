"""The load lab: recorded work, the simulator's rules, and what its policies are compared by."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import virtual
from benchmarks.load.crowded import Run, crowd, lone_of, stretches
from benchmarks.load.machines import H200, LAPTOP, MACHINES, SMALL, Machine
from benchmarks.load.policies import load_for, summary
from benchmarks.load.recorded import Deck, Job, Turn, open_loop, recorded_sessions
from benchmarks.load.simulator import POLICIES, fifo, lone_ttft_us, simulate
from benchmarks.load.timed import UnsteadyClock, VirtualClock
from benchmarks.load.virtual_agents import Load, VirtualAgents
from engine.scheduler.order import order
from engine.scheduler.pace import Work

SECOND = 1_000_000


@pytest.fixture(scope="module")
def sessions():
    return recorded_sessions(65_536, limit=20)


def test_a_load_is_the_same_for_the_same_seed_and_another_for_another(sessions) -> None:
    jobs = open_loop(sessions, turns=200, mean_us=SECOND, seed=3)
    assert jobs == open_loop(sessions, turns=200, mean_us=SECOND, seed=3)
    assert jobs != open_loop(sessions, turns=200, mean_us=SECOND, seed=4)
    arrivals = [job.arrival for job in jobs]
    assert arrivals == sorted(arrivals)
    assert 0.8 < arrivals[-1] / (200 * SECOND) < 1.25
    assert all(job.suffix > 0 and job.output > 0 and job.restored + job.suffix <= 65_536 for job in jobs)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), draws=st.integers(0, 30))
def test_a_deck_gives_each_turn_once_before_any_comes_again(sizes: list[int], draws: int) -> None:
    turns = [Turn(0, 0, size, number) for number, size in enumerate(sizes)]
    deck = Deck(turns, random.Random(draws))
    drawn = [deck.draw() for _ in range(draws)]
    assert deck.drawn == drawn
    counts = [drawn.count(turn) for turn in turns]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == draws


@pytest.mark.parametrize("machine", list(MACHINES.values()), ids=str)
def test_more_work_never_takes_less_time(machine: Machine) -> None:
    assert machine.step_us(Work(3, 0, 0, 0)) >= machine.step_us(Work(1, 0, 0, 0))
    for tokens in (1, 64, 300):
        assert machine.step_us(Work(2, 0, tokens, 0)) <= machine.step_us(Work(2, 0, 2 * tokens, 5000))
    assert machine.restore_us(1000, "disk") >= machine.restore_us(1000, "ram") >= machine.restore_us(0, "ram") == 0


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy_serves_everybody_and_alone_a_turn_takes_what_it_takes(sessions, policy) -> None:
    jobs = open_loop(sessions, turns=60, mean_us=SECOND, seed=1)
    figures = simulate(jobs, H200, POLICIES[policy])
    assert all(0 < outcome.lone <= outcome.ttft <= outcome.end for outcome in figures.outcomes)
    assert figures.busy_us <= figures.span_us
    (alone,) = simulate(jobs[:1], H200, POLICIES[policy]).outcomes
    assert alone.ttft == alone.lone == lone_ttft_us(jobs[0], H200)
    assert alone.met


def test_the_simulator_prefills_decodes_and_pauses_as_written_by_hand() -> None:
    machine = Machine("hand", 100, 1000, 0, 10, 1, 1 << 50, 1 << 50, chunk=100, kv_token_bytes=0, state_bytes=0, rows=1)
    long, short = Job(0, 1, 0, 200, 500), Job(2_000, 2, 0, 50, 2)
    figures = simulate([long, short], machine, fifo, pause=False)
    # Two chunks of 100 + 100 µs; 499 further tokens of 10; then the other: 100 + 50, and one token.
    assert [(o.ttft, o.end) for o in figures.outcomes] == [(400, 400 + 4990), (5390 - 2000 + 150, 5390 - 2000 + 160)]
    assert simulate([long, short], machine, order).pauses == 0, "it has a quarter of a second"


def test_ordering_by_slack_misses_at_most_half_of_what_order_of_arrival_misses(sessions) -> None:
    """Virtual time and fixed seeds, at 80% of the time busy: the same figures on any machine."""
    for machine in (H200, LAPTOP):
        jobs, busy = load_for(sessions, machine, turns=250, seed=5, utilisation=0.8)
        assert busy == pytest.approx(0.8, abs=0.02)
        first_come = simulate(jobs, machine, fifo)
        slack = simulate(jobs, machine, order, gap_us=300_000)
        assert first_come.missed > 0.02
        assert slack.missed <= first_come.missed / 2
        assert summary([slack])["missed"] == round(slack.missed, 4)


def test_a_crowd_at_half_of_the_time_is_nearly_always_on_time_and_more_so_than_by_deadline_or_cost_alone() -> None:
    """What `agents` asks of a real server, on a machine like two cores with the demo model."""
    jobs = crowd(SMALL, turns=300, per_second=0.9, seed=8)
    assert {job.session for job in jobs} == set(range(16))
    assert all(job.restored + job.suffix + job.output <= 24_000 for job in jobs)
    runs = {name: simulate(jobs, SMALL, POLICIES[name], gap_us=80_000) for name in ("slack", "deadline", "cheapest")}
    assert 0.4 < runs["slack"].busy_us / runs["slack"].span_us < 0.6
    assert runs["slack"].missed < min(runs["deadline"].missed, runs["cheapest"].missed)
    found = summary([runs["slack"]])
    assert found["missed"] <= 0.01
    assert found["stretch"]["p99"] <= 4
    assert stretches([Run(jobs, runs["slack"])], lone_of(SMALL))[-3] <= 8


def test_rows_pay_for_what_they_look_back_on_and_lone_turns_are_foretold_from_a_few() -> None:
    shallow, deep = (simulate([Job(0, 1, at, 64, 50)], SMALL, fifo).outcomes[0] for at in (0, 16_000))
    assert deep.end - deep.ttft == pytest.approx(shallow.end - shallow.ttft + 49 * 16_000 * SMALL.context_ps / 1e6, rel=0.01)
    lone = lone_of(SMALL)
    for behind, suffix in ((0, 700), (5000, 64), (9000, 3000), (21_000, 1500)):
        own = lone_ttft_us(Job(0, 1, behind, suffix, 1), SMALL) / 1e6
        assert lone.own_s(suffix, behind) == pytest.approx(own, rel=0.05)
    assert lone.own_s(64, 0) < lone.usual_s(64) < lone.own_s(64, 20_000)


def test_agents_in_virtual_time_reuse_their_contexts_and_leave_nothing(sessions) -> None:
    lab = virtual.Lab(SMALL)
    agents = virtual.make_agents(sessions, 4, 6, 1, 16_000)
    for agent in agents:
        agent.turns = [Turn(t.pause, min(t.restored, 4000), min(t.suffix, 1500), min(t.output, 30)) for t in agent.turns]
    expected = sum(len(agent.turns) for agent in agents)
    played = lab.run(agents, [0, 100_000, 200_000, 300_000])
    assert len(played) == expected
    assert all(turn.failed is None and turn.answer for turn in played)
    assert all(turn.ttft >= turn.lone * 0.9 for turn in played if turn.ttft is not None)
    found = virtual.figures(played)
    assert found["reused"] > 0.3
    assert found["turns"] == expected
    lab.engine.check()
    assert (lab.loop.running, lab.bridge.pins, lab.engine.stats().running, lab.engine.stats().waiting) == (0, 0, 0, 0)


def test_an_unsteady_machine_is_slower_or_faster_for_seconds_and_even_on_the_whole() -> None:
    steady, clock = VirtualClock(), UnsteadyClock(0.1, 1)
    took = []
    for _ in range(20_000):
        before = clock.ns
        clock.spend(50_000)
        steady.spend(50_000)
        took.append((clock.ns - before) / 50e6)
    assert clock.ns == pytest.approx(steady.ns, rel=0.03)
    near, far = (sum((a - 1) * (b - 1) for a, b in zip(took, took[gap:], strict=False)) / len(took) for gap in (1, 400))
    assert near > 0.006 > 0.003 > abs(far), "neighbours have a hundredth in common, what lies 20 s apart nothing"
    even = UnsteadyClock(0.0, 1)
    even.spend(50_000)
    assert even.ns == VirtualClock().ns + 50_000_000


def test_a_crowd_behind_the_workers_own_loop_is_on_time_and_foretold_and_leaves_nothing() -> None:
    turns = [Turn(0, 0, suffix, 8) for suffix in (80, 300, 900, 2500)]
    load = Load(agents=4, turns=25, capacity_s=3.0, longest=6000, seed=2)
    lab = virtual.Lab(SMALL, clock=UnsteadyClock(0.05, 2))
    played, found = VirtualAgents(lab, load).play(turns)
    assert found["turns"] == len(played) == 25
    assert 0.3 < found["busy"] < 0.7
    assert found["missed"] <= 0.04
    assert found["error"]["p50"] < 0.15
    assert found["reused"] > 0.5
    assert found["own_stretch"]["p50"] >= 0.9
    assert sorted({turn.asked_at for turn in played}) == [turn.asked_at for turn in played], "at their times, not at once"
    lab.engine.check()
    assert (lab.loop.running, lab.bridge.pins) == (0, 0)
    lab.clock.until(lab.clock.ns // 1000 + 3_600_000_000)
    ages = [row.age_s for row in lab.bridge.checkpoints(played[-1].agent.name)]
    assert ages
    assert min(ages) >= 3600, "states age, and leave, by the virtual clock"
    again, _ = VirtualAgents(virtual.Lab(SMALL, clock=UnsteadyClock(0.05, 2)), load).play(turns)
    assert [turn.ttft for turn in again] == [turn.ttft for turn in played], "the same figures on any machine"
