"""The load lab's client and its sums, and one short run of everything over real processes."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.load.agents import Asked, Behaviour, Crowd
from benchmarks.load.client import Closed, Socket
from benchmarks.load.goals import Goal, judge, of_turns
from benchmarks.load.lab import measured, off, summary, write_turns
from benchmarks.load.lone import Lone, interpolate, sizes_behind
from benchmarks.load.recorded import Turn
from benchmarks.load.server import LabServer, lab_server
from benchmarks.load.wire import late_by
from tests.fakes.server import running


def frame(kind: int, payload: bytes) -> bytes:
    """As a server writes it."""
    size = len(payload)
    if size < 126:
        return struct.pack("!BB", 0x80 | kind, size) + payload
    if size < 1 << 16:
        return struct.pack("!BBH", 0x80 | kind, 126, size) + payload
    return struct.pack("!BBQ", 0x80 | kind, 127, size) + payload


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 125, 126, 127, 300]), min_size=1, max_size=5) | st.just([65_535, 2, 65_536, 70_000]),
    cut=st.integers(1, 70_000),
)
def test_frames_of_any_size_arrive_whole_however_the_bytes_are_cut(sizes, cut) -> None:
    async def run() -> list[bytes]:
        got: list[bytes] = []
        socket = Socket(lambda payload: got.append(bytes(payload)))
        socket._open.set_result(None)
        data = b"".join(frame(1, bytes([i + 1]) * size) for i, size in enumerate(sizes))
        piece = max(cut, len(data) // 2000)
        for at in range(0, len(data), piece):
            socket.data_received(data[at : at + piece])
        return got

    assert asyncio.run(run()) == [bytes([i + 1]) * size for i, size in enumerate(sizes)]


async def test_a_refused_upgrade_is_told_with_its_status() -> None:
    with running() as server, pytest.raises(Closed, match="401"):
        await Socket.connect(server.port)


def test_lateness_is_measured_from_the_earliest_schedule_that_fits() -> None:
    assert late_by([10.0, 11.0, 12.5, 13.0], 1.0) == [0.0, 0.0, 0.5, 0.0]
    assert late_by([10.5, 11.0, 12.0], 1.0) == [0.5, 0.0, 0.0]


@given(sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=6, unique=True), size=st.integers(1, 20_000))
def test_interpolated_times_rise_with_the_size_and_hit_the_measured_points(sizes, size) -> None:
    value = interpolate([(s, s / 1000) for s in sizes])
    assert all(value(s) == pytest.approx(s / 1000) for s in sizes)
    assert value(size) <= value(size + 100) + 1e-9


def test_between_measured_contexts_and_beyond_them_a_lone_turn_takes_what_straight_lines_say() -> None:
    """A suffix s behind c costs 0.01 + s / 1000 + s * c / 1e6, which is straight in either."""

    def cost(suffix: int, behind: int) -> float:
        return 0.01 + suffix / 1000 + suffix * behind / 1e6

    contexts = (0, 2000, 8000)
    lone = Lone([(c, s, cost(s, c)) for c in contexts for s in sizes_behind(c, 10_000)], 10_000)
    assert list(lone.points) == [0, 2000, 8000]
    assert [suffix for suffix, _ in lone.points[8000]] == [64, 256, 1024, 2000], "as much as fits"
    for suffix, behind in ((64, 0), (500, 1000), (3000, 3000), (1500, 8000), (100, 9000), (2000, 2000)):
        assert lone.own_s(suffix, behind) == pytest.approx(cost(suffix, behind), rel=0.02)
    assert lone.usual_s(500) == pytest.approx(cost(500, 2000)), "the median over contexts"
    assert lone.usual_s(4000) == pytest.approx((cost(4000, 0) + cost(4000, 2000)) / 2), "where it fits"
    assert Lone([(0, 64, 0.1), (0, 64, 0.9), (0, 64, 0.2)], 100).own_s(64, 5000) == 0.2, "the median of several"


def test_a_summary_counts_late_turns_alarms_and_errors() -> None:
    turns = [
        Asked(0.0, 100, 0, 0.25, ttft=0.5, predicted=0.6, warned=False, warned_after=0.01, prompt=200, cached=100, ends="a"),
        Asked(0.0, 100, 90, 0.25, ttft=2.0, predicted=1.0, warned=False, warned_after=0.02, prompt=200, cached=50, ends="a"),
        Asked(0.0, 100, 0, 0.25, ttft=0.9, predicted=1.2, warned=True, warned_after=0.03, prompt=200, cached=0, ends="b"),
        Asked(0.0, 100, 0, 0.25, ends="vanished"),
    ]
    turns[0].gaps = [(0.6, 0.1), (0.8, 0.2)]
    assert turns[0].deadline_s == 1.0
    found = summary(turns, Lone([(0, 100, 0.5)], 1000))
    assert found["turns"] == 3
    assert found["ended"] == {"a": 2, "b": 1, "vanished": 1}
    assert found["met"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["missed_alarms"] == found["false_alarms"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["stretch"] == {"p50": 1.8, "p95": 4.0, "p99": 4.0}
    assert found["own_stretch"] == {"p50": 3.6, "p95": 8.0, "p99": 8.0}
    assert found["prediction_error"]["p50"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["reused"] == 0.25
    assert found["gap_s"] == {"p50": 0.1, "p99": 0.2, "max": 0.2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with lab_server(tmp_path_factory.mktemp("lab"), "instant") as running_server:
        yield running_server


def test_agents_that_cancel_vanish_and_come_back_get_answers_and_leave_nothing(server: LabServer, tmp_path: Path) -> None:
    behaviour = Behaviour(cancel=0.2, vanish=0.2, reconnect=0.2, edit=0.2)

    async def run() -> list[Asked]:
        crowd = Crowd(server.port, seed=3, behaviour=behaviour, most_context=6000, lone_s=lambda suffix, behind: 10.0)
        return await crowd.open(6, [Turn(0, 0, 80, 40), Turn(0, 0, 600, 5)], per_second=30.0, seconds=2.0)

    async def afterwards() -> list[Asked]:
        quiet = Crowd(server.port, seed=4, behaviour=Behaviour(), most_context=6000, lone_s=lambda suffix, behind: 10.0)
        return await quiet.alone([600, 80], 1, 5)

    asked = asyncio.run(run())
    ends = {turn.ends for turn in asked}
    assert len(asked) > 20
    assert ends <= {"completed", "incomplete", "cancelled", "vanished"}, ends
    assert {"incomplete", "cancelled", "vanished"} <= ends
    assert all(turn.predicted is not None for turn in asked if turn.ends == "incomplete")
    first, second = asyncio.run(afterwards())
    assert second.cached > first.suffix
    counters = settled(server)
    for name in ("turns", "pins", "cache_errors", "release_errors"):
        assert counters[f'agentserve_worker_counter{{name="{name}",worker="demo/0"}}'] == 0, name
    assert counters["agentserve_active_responses"] == counters["agentserve_open_sockets"] == 0


async def test_a_cancel_that_comes_too_late_is_no_end_of_the_next_turn(server: LabServer) -> None:
    crowd = Crowd(server.port, seed=5, behaviour=Behaviour(), most_context=6000)
    await crowd.alone([80], 1, 4)
    (session,) = crowd.sessions
    before = await session.ask(80, 4)
    session._socket.send(json.dumps({"type": "response.cancel", "response_id": before.response_id}))
    after = await session.ask(80, 4)
    session.close()
    assert (before.ends, after.ends) == ("incomplete", "incomplete")
    assert after.cached > before.cached, "it went on from the turn that was cancelled too late"


def test_a_lone_agent_is_asked_behind_contexts_of_any_length_and_a_crowd_begins_in_the_middle(server: LabServer) -> None:
    async def run() -> tuple[list[Asked], list[int], list[Asked], list[Asked]]:
        crowd = Crowd(
            server.port, seed=5, behaviour=Behaviour(), most_context=6000, lone_s=lambda new, behind: new + behind / 1e6
        )
        alone = await crowd.behind(4, lambda size: 2 if size == 64 else 1, contexts=3, pause_s=0.0)
        sessions = await crowd.grown(4)
        lengths = [session.length for session in sessions]
        apart = await crowd.apart([Turn(0, 0, 50, 4)], sessions, 4, rounds=2, pause_s=0.0)
        assert [session.length for session in sessions] == lengths, "they go on from where they were"
        per_second, same = await crowd.closed(4, [Turn(0, 0, 50, 4)], 0.2, sessions)
        assert per_second > 0
        assert same == [Turn(0, 0, 50, 4)] * len(same)
        asked = await crowd.open(4, same, per_second=20.0, seconds=0.5, sessions=sessions)
        return alone, lengths, apart, asked

    alone, lengths, apart, asked = asyncio.run(run())
    assert all(t.ends == "incomplete" for t in (*alone, *apart, *asked))
    # The real numbers of tokens are as the text has it, so a third more or less.
    none, some, most = sorted({t.behind for t in alone})
    assert none == 0 < 1000 < some < 3000 < most < 6000
    assert sorted(t.suffix for t in alone if t.behind == 0) == [64, 64, 256, 1024, 4096, 5996]
    assert sorted(t.suffix for t in alone if t.behind == most) == [64, 64, *sizes_behind(most + 1, 5996)[1:]]
    assert [t.behind for t in alone] != sorted(t.behind for t in alone), "contexts take turns"
    assert {(t.behind > 0, t.again) for t in alone} == {(False, 0), (True, 1)}, "contexts end with an answer of one token"
    assert all(0.6 * t.behind <= t.cached <= t.behind + 8 for t in alone if t.suffix == 64), "all contexts begin alike"
    assert len(set(lengths)) == 4
    assert [(t.suffix, t.new, t.lone_s) for t in apart] == [(50, 51, 51 + t.behind / 1e6) for t in apart]
    assert [t.behind + t.again for t in apart] == lengths * 2
    assert all(t.lone_s == t.suffix + t.again + t.behind / 1e6 for t in asked)
    later = [t for t in asked if t.again == 4]
    assert later
    computed = [t.prompt - t.cached - t.new for t in later]
    assert -20 < min(computed) <= max(computed) < 40, "the answer before is computed again, and the template's own tokens"
    assert max(t.cached for t in asked) > min(lengths) // 2


def test_lone_times_are_of_what_was_answered_and_how_far_others_are_from_them_is_told() -> None:
    points = [Asked(1.0, 64, 0, 300.0, ttft=t) for t in (0.1, 0.9, 0.2)] + [Asked(1.0, 256, 0, 300.0)]
    assert measured(points, 1000).points == {0: [(64, 0.2)]}
    with pytest.raises(RuntimeError, match="no turn was answered"):
        measured(points[3:], 1000)
    later, earlier, even = (Asked(1.0, 64, 0, 1.0, ttft=ttft) for ttft in (1.2, 0.7, 1.05))
    assert off([later, earlier, even, points[3]]) == {"turns": 3, "bias": 0.05, "p50": 0.2, "max": 0.3}
    assert off(points[3:]) == {}


def test_turns_are_written_line_by_line(tmp_path: Path) -> None:
    write_turns(tmp_path / "turns", [Asked(1.0, 64, 50, 0.25, ttft=0.1, prompt=100, cached=40), Asked(2.0, 256, 0, 0.5)])
    first, last = [json.loads(line) for line in (tmp_path / "turns").read_text().splitlines()]
    assert (first["behind"], first["restored"], first["computed"], first["ttft_s"]) == (50, 40, 60, 0.1)
    assert (first["deadline_s"], last["at_s"], last["ttft_s"]) == (1.0, 1.0, None)


def settled(server: LabServer) -> dict[str, float]:
    """Counters once the last turn has ended and its load report has come."""

    async def run() -> dict[str, float]:
        counters: dict[str, float] = {}
        for _ in range(1200):
            counters = server.counters()
            busy = counters["agentserve_active_responses"] + counters["agentserve_open_sockets"]
            if not busy and not counters.get('agentserve_worker_counter{name="turns",worker="demo/0"}', 1):
                break
            await asyncio.sleep(0.05)
        return counters

    return asyncio.run(run())


def test_each_goal_gets_a_verdict_and_what_was_not_measured_meets_none() -> None:
    text = io.StringIO()
    goals = [Goal("late", 0.2, 0.5), Goal("met", 0.98, 0.99, least=True), Goal("gap", None, 250)]
    assert judge(Console(file=text, width=80), goals) == {"late": True, "met": False, "gap": False}
    assert [line.split()[-2] for line in text.getvalue().splitlines()[3:6]] == ["met", "MET", "MET"]


def test_goals_of_turns_take_the_figures_of_both_labs() -> None:
    real = {
        "prediction_error": {"p50": 0.1, "p95": 0.5},
        "missed_alarms": 0.0,
        "false_alarms": 0.1,
        "first_word_ms": {"p99": 80.0},
    }
    assert [goal.met for goal in of_turns(real)] == [True, False, True, False, True]
    assert [goal.met for goal in of_turns({"error": {"p50": 0.2, "p95": 0.3}, "missed_alarms": 0.0, "false_alarms": 0.0})] == [
        False,
        True,
        True,
        True,
    ]
    assert not any(goal.met for goal in of_turns({"turns": 0}))
